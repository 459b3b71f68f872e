"""Every rollout gets a row: made, tried again, or given up by name; and a seed of its own."""

import asyncio
from pathlib import Path

import pytest

from actors.errors import EngineDead, GenerationFailed, PromptTooLong
from replay.protocol import Lease
from replay.trajectory import Sampling, Trajectory
from retrieval_server.protocol import (
    BadQuery,
    RetrievalDenied,
    RetrievalRefused,
    RetrievalTimeout,
    RetrievalUnreachable,
)
from scripts.eval_report import asked_of
from scripts.eval_rollouts import ATTEMPTS, IN_A_ROW, Evaluation, RollOut, SearchesFail
from scripts.eval_rows import Asked, Row, Rows
from tests.scripts.eval_cases import BY_ID, SETS, Answering

ASKED = asked_of(SETS, ["search_r1"], 2)["search_r1"]


def evaluate(
    path: Path, roll_out: RollOut, asked: list[Asked] = ASKED, deadline_s: float = 60.0
) -> dict[Asked, Row]:
    with Rows(path) as rows:
        evaluation = Evaluation(
            *(roll_out, BY_ID, rows, Sampling(1.0, 3)), in_flight=3, deadline_s=deadline_s
        )
        asyncio.run(evaluation.run(asked, lambda row: None))
    return rows.by_rollout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_every_question_and_sample_has_a_row(path: Path) -> None:
    rows = evaluate(path, Answering())
    assert set(rows) == set(ASKED) and len(ASKED) == 12
    assert [rows[each].em for each in ASKED] == [1.0, 1.0, 0.0, 0.0] * 3
    assert len(path.read_text().splitlines()) == 12


def test_seeds_are_of_question_and_sample_and_of_nothing_else(tmp_path: Path) -> None:
    whole, part = Answering(), Answering()
    evaluate(tmp_path / "whole.jsonl", whole)
    evaluate(tmp_path / "part.jsonl", part, ASKED[:6:-1])
    keys = {(lease.group_id, lease.sibling) for lease in whole.leases}
    assert len(keys) == 12 and {lease.sampling for lease in whole.leases} == {Sampling(1.0, 3)}
    assert {(lease.group_id, lease.sibling) for lease in part.leases} < keys
    assert {lease.kind for lease in whole.leases} == {"eval"}


def test_what_fails_is_tried_again_and_then_counts_as_failed(path: Path) -> None:
    errors: dict[str, list[Exception]] = {
        "nq-0": [GenerationFailed("aborted"), RetrievalTimeout("slow")],
        "nq-2": [RetrievalTimeout("slow")] * ATTEMPTS,
        "h-0": [PromptTooLong("takes 9 tokens")] * ATTEMPTS,
    }
    rows = evaluate(path, Answering(errors), ASKED[::2])
    by_id = {asked.id: row for asked, row in rows.items()}
    assert (by_id["nq-0"].attempts, by_id["nq-0"].em) == (3, 1.0)
    assert (by_id["nq-2"].attempts, by_id["nq-2"].failure) == (3, "RetrievalTimeout: slow")
    assert (by_id["h-0"].attempts, by_id["h-0"].failure) == (1, "PromptTooLong: takes 9 tokens")
    assert len(rows) == 6 and by_id["nq-2"].em == 0.0 and by_id["nq-2"].stop == ""


def test_a_rollout_that_takes_too_long_fails_by_that(path: Path) -> None:
    async def never(lease: Lease) -> Trajectory:
        return await asyncio.get_running_loop().create_future()

    (row,) = evaluate(path, never, ASKED[:1], deadline_s=0.01).values()
    assert row.failure == "TimeoutError: over 0.01 s (actors.rollout_deadline_s)"
    assert row.attempts == ATTEMPTS


@pytest.mark.parametrize(
    "error",
    [EngineDead("gone"), RetrievalUnreachable("nobody listens"), RetrievalDenied("401: token")],
)
def test_what_is_no_questions_fault_ends_all_and_fails_none(path: Path, error: Exception) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        evaluate(path, Answering({"h-1": [error]}))
    assert raised.group_contains(type(error))
    with Rows(path) as rows:
        assert rows.by_rollout and not any(row.failure for row in rows.by_rollout.values())
        assert not any(asked.id == "h-1" and not asked.sample for asked in rows.by_rollout)


def test_a_query_that_cannot_be_asked_is_final_and_one_that_a_server_refuses_is_not(
    path: Path,
) -> None:
    errors: dict[str, list[Exception]] = {
        "nq-0": [BadQuery("a query is no text")] * ATTEMPTS,
        "nq-2": [RetrievalRefused("answered 422")] * ATTEMPTS,
    }
    rows = evaluate(path, Answering(errors), ASKED[::2])
    by_id = {asked.id: row for asked, row in rows.items() if row.failure}
    assert {id: (row.attempts, row.open) for id, row in by_id.items()} == {
        "nq-0": (1, False),
        "nq-2": (ATTEMPTS, True),
    }


class Failing(Answering):
    """Fails by a search whatever is asked, but for what stands in `spared`."""

    def __init__(self, *spared: str) -> None:
        super().__init__()
        self.spared = spared

    async def __call__(self, lease: Lease) -> Trajectory:
        if lease.question.id in self.spared:
            return await super().__call__(lease)
        await asyncio.sleep(0)
        raise RetrievalTimeout("slow")


def test_searches_that_fail_rollout_after_rollout_end_all(path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        evaluate(path, Failing("nq-0"))
    said = rf"{IN_A_ROW} rollouts in a row failed .* by RetrievalTimeout: slow"
    assert raised.group_contains(SearchesFail, match=said)
    with Rows(path) as rows:
        failed = [row for row in rows.by_rollout.values() if row.failure]
    assert len(failed) == IN_A_ROW and all(row.open for row in failed)


def test_searches_that_fail_now_and_then_end_nothing(path: Path) -> None:
    rows = evaluate(path, Failing("nq-3"))  # in the midst of others
    assert len(rows) == 12 and sum(bool(row.failure) for row in rows.values()) == 10


def test_searches_that_never_succeed_end_a_small_evaluation_too(path: Path) -> None:
    with pytest.raises(SearchesFail, match="every rollout failed"):
        evaluate(path, Failing(), ASKED[:3])
    assert len(evaluate(path, Failing("nq-0"), ASKED[:3])) == 3
    evaluate(path, Failing(), ASKED[2:3])  # others of the environment have ended
