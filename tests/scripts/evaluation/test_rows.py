"""Rows outlive a kill: what was cut short is made again, what is whole is believed."""

import asyncio
import json
from pathlib import Path

import pytest

from actors.rewards.scorer import Rewards
from actors.rewards.transcript import Transcript
from configs.load import ConfigError
from configs.rewards import RewardsConfig
from replay.protocol import Lease
from replay.trajectory import Question, Sampling
from scripts.evaluation.rows import Asked, Rows, failed_row, row_of
from tests.scripts.evaluation.cases import NQ, lease_of, rollout_of, row

FIRST, SECOND = (Asked("search_r1", "nq", f"nq-{n}", 0) for n in range(2))


def written(path: Path) -> Path:
    with Rows(path) as rows:
        rows.add(row(FIRST, "answer 0"))
        rows.add(row(SECOND, None))
    return path


def test_rows_are_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    with Rows(written(tmp_path / "rows.jsonl")) as rows:
        assert list(rows.by_rollout) == [FIRST, SECOND]
        assert rows.by_rollout[FIRST] == row(FIRST, "answer 0")


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_line_cut_short_is_dropped_and_may_be_made_again(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "rows.jsonl")
    whole, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole + second[:kept])
    with Rows(path) as rows:
        assert list(rows.by_rollout) == [FIRST]
        rows.add(row(SECOND, None))
    assert path.read_bytes() == whole + second


def test_a_whole_line_that_is_no_row_is_refused_by_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl")
    path.write_bytes(path.read_bytes() + b'{"set": "nq"}\n')
    with (
        pytest.raises(ConfigError, match=r"rows\.jsonl:3: no row of an evaluation .*id"),
        Rows(path),
    ):
        pass


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    said = "another evaluation is writing there"
    with Rows(path), pytest.raises(ConfigError, match=said), Rows(path):
        pass
    with Rows(path) as rows:
        assert rows.by_rollout == {}


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with (
        pytest.raises(ConfigError, match=r"rows\.jsonl: Is a directory"),
        Rows(tmp_path / "rows.jsonl"),
    ):
        pass


def test_of_two_rows_of_a_rollout_the_later_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Rows(path) as rows:
        rows.add(failed_row(FIRST, NQ[0], "RetrievalTimeout: slow", 3))
        assert rows.by_rollout[FIRST].open
        rows.add(row(FIRST, "answer 0"))
    with Rows(path) as rows:
        assert rows.by_rollout[FIRST].answer == "answer 0" and not rows.by_rollout[FIRST].open


def test_a_failure_that_cannot_pass_is_not_tried_again() -> None:
    assert not failed_row(FIRST, NQ[0], "PromptTooLong: question 'nq-0' takes 9 tokens", 1).open


def test_a_row_says_all_there_is_to_say() -> None:
    rollout = rollout_of(lease_of(NQ[0]), "The answer 0 of x")
    found = row_of(FIRST, NQ[0], rollout, 2)
    assert (found.em, found.substring, found.f1) == (0.0, 1.0, pytest.approx(2 * 2 / 6))
    assert (found.turns, found.action_tokens, found.observation_tokens) == (2, 6, 4)
    assert (found.prompt_tokens, found.seconds, found.attempts) == (5, 0.5, 2)
    (search,) = found.searches
    assert (search.query, search.passage_ids) == ("who", ("p1", "p2"))


def test_no_answer_scores_nothing_whatever_would_match(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Rows(path) as rows:
        rows.add(row(FIRST, None))
    (line,) = (json.loads(line) for line in path.read_text().splitlines())
    assert (line["answer"], line["stop"], line["em"], line["f1"]) == (None, "turn_limit", 0.0, 0.0)


def test_an_answer_is_scored_as_training_scores_it() -> None:
    asked = Question("q", "who?", ("The", "kelu"))  # "The" normalises to nothing
    lease = Lease(1, 0, "eval", asked, Sampling(0.0))
    found = row_of(Asked("e", "s", "q", 0), asked, rollout_of(lease, "bore"), 1)
    assert (found.em, found.f1, found.substring) == (0.0, 0.0, 0.0)
    parts = asyncio.run(Rewards(RewardsConfig()).score(lease, "bore", made_up_never)).parts
    assert parts == {"em": found.em, "f1": found.f1, "substring": found.substring}


def made_up_never() -> Transcript:
    raise AssertionError("the answer is enough")
