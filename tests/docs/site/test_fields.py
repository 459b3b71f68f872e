"""The page of the configuration's fields: each is there, with its type, default and words."""

from typing import Literal

import pytest

from configs.load import FIELDS
from configs.section import Positive, Section
from docs.site.fields import Row, comments, page, rows

ROWS = {row.name: row for row in rows()}


class OuterConfig(Section, frozen=True):
    """A section of a test."""

    # The first,
    # told in two lines
    first: Positive = 3
    second: tuple[str, ...] = ()  # told beside it
    bare: float | None = None
    wrapped: Literal["", "a|b"] = (
        "a|b"  # told within
    )  # fmt: skip


def test_each_field_of_the_schema_has_words() -> None:
    assert {*ROWS} == {*FIELDS}
    assert [row.name for row in ROWS.values() if not row.words] == []


def test_words_are_the_comments_above_a_field_and_on_its_lines() -> None:
    told = comments(OuterConfig)
    assert told["first"] == "The first, told in two lines"
    assert told["second"] == "told beside it" and told["wrapped"] == "told within"
    assert told["bare"] == ""


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("learner.lr", "number ≥ 0.0", "`1e-06`"),
        ("replay.group_size", "integer ≥ 1", "`8`"),
        ("learner.kl_estimator", "`k1`, `k2`, `k3`, `k3++`, `k5` or null", "`null`"),
        ("environment.queries_per_turn", "integer ≥ 1 and ≤ 64", "`1`"),
        ("learner.betas", "list of number", "`[0.9, 0.95]`"),
        ("environment.tool_limits", "`key: value` lines", "empty"),
        ("model.path", "text", "empty"),
        ("actors.passage_template", "text", r"`'Doc {rank}(Title: {title}) {text}\n'`"),
    ],
)
def test_a_type_and_a_default_are_told(name: str, kind: str, default: str) -> None:
    assert (ROWS[name].kind, ROWS[name].default) == (kind, default)


def test_what_a_resumed_run_may_change_is_marked() -> None:
    assert ROWS["learner.total_steps"].changeable and not ROWS["learner.lr"].changeable


def test_a_row_names_the_pages_that_tell_of_its_field() -> None:
    text = page(
        {"a.md": "set `learner.lr=1`", "b.md": "learner.lr_schedule", "c.md": "learner.lr."}
    )
    (line,) = (each for each in text.splitlines() if each.startswith("| `learner.lr` |"))
    assert line.endswith("| [a](a.md), [c](c.md) |")


def test_a_name_of_one_word_is_looked_for_in_code_alone() -> None:
    text = page({"a.md": "keys of a dict", "b.md": "`keys=FOLDER`", "c.md": "the run's `keys`"})
    (line,) = (each for each in text.splitlines() if each.startswith("| `keys` |"))
    assert line.endswith("| [b](b.md), [c](c.md) |")


def test_a_table_s_cells_survive_their_text() -> None:
    found = [row for row in rows(OuterConfig, "of.") if row.name == "of.wrapped"]
    assert found == [Row("of.wrapped", "empty, `a|b`", "`a|b`", "told within", False)]
    lines = [each for each in page({}).splitlines() if each.startswith("| `")]
    assert len(lines) == len(FIELDS)
    assert {len(line.replace("\\|", "").split("|")) for line in lines} == {7}
