"""The overlap's benchmark: latencies and loops are what they are said to be; then a tiny run."""

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.policies.base import Completion
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from actors.runner import MeteredPolicy
from configs.retrieval import RetrievalConfig
from configs.schema import ActorsConfig, Config, ModelConfig, QuestionsConfig
from replay.trajectory import Question
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import Passage
from scripts.bench.harness import machine
from scripts.bench.overlap import bench as bench_overlap
from scripts.bench.overlap.bench import summary, tables
from scripts.bench.overlap.loops import Lessor, Loop, Seats, leases
from scripts.bench.overlap.plan import NO_LATENCY, TAIL, ZERO, Plan, Units
from scripts.bench.overlap.run import Bench, Cell, CellFailed, Timing, make_runner
from scripts.bench.overlap.server import Late, Latency, chance, serving
from scripts.data.build_index import IndexOptions, index

QUESTIONS = tuple(
    Question(f"q{n}", f"what is the mayor of bore {n} ?", ("kelu",)) for n in range(9)
)
BRIEFLY = Timing(0.1, 0.3)
LONG_ENOUGH = Timing(0.1, 1.2)  # for rollouts to end on a machine that stands still for a while
CONFIG = Config(
    model=ModelConfig(max_model_len=256, dtype="float32"),
    questions=QuestionsConfig(prompt="{question}"),
    retrieval=RetrievalConfig(cache_queries=0),
    actors=ActorsConfig(
        max_turns=2,
        max_action_tokens=16,
        passage_template="{text} ",
        observation_template=" <information> {passages} </information> ",
        correction="try again .",
        drain_deadline_s=0.01,
    ),
)


# ---- latency


def test_a_tail_has_its_percentiles() -> None:
    drawn = [TAIL.draw(chance(1, f"query {n}")) for n in range(20_000)]
    cuts = statistics.quantiles(drawn, n=100)
    assert cuts[49] == pytest.approx(0.2, rel=0.03) and cuts[98] == pytest.approx(2.0, rel=0.1)
    assert {Latency(0.05, 0.05).draw(chance(1, f"{n}")) for n in range(9)} == {0.05}
    assert {ZERO.draw(chance(1, f"{n}")) for n in range(9)} == {0.0}


def test_a_query_is_as_late_whoever_asks() -> None:
    first, again, other = (TAIL.draw(chance(1, query)) for query in ("a", "a", "b"))
    assert first == again != other and TAIL.draw(chance(2, "a")) != first


@pytest.mark.parametrize("latency", [TAIL, ZERO, Latency(1.0, 1.0), Latency(2e-5, 2e-4)])
def test_a_latency_survives_its_path(latency: Latency) -> None:
    assert Latency.of(latency.path) == latency


@pytest.mark.parametrize("bad", [(0.2, 0.1), (-1.0, 1.0), (0.0, 1.0)])
def test_impossible_latencies_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=rf"p50_s, p99_s = {bad[0]}, {bad[1]}"):
        Latency(*bad)


async def test_a_post_waits_for_the_longest_of_its_queries() -> None:
    slept: list[float] = []
    passed: list[tuple[str, bytes]] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        passed.append((scope["path"], (await receive()).get("body")))

    body = json.dumps({"queries": ["a", "b", "c"]}).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    late = Late(application, 5, sleep)
    for path in ("/0.2-2/retrieve", "/0-0/retrieve", "/health"):
        await late({"type": "http", "path": path}, receive, None)
    assert slept == [max(TAIL.draw(chance(5, query)) for query in "abc")]
    assert passed == [("/retrieve", body), ("/retrieve", body), ("/health", body)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The real server over one passage: its URL and process id."""
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text('{"id": "p", "contents": "the mayor of bore is kelu ."}\n')
    with serving(corpus, 0) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("latency", [ZERO, Latency(0.2, 0.2)])
async def test_the_server_is_as_late_as_its_path_says(
    server: tuple[str, int], latency: Latency
) -> None:
    async with RetrievalClient(f"{server[0]}/{latency.path}") as client:
        ((first, *_),) = await client.retrieve(["mayor of bore"], 2)
        assert first.contents == "the mayor of bore is kelu ."
        assert client.gauges()["retrieval/latency_p50_s"] >= latency.p50_s


@pytest.mark.slow
async def test_an_index_is_served_as_a_corpus_is(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "p", "contents": "the mayor of bore is kelu ."}\n')
    index(IndexOptions(corpus=corpus, out=tmp_path / "index"))
    with serving(tmp_path / "index", 0) as (url, _):
        async with RetrievalClient(f"{url}/{ZERO.path}") as client:
            ((first, *_),) = await client.retrieve(["mayor of bore"], 2)
    assert first.contents == "the mayor of bore is kelu ."


# ---- loops


class Searcher:
    """An engine that searches, then answers; it remembers which turn began when."""

    def __init__(self, tokenizer: Any) -> None:
        self.begun = list[int]()
        self._actions = [
            np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
            for text in ("<search> mayor of bore </search>", "<answer> kelu </answer>")
        ]
        (self._seen,) = tokenizer.encode("<information>", add_special_tokens=False)

    async def complete(self, tokens: Sequence[int], **_: Any) -> Completion:
        self.begun.append(int(self._seen in tokens))
        ids = self._actions[self.begun[-1]]
        await asyncio.sleep(0.001)
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros_like(ids), "stop")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class Held:
    """A retriever whose first search is answered when told to."""

    def __init__(self) -> None:
        self.free, self.asked = asyncio.Event(), 0

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.asked += 1
        if self.asked == 1:
            await self.free.wait()
        return [[Passage("p", "the mayor of bore is kelu .", 1.0)] for _ in queries]


class Stage:
    """Three rollouts in flight, or in a batch, under the real runner; the first search is held."""

    def __init__(self, loop: Loop, tokenizer: Any) -> None:
        self.policy, self.held = Searcher(tokenizer), Held()
        self.lessor = Lessor(leases(QUESTIONS, 0, 0), 3, loop != "continuous")
        prompter = Prompter(tokenizer, CONFIG.questions, CONFIG.actors)
        play = partial(
            rollout,
            prompter=prompter,
            rewards=Rewards.open(CONFIG),
            config=CONFIG,
            actor_id="bench",
        )
        meter = MeteredPolicy(self.policy)
        cell = Cell(loop, ZERO, 3)
        self.runner = make_runner(cell, play, self.lessor, meter, self.held, CONFIG)

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(self.runner.run())
            yield
            self.runner.stop("measured")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until that is so, and whatever can follow from it has begun."""
        while not condition():
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)


async def test_the_continuous_loop_goes_on_while_one_searches(word_tokenizer: Any) -> None:
    stage = Stage("continuous", word_tokenizer)
    async with stage.playing():
        await stage.lessor.settled(0.0, 7)
    assert 0 not in {trajectory.group_id for trajectory in stage.lessor.done[:7]}


async def test_the_sync_loop_waits_for_the_whole_batch(word_tokenizer: Any) -> None:
    stage = Stage("sync", word_tokenizer)
    async with stage.playing():
        await stage.until(lambda: len(stage.lessor.done) == 2)
        assert sorted(stage.policy.begun) == [0, 0, 0, 1, 1]  # the others answered by themselves
        stage.held.free.set()
        await stage.lessor.settled(0.0, 3)
    ids = [trajectory.group_id for trajectory in stage.lessor.done]
    assert ids[2] == 0 and sorted(ids[:3]) == [0, 1, 2]


async def test_the_lock_step_loop_takes_its_turns_together(word_tokenizer: Any) -> None:
    stage = Stage("lockstep", word_tokenizer)
    async with stage.playing():
        await stage.until(lambda: stage.held.asked == 3)
        assert stage.policy.begun == [0, 0, 0]  # nobody answers while one searches
        stage.held.free.set()
        await stage.lessor.settled(0.0, 6)
    assert stage.policy.begun[:12] == [0, 0, 0, 1, 1, 1] * 2


async def test_seats_are_filled_by_whoever_wants_to_generate(word_tokenizer: Any) -> None:
    seats = Seats(Searcher(word_tokenizer), 2)
    asked = partial(seats.complete, [1], temperature=1.0, seed=0, max_tokens=9, stops=())
    before, begun = seats.filled_s(), time.monotonic()
    await asyncio.gather(*(asked() for _ in range(5)))  # as many as there are seats, or more
    full, lasted = seats.filled_s() - before, time.monotonic() - begun
    await asyncio.sleep(0.01)
    assert 0.001 <= full <= lasted and seats.filled_s() - before == full


# ---- cells, with an engine that is none


def make_bench(policy: Any, tokenizer: Any, server: tuple[str, int], config: Config) -> Bench:
    prompter = Prompter(tokenizer, config.questions, config.actors)
    return Bench(config, policy, prompter, QUESTIONS, server)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["continuous", "sync", "lockstep"])
async def test_a_cell_is_measured_on_a_real_server(
    server: tuple[str, int], loop: Loop, word_tokenizer: Any
) -> None:
    cell = Cell(loop, Latency(0.05, 0.05), 4)
    bench = make_bench(Searcher(word_tokenizer), word_tokenizer, server, CONFIG)
    figures = await bench.measure(cell, LONG_ENOUGH, 0)
    assert figures["tokens_per_s"] > 0 and figures["waited_p50_s"] >= 0.05
    assert figures["searches"] == figures["rollouts"]
    assert loop == "continuous" or figures["rollouts"] % 4 == 0


async def test_a_failed_search_ends_the_cell(word_tokenizer: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = msgspec.structs.replace(CONFIG, retrieval=RetrievalConfig(timeout_s=0.2))
    bench = make_bench(Searcher(word_tokenizer), word_tokenizer, (url, os.getpid()), config)
    with pytest.raises(CellFailed, match=r"rollouts=2.*question 'q0': RetrievalUnreachable"):
        await bench.measure(Cell("continuous", ZERO, 2), BRIEFLY, 0)


# ---- a tiny run


@pytest.mark.slow
@pytest.mark.soak("benchmarks")
@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(300)
async def test_a_tiny_run(
    vllm_policy: Any, tagged_tokenizer: Any, server: tuple[str, int], tmp_path: Path
) -> None:
    names = (NO_LATENCY, "overlap_200ms", "overlap_tail", "sync_overlapped_tail", "lockstep_tail")
    plan = Plan(names, 4, 2, (1, 2), (2,), (2,), LONG_ENOUGH, LONG_ENOUGH, 1)
    by_heart = msgspec.structs.replace(CONFIG.actors, correction=" try again")
    alike = QuestionsConfig(prompt="what is")
    config = msgspec.structs.replace(CONFIG, questions=alike, actors=by_heart)
    units = Units(plan, [], lambda _: None, lambda _: None)
    await units.measure(make_bench(vllm_policy, tagged_tokenizer, server, config))
    found = summary(units, plan)
    assert all(row["ratio"] > 0 and row["searches_per_rollout"] > 0 for row in found["rows"])
    assert all(row["cpu"]["engine"] > 0 for row in found["rows"])
    waited = {row["name"]: row["waited_p99_s"] for row in found["rows"]}
    assert waited["overlap_200ms"] >= 0.2  # who asks what another is asking waits less
    found["machine"] = machine() | {"vllm": bench_overlap.vllm_version()}
    assert [table.row_count for table in tables(found, plan)] == [4, 2]
    bench_overlap.write(tmp_path / "found.json", plan, units.all, found)
    assert len(bench_overlap.held(tmp_path / "found.json", plan)) == len(units.all)
