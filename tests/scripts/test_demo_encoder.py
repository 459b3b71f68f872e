"""The demo's encoder: what it is trained on, what it leaves, and what it finds through the real
index and the real server's process.
"""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from configs.schema import RetrievalConfig
from retrieval_server import manifest
from retrieval_server.encoder import Encoder
from retrieval_server.opening import open_index
from retrieval_server.usage import usage_of
from scripts import demo_encoder
from scripts.demo_encoder import PASSAGE, QUERY, TOP_K, Pupil, Recipe, also_right, ask, ranks
from scripts.demo_task import COUNTRIES, HELD_OUT
from scripts.demo_world import Fact, World, make_world, split

SEED = 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads spin against each other on a small machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def world() -> World:
    """The demo's."""
    return make_world(SEED, COUNTRIES)


@pytest.fixture(scope="module")
def held_out(world: World) -> tuple[Fact, ...]:
    """Facts whose names training never sees."""
    return split(world, HELD_OUT, SEED)[1].facts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where encoder and index are kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def encoder(cache: Path) -> Path:
    """The trained encoder's folder."""
    return demo_encoder.prepare(cache, SEED, print)


@pytest.fixture(scope="module")
def index(world: World, cache: Path, encoder: Path) -> dict[str, Path]:
    """The demo's corpus and its dense index."""
    corpus = cache / "corpus.jsonl"
    rows = [{"id": f"fact-{n}", "contents": f.passage} for n, f in enumerate(world.facts)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "corpus": corpus,
        "index": demo_encoder.prepare_index(cache, SEED, corpus, print),
    }


@pytest.fixture(scope="module")
def server(index: dict[str, Path], cache: Path) -> Iterator[str]:
    """The URL of a server's process over that index."""
    config = cache / "config.yaml"
    config.write_text("retrieval:\n" + "".join(f"  {k}: {v}\n" for k, v in index.items()))
    process = subprocess.Popen(
        [sys.executable, "-m", "retrieval_server.worker", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        log = "".join(_until_serving(process))
        told = re.search(r"serving 1440 passages on (\S+)", log)
        assert told, log
        yield told[1]
    finally:
        process.kill()
        process.communicate()


def _until_serving(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    for line in process.stderr:
        yield line
        if " serving " in line:
            return


def answers(url: str, queries: list[str]) -> list[list[str]]:
    """What the server answers to each query."""
    body = {"queries": queries, "topk": TOP_K, "return_scores": True}
    reply = httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=30).json()
    return [[hit["document"]["contents"] for hit in row] for row in reply["result"]]


def plain(facts: Sequence[Fact]) -> list[str]:
    """What a skilled policy asks for them."""
    return [f"{fact.relation} of {fact.subject}" for fact in facts]


def test_the_index_finds_held_out_facts_that_stand_among_all_the_others(
    world: World, index: dict[str, Path], held_out: tuple[Fact, ...]
) -> None:
    documents, opened = open_index(RetrievalConfig(**{k: str(v) for k, v in index.items()}))
    assert len(documents) == len(world.facts) == 1440 and len(held_out) == 360
    rows = opened.search(plain(held_out), TOP_K)
    found = [
        fact.passage in [documents[hit.position].contents for hit in row]
        for fact, row in zip(held_out, rows, strict=True)
    ]
    assert sum(found) >= 0.95 * len(found)


@pytest.mark.slow
def test_the_server_finds_held_out_facts(server: str, held_out: tuple[Fact, ...]) -> None:
    info = httpx.get(f"{server}/info", trust_env=False).json()
    assert "faiss" in info["index"] and demo_encoder.NAME in info["index"]
    rows = answers(server, plain(held_out))
    found = [fact.passage in row for fact, row in zip(held_out, rows, strict=True)]
    assert len(found) == 360 and sum(found) >= 0.95 * len(found)


@pytest.mark.slow
def test_two_hops_asked_at_once_are_answered_with_the_first(server: str, world: World) -> None:
    chains = split(world, HELD_OUT, SEED)[1].chains(2)
    rows = answers(server, [chain.topic for chain in chains])
    found = [chain.facts[0].passage in row for chain, row in zip(chains, rows, strict=True)]
    assert sum(found) >= 0.9 * len(found)


def test_training_names_nothing_that_is_held_out(world: World) -> None:
    training, held_out = split(world, HELD_OUT, SEED)
    names = [{name for f in part.facts for name in (f.subject, f.value)}
             for part in (training, held_out)]  # fmt: skip
    assert len(training.facts) == 1080 and not names[0] & names[1]


def test_an_untrained_encoder_does_not_find_them(
    world: World, held_out: tuple[Fact, ...], tmp_path: Path
) -> None:
    Pupil(Recipe(), SEED).save(tmp_path)
    assert (ranks(Encoder(tmp_path), world, held_out) < TOP_K).mean() < 0.9


def test_the_loss_falls_and_depends_on_the_seed_alone(world: World) -> None:
    facts = world.facts[:48]

    def losses() -> list[float]:
        pupil, rng = Pupil(Recipe(), SEED), random.Random(SEED)
        return [pupil.step(facts, rng, 3e-3) for _ in range(12)]

    first = losses()
    assert first[-1] < 0.5 * first[0] and first == losses()


def test_an_encoder_that_finds_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(demo_encoder.EncoderFailed, match="held-out facts first"):
        demo_encoder.make(tmp_path, SEED, print, replace(Recipe(), steps=1, found=0.95))


def test_what_is_cached_is_not_made_again(
    cache: Path, encoder: Path, index: dict[str, Path]
) -> None:
    said: list[str] = []
    again = demo_encoder.prepare_index(cache, SEED, index["corpus"], said.append)
    assert again == index["index"]
    assert said == [f"cached in {encoder.parent}", f"cached in {index['index']}"]


def test_another_corpus_has_an_index_of_its_own(
    cache: Path, index: dict[str, Path], tmp_path: Path
) -> None:
    fewer = tmp_path / "corpus.jsonl"
    fewer.write_text("".join(index["corpus"].read_text().splitlines(keepends=True)[:12]))
    other = demo_encoder.prepare_index(cache, SEED, fewer, print)
    assert other != index["index"] and manifest.read(other).passages == 12


def test_the_folder_says_how_it_wants_to_be_used(encoder: Path) -> None:
    usage = usage_of(encoder)
    assert (usage.pooling, usage.normalise) == ("mean", True)
    assert (usage.query_prefix, usage.passage_prefix) == (QUERY, PASSAGE)
    kept = {str(path.relative_to(encoder)) for path in encoder.rglob("*") if path.is_file()}
    assert kept >= {"config.json", "model.safetensors", "tokenizer.json", "modules.json"}
    assert kept >= {"1_Pooling/config.json", "config_sentence_transformers.json"}


def test_loaded_it_gives_the_vectors_it_was_trained_to_give(tmp_path: Path) -> None:
    pupil, texts = Pupil(Recipe(), SEED), ["mayor of bore", "river of the capital of tanu"]
    pupil.save(tmp_path)
    with torch.no_grad():
        own = pupil([QUERY + text for text in texts]).numpy()
    np.testing.assert_allclose(Encoder(tmp_path).queries(texts), own, atol=1e-6)


def test_every_query_it_learns_from_is_in_words_that_it_knows(world: World) -> None:
    rng, tokenizer = random.Random(SEED), Pupil(Recipe(), SEED).tokenizer
    asked = [ask(fact, rng) for fact in world.facts]
    assert all(fact.subject in text.split() for fact, text in zip(world.facts, asked, strict=True))
    ids = tokenizer([QUERY + text for text in asked])["input_ids"]
    assert all(tokenizer.unk_token_id not in row and len(row) <= 64 for row in ids)


def test_a_bare_name_is_answered_by_all_its_facts() -> None:
    facts = [Fact("mayor", "bore", "kelu"), Fact("tower", "bore", "duva"),
             Fact("capital", "xanu", "bore")]  # fmt: skip
    right = also_right(["bore", "tower of bore", "capital of xanu"], facts)
    assert right.tolist() == [[False, True, False], [False] * 3, [False] * 3]
