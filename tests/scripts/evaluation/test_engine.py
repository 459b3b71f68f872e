"""The engine of an evaluation: every rollout gets a row and a seed of its own; early ends."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock, Mock

import pytest

from actors.errors import EngineDead, EngineUnusable, GenerationFailed, PromptTooLong
from actors.policies.engine import Scratch
from actors.policies.vllm import VllmPolicy
from configs.load import parse
from configs.runtime.process import make_socket_dir, socket_dir
from configs.runtime.signals import Interrupt
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Sampling, Trajectory
from retrieval_server.protocol import (
    BadQuery,
    RetrievalDenied,
    RetrievalRefused,
    RetrievalTimeout,
    RetrievalUnreachable,
)
from scripts.evaluation import engine
from scripts.evaluation.engine import (
    ATTEMPTS,
    IN_A_ROW,
    Evaluation,
    RollOut,
    SearchesFail,
    Stopped,
    _beside,
    _ending,
    _scratch,
    run,
    spread,
    unless,
)
from scripts.evaluation.rows import Asked, Row, Rows, asked_of
from tests.scripts.ask.asking import endpoint, refuse
from tests.scripts.evaluation.cases import BY_ID, NQ, SETS, Answering, lease_of


async def for_ever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def dies() -> NoReturn:
    await asyncio.sleep(0)
    raise EngineDead("the engine's process is gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_work_and_says_so(number: signal.Signals) -> None:
    before, ended = signal.getsignal(number), []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await for_ever()
        finally:
            ended.append(True)

    with Interrupt(polled=True) as interrupt, pytest.raises(asyncio.CancelledError):
        asyncio.run(unless(interrupt, work()))
    assert interrupt.cause == number.name and ended
    assert signal.getsignal(number) is before


def test_a_second_signal_leaves_at_once() -> None:
    async def work() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with Interrupt(polled=True) as interrupt, pytest.raises(KeyboardInterrupt):
        asyncio.run(unless(interrupt, work()))


async def test_a_dead_engine_ends_what_waits_for_it() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await _beside([dies, for_ever], for_ever())
    assert isinstance(_ending(raised.value), EngineDead)


async def test_work_that_is_done_ends_the_watches() -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()

    await _beside([for_ever], work())
    assert done.is_set()


def test_an_error_of_ours_is_not_taken_for_theirs() -> None:
    mixed = ExceptionGroup("", [EngineDead("gone"), ExceptionGroup("", [TypeError("a bug")])])
    assert _ending(mixed) is None
    assert str(_ending(ExceptionGroup("", [mixed.exceptions[0]]))) == "gone"


async def ask(name: str, roll_outs: Sequence[RollOut]) -> None:
    raise AssertionError


async def test_engines_share_the_work_a_rollout_at_a_time() -> None:
    first, second, gate = Answering(), Answering(), asyncio.Event()

    async def slow(lease: Lease) -> Trajectory:
        await gate.wait()
        return await first(lease)

    roll_out = spread([slow, second])
    leases = [lease_of(question) for question in NQ]
    held = asyncio.create_task(roll_out(leases[0]))
    await asyncio.sleep(0)
    for lease in leases[1:]:
        await roll_out(lease)
    gate.set()
    await held
    assert [len(each.leases) for each in (first, second)] == [1, 3]
    await asyncio.gather(*map(roll_out, leases))
    assert [len(each.leases) for each in (first, second)] == [3, 5]


@pytest.mark.parametrize(("engines", "started"), [(0, 2), (1, 1), (3, None)])
async def test_as_many_engines_start_as_are_asked_for_or_fit(
    engines: int, started: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter((SimpleNamespace(close=Mock(), set_policy_version=AsyncMock()),) * 2)

    async def start(_: Config) -> Any:
        if (policy := next(free, None)) is None:
            raise EngineUnusable("no GPU is free")
        return policy

    monkeypatch.setattr(VllmPolicy, "start", start)
    monkeypatch.setattr(engine.gpu_memory, "totals", lambda: [1 << 34] * 4)
    with ExitStack() as stack:
        if started is None:
            with pytest.raises(EngineUnusable, match="no GPU is free"):
                await engine._start(Config(), engines, stack)
        else:
            assert len(await engine._start(Config(), engines, stack)) == started


async def test_searches_that_are_refused_end_it_before_an_engine_starts(tmp_path: Path) -> None:
    todo = {"rag": [Asked("rag", "nq", "nq-0", 0)]}
    async with endpoint(refuse(401, "who?")) as other:
        config = parse("", [f"retrieval.url={other.url}", f"run_dir={tmp_path}"], "test")
        with pytest.raises(Stopped, match=r"was refused: .* 401: retrieval\.token_file"):
            await run({"rag": config}, todo, ask, tmp_path, Interrupt(polled=True))
    assert [body["topk"] for body in other.bodies] == [3]
    assert not socket_dir(str(tmp_path)).exists()


async def test_the_cause_of_a_failed_engine_is_read_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: Config) -> NoReturn:
        raise EngineUnusable("see root cause above")

    monkeypatch.setattr(VllmPolicy, "start", start)
    log = tmp_path / "engine.log"
    log.write_text("WARNING\n(EngineCore pid=1) ERROR ValueError: too long\nbye\n")
    todo = {"no_search": [Asked("no_search", "nq", "nq-0", 0)]}
    config = parse("", ["environment.name=no_search", f"run_dir={tmp_path}"], "test")
    with pytest.raises(Stopped) as stopped:
        await run({"no_search": config}, todo, ask, tmp_path, Interrupt(polled=True))
    assert str(stopped.value) == f"see root cause above: ValueError: too long; see {log}"


def test_what_a_killed_engine_left_goes_with_the_next_start(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    left = make_socket_dir(run_dir) / "engine-left"
    left.mkdir()
    with _scratch(run_dir):
        scratch = Scratch(run_dir)
        with scratch.entered():
            mine = Path(os.environ["TMPDIR"])
        assert mine.parent == socket_dir(run_dir) and not left.exists()
    assert not mine.exists() and not socket_dir(run_dir).exists()
    scratch.remove()


ASKED = asked_of(SETS, ["search_r1"], 2)["search_r1"]


def evaluate(
    path: Path, roll_out: RollOut, asked: list[Asked] = ASKED, deadline_s: float = 60.0
) -> dict[Asked, Row]:
    with Rows(path) as rows:
        evaluation = Evaluation(
            roll_out, BY_ID, rows, Sampling(1.0, 3), in_flight=3, deadline_s=deadline_s
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
    attempts = []

    async def never(lease: Lease) -> Trajectory:
        attempts.append(lease.attempt)
        return await asyncio.get_running_loop().create_future()

    (row,) = evaluate(path, never, ASKED[:1], deadline_s=0.01).values()
    assert attempts == [0, 1, 2]  # the same seeds would take as long again
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
