"""A recorded run answers in the retrieval server's place: the same passages, or a named error."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.environments.base import shown_order
from actors.policies.base import Completion, Stops
from actors.prompt import Prompter
from actors.retrieval import RecordedRetriever, open_retrieval
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.load import ConfigError
from configs.retrieval import LiveConfig, RetrievalConfig
from configs.schema import Config, ReplayConfig
from replay.codec import encode_trajectory
from replay.log.compaction import compact
from replay.log.event_log import FILE_NAME
from replay.log.history import Searched
from replay.log.records import StepsCommitted
from replay.protocol import Deliver, Lease
from replay.trajectory import Question, Search, TokenSequence, Trajectory
from retrieval_server.client import RetrievalClient
from retrieval_server.index.build import build_bm25
from retrieval_server.protocol import NotRecorded
from tests.replay.conftest import record_searches
from tests.retrieval_server.conftest import CONTENTS, serving
from tests.scripts.conftest import RecordedRun

QUERIES = ("mayor of bore", "river xanu", "the", "capital", "nowhere")
QUESTION = Question("q-1", "who?", ("kelu",))


class Seeded:
    """Says what the turn's seed chooses: mostly a search, sometimes an answer or nonsense."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        words = [*(f"<search> {query} </search>" for query in QUERIES), "<answer> kelu </answer>"]
        text = [*words, "try again"][seed % 7]
        ids = np.asarray(self.tokenizer.encode(text), np.int32)
        return Completion(ids, -ids.astype(np.float32), np.zeros_like(ids), "stop")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The passages of the test server, as a file."""
    path = tmp_path / "corpus.jsonl"
    rows = ({"id": f"p{n}", "contents": text} for n, text in enumerate(CONTENTS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(config_for: Any, corpus: Path) -> Config:
    """The recorded run's configuration: shuffled passages of the corpus, three a search."""
    made: Config = config_for(2000, 3, max_action_tokens=40, shuffle_passages=True)
    retrieval = RetrievalConfig(corpus=str(corpus), top_k=3)
    return msgspec.structs.replace(made, retrieval=retrieval)


async def roll_out(
    leases: Sequence[Lease], retriever: Any, config: Config, tokenizer: Any
) -> list[Trajectory]:
    """Every lease, side by side."""
    policy, rewards = Seeded(tokenizer), Rewards.open(config)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    rollouts = (
        rollout(
            lease,
            policy=policy,
            retriever=retriever,
            prompter=prompter,
            rewards=rewards,
            config=config,
            actor_id="actor",
        )
        for lease in leases
    )
    return await asyncio.gather(*rollouts)


def without_clocks(trajectory: Trajectory) -> bytes:
    """All of a trajectory but how long things took."""
    replace = msgspec.structs.replace
    turns = tuple(
        replace(
            turn,
            searches=tuple(replace(search, seconds=0.0) for search in turn.searches),
            **dict.fromkeys(("started_at", "first_token_at", "ended_at"), 0.0),
        )
        for turn in trajectory.turns
    )
    only = TokenSequence(trajectory.prompt_tokens, turns)
    return encode_trajectory(replace(trajectory, sequences=(only,), timings={}))


def replaying(config: Config, run: Path, **changes: Any) -> Config:
    """The configuration of who searches again."""
    changes = {"recorded": str(run)} | changes
    return msgspec.structs.replace(
        config, retrieval=msgspec.structs.replace(config.retrieval, **changes)
    )


@pytest.mark.parametrize("shuffled", [True, False])
async def test_rollouts_are_replayed_to_the_bit_without_a_server(
    tmp_path: Path, config: Config, bpe_tokenizer: Any, shuffled: bool
) -> None:
    actors = msgspec.structs.replace(config.actors, shuffle_passages=shuffled)
    config = msgspec.structs.replace(config, actors=actors)
    (tmp_path / "run").mkdir()
    run = RecordedRun(tmp_path / "run", config, 1 << 20)
    leases = run.leases[:64]
    with serving() as url:
        async with RetrievalClient(url) as server:
            made = await roll_out(leases, server, config, bpe_tokenizer)
            known = {query: (await server.retrieve([query], 3))[0] for query in QUERIES}
    for each in made:
        run.send("actor", Deliver("actor", each.group_id, each.sibling, encode_trajectory(each)))
    run.log.close()
    async with open_retrieval(replaying(config, run.path, corpus="")) as recorded:
        again = await roll_out(leases, recorded, config, bpe_tokenizer)
        for query, passages in known.items():
            for top_k in (1, 2, 3):
                (found,) = await recorded.retrieve([query], top_k)
                assert [(p.id, p.contents) for p in found] == [
                    (p.id, p.contents) for p in passages[:top_k]
                ]
    assert [*map(without_clocks, again)] == [*map(without_clocks, made)]
    searches = [search for each in made for turn in each.turns for search in turn.searches]
    shown = {s.passage_ids for s in searches if s.query == "the"}
    assert {s.query for s in searches} == set(QUERIES) and (len(shown) > 2) == shuffled
    assert {s.status for s in searches} == {"ok", "empty"}


def searched(*searches: Search, group_id: int = 1, sibling: int = 0) -> Searched:
    """A rollout with a turn for each search."""
    turns = tuple((search,) for search in searches)
    return Searched(1.0, "actor", "train", QUESTION, group_id, sibling, 3, turns)


def found(query: str, *ids: str) -> Search:
    return Search(query, ids, 0.1, "ok" if ids else "empty")


@pytest.fixture
def plain(config: Config) -> Config:
    """Not shuffled."""
    actors = msgspec.structs.replace(config.actors, shuffle_passages=False)
    return msgspec.structs.replace(config, actors=actors)


def opened(config: Config, run: Path, *rollouts: Searched, **changes: Any) -> RecordedRetriever:
    record_searches(run, config, *rollouts)
    return RecordedRetriever.open(replaying(config, run, **changes))


def refusal(config: Config, run: Path, *rollouts: Searched, **changes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        opened(config, run, *rollouts, **changes)
    return str(raised.value)


async def test_an_empty_result_is_one_and_a_skipped_search_is_none(
    tmp_path: Path, plain: Config
) -> None:
    skipped = Search("a", (), 0.0, "skipped")
    known = opened(plain, tmp_path / "run", searched(skipped, found("b"), found("c", "p1", "p0")))
    (nothing,), (two,) = await known.retrieve(["b"], 3), await known.retrieve(["c"], 3)
    assert nothing == [] and [passage.id for passage in two] == ["p1", "p0"]
    with pytest.raises(NotRecorded):
        await known.retrieve(["a"], 3)


async def test_an_unknown_query_is_named_with_what_is_known(tmp_path: Path, plain: Config) -> None:
    run = tmp_path / "run"
    known = opened(plain, run, searched(found("b", "p0"), found("c")))
    with pytest.raises(NotRecorded) as raised:
        await known.retrieve(["b", "B"], 2)
    said = str(raised.value)
    assert "query 'B' with top_k 2 is not on record" in said and str(run) in said
    assert "2 queries with top_k 3" in said and "leave retrieval.recorded empty" in said
    with pytest.raises(NotRecorded, match="with top_k 4"):
        await known.retrieve(["b"], 4)
    assert known.gauges() == {
        "retrieval/requests": 2.0,
        "retrieval/errors": 2.0,
        "retrieval/recorded_queries": 2.0,
    }


def test_an_unknown_query_fails_the_rollout(tmp_path: Path, plain: Config, stage: Any) -> None:
    stage.retriever = opened(plain, tmp_path / "run", searched(found("bore", "p0")))
    with pytest.raises(NotRecorded):
        stage.play("<search> kelu </search>", "<answer> kelu </answer>")


def test_results_that_contradict_each_other_are_named(tmp_path: Path, plain: Config) -> None:
    first, later = searched(found("who", "p0", "p1")), searched(found("who", "p0"), sibling=1)
    said = refusal(plain, tmp_path / "run", first, later)
    assert "query 'who' brought passages 'p0', 'p1' first and passages 'p0' later" in said


def test_orders_that_only_shuffling_tells_apart_do_not_contradict(
    tmp_path: Path, config: Config, plain: Config
) -> None:
    best = ("p2", "p0", "p1")
    shown = [tuple(best[rank] for rank in shown_order(3, 1, n, 0, 3)) for n in range(8)]
    rollouts = [searched(found("who", *ids), sibling=n) for n, ids in enumerate(shown)]
    known = opened(config, tmp_path / "run", *rollouts)
    (passages,) = asyncio.run(known.retrieve(["who"], 3))
    assert tuple(passage.id for passage in passages) == best and len(set(shown)) > 2
    known = opened(plain, tmp_path / "other", *rollouts)  # equal scores may swap; the first counts
    (passages,) = asyncio.run(known.retrieve(["who"], 3))
    assert tuple(passage.id for passage in passages) == shown[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 5}, "retrieval.top_k = 5: the run in .* asked for 3: give at most that"),
        ({"corpus": "/none"}, "retrieval.corpus = '/none': '/none' does not exist"),
        ({"recorded": "/none"}, "retrieval.recorded = '/none': .*No such file.* name the dir"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    tmp_path: Path, plain: Config, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(plain, tmp_path / "run", searched(found("a", "p0")), **changes)


def test_a_passage_that_the_corpus_lacks_is_named(tmp_path: Path, plain: Config) -> None:
    said = refusal(plain, tmp_path / "run", searched(found("a", "p0", "p7"), found("b", "p9")))
    assert "does not hold passages 'p7', 'p9'" in said and "retrieval.corpus=FILE" in said
    external = replaying(plain, Path(), recorded="", corpus="", url=("http://host",))
    record_searches(tmp_path / "external", external, searched(found("a", "p0")))
    with pytest.raises(ConfigError, match="names no corpus of its own: say where"):
        RecordedRetriever.open(replaying(plain, tmp_path / "external", corpus=""))
    RecordedRetriever.open(replaying(plain, tmp_path / "external"))  # this one says where


def test_the_corpus_is_that_of_the_recorded_run_s_index(
    tmp_path: Path, plain: Config, corpus: Path
) -> None:
    build_bm25(corpus, tmp_path / "index", lambda *_: None)
    indexed = replaying(plain, Path(), recorded="", corpus="", index=str(tmp_path / "index"))
    run = record_searches(tmp_path / "run", indexed, searched(found("a", "p1")))
    known = RecordedRetriever.open(replaying(plain, run, corpus=""))
    ((passage,),) = asyncio.run(known.retrieve(["a"], 1))
    assert passage.contents == CONTENTS[1]


def test_an_id_that_two_passages_have_is_refused(
    tmp_path: Path, plain: Config, corpus: Path
) -> None:
    corpus.write_text(corpus.read_text() * 2)
    said = refusal(plain, tmp_path / "run", searched(found("a", "p1")))
    assert f"{corpus}:6: id = 'p1': another passage has it too" in said


def test_a_run_that_searched_the_web_has_a_record_of_its_own(tmp_path: Path, plain: Config) -> None:
    live = LiveConfig(price_usd=0.001, budget_usd=1.0)
    web = RetrievalConfig(kind="serper", live=live, top_k=3)
    record_searches(tmp_path / "run", msgspec.structs.replace(plain, retrieval=web))
    with pytest.raises(ConfigError) as raised:
        RecordedRetriever.open(replaying(plain, tmp_path / "run"))
    answers = tmp_path / "run" / "live" / "answers.jsonl"
    assert f"retrieval.kind=serper retrieval.live.replay={answers}" in str(raised.value)


def test_a_compacted_run_is_refused(tmp_path: Path, plain: Config) -> None:
    replay = ReplayConfig(groups_per_step=2, group_size=2, max_staleness=0)
    (tmp_path / "run").mkdir()
    run = RecordedRun(tmp_path / "run", msgspec.structs.replace(plain, replay=replay), 1000)
    run.train(0)
    run.append(StepsCommitted(2.0, 1, 1))
    run.train(1)
    run.log.close()
    taken = sum(change.payloads for change in compact(run.path / FILE_NAME))
    assert taken > 0
    with pytest.raises(ConfigError, match=f"{taken} rollouts were compacted away .* a copy from"):
        RecordedRetriever.open(replaying(plain, run.path))
