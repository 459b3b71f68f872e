"""The demo's encoder: what it is trained on, what it leaves, and what it finds through the real
index and the real server's process.
"""

import json
import math
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

from configs.retrieval import RetrievalConfig
from retrieval_server.encoder import Encoder
from retrieval_server.encoder_settings import settings_of
from retrieval_server.index import manifest
from retrieval_server.index.open_index import open_index
from scripts.demo import encoder
from scripts.demo.encoder import (
    PASSAGE,
    QUERY,
    TOP_K,
    Recipe,
    SyllableEncoder,
    ask,
    batch,
    contrast,
    neighbours,
    ranks,
)
from scripts.demo.errors import EncoderFailed
from scripts.demo.task import COUNTRIES, HELD_OUT
from scripts.demo.world import Fact, World, make_world, split
from tests.children import ends_with_us

SEED = 0
BRIEF = Recipe(hidden=64, heads=2, feed_forward=128, steps=30, countries=3)


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
def corpus(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's corpus, in a folder of its own."""
    path = tmp_path_factory.mktemp("cache") / "corpus.jsonl"
    rows = [{"id": f"fact-{n}", "contents": f.passage} for n, f in enumerate(world.facts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def brief(corpus: Path) -> Path:
    """The index of an encoder that was trained for a second."""
    return encoder.prepare_index(corpus.parent, SEED, corpus, print, BRIEF)


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    """The demo's index, its encoder trained to the end."""
    return encoder.prepare_index(corpus.parent, SEED, corpus, print)


@pytest.fixture(scope="module")
def server(corpus: Path, index: Path) -> Iterator[str]:
    """The URL of a server's process over the demo's index."""
    config = corpus.parent / "config.yaml"
    config.write_text(f"retrieval:\n  corpus: {corpus}\n  index: {index}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "retrieval_server.worker", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env=ends_with_us(OMP_NUM_THREADS="1"),
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


@pytest.mark.slow
def test_a_brief_training_finds_held_out_facts_among_all_the_others(
    brief: Path, corpus: Path, held_out: tuple[Fact, ...]
) -> None:
    documents, opened = open_index(RetrievalConfig(corpus=str(corpus), index=str(brief)))
    assert len(documents) == 1440 and len(held_out) == 360
    rows = opened.search(plain(held_out), TOP_K)
    found = [
        fact.passage in [documents[hit.position].contents for hit in row]
        for fact, row in zip(held_out, rows, strict=True)
    ]
    assert sum(found) >= 0.95 * len(found)


@pytest.mark.slow
def test_the_server_finds_held_out_facts(server: str, held_out: tuple[Fact, ...]) -> None:
    info = httpx.get(f"{server}/info", trust_env=False).json()
    assert "faiss" in info["index"] and encoder.NAME in info["index"]
    rows = answers(server, plain(held_out))
    found = [fact.passage in row for fact, row in zip(held_out, rows, strict=True)]
    assert len(found) == 360 and sum(found) >= 0.95 * len(found)


@pytest.mark.slow
def test_two_hops_asked_at_once_are_answered_with_the_first(server: str, world: World) -> None:
    chains = split(world, HELD_OUT, SEED)[1].chains(2)
    rows = answers(server, [chain.topic for chain in chains])
    found = [chain.facts[0].passage in row for chain, row in zip(chains, rows, strict=True)]
    assert sum(found) >= 0.9 * len(found)


@pytest.mark.slow
def test_after_the_right_fact_come_others_of_its_name(
    server: str, held_out: tuple[Fact, ...]
) -> None:
    rows = answers(server, plain(held_out))
    named = [
        fact.subject in passage.split()
        for fact, row in zip(held_out, rows, strict=True)
        for passage in row
    ]
    assert len(named) == 1080 and sum(named) >= 0.95 * len(named)


def test_training_names_nothing_that_is_held_out(world: World) -> None:
    training, held_out = split(world, HELD_OUT, SEED)
    names = [{name for f in part.facts for name in (f.subject, f.value)}
             for part in (training, held_out)]  # fmt: skip
    assert len(training.facts) == 1080 and not names[0] & names[1]


def test_an_untrained_encoder_does_not_find_them(
    world: World, held_out: tuple[Fact, ...], tmp_path: Path
) -> None:
    SyllableEncoder(BRIEF, SEED).save(tmp_path)
    assert (ranks(Encoder(tmp_path), world, held_out) < TOP_K).mean() < 0.9


def test_the_loss_falls_and_depends_on_the_seed_alone(world: World) -> None:
    facts = world.facts[:24]

    def losses() -> list[float]:
        model, rng = SyllableEncoder(BRIEF, SEED), random.Random(SEED)
        return [model.step(facts, rng, 3e-3) for _ in range(8)]

    first = losses()
    assert first[-1] < 0.5 * first[0] and first == losses()


def test_an_encoder_that_finds_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EncoderFailed, match="held-out facts first"):
        encoder.prepare(tmp_path, SEED, print, replace(BRIEF, steps=1))
    assert not list(tmp_path.glob("demo-encoder-*"))


@pytest.mark.slow
def test_what_is_cached_is_not_made_again(brief: Path, corpus: Path) -> None:
    said: list[str] = []
    again = encoder.prepare_index(corpus.parent, SEED, corpus, said.append, BRIEF)
    assert again == brief and len(said) == 2
    assert all(line.startswith("cached in ") for line in said)


@pytest.mark.slow
def test_another_corpus_has_an_index_of_its_own(brief: Path, corpus: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "corpus.jsonl"
    fewer.write_text("".join(corpus.read_text().splitlines(keepends=True)[:12]))
    other = encoder.prepare_index(corpus.parent, SEED, fewer, print, BRIEF)
    assert other != brief and manifest.read(other).passages == 12


def test_the_folder_says_how_it_wants_to_be_used(brief: Path) -> None:
    told = manifest.read(brief).encoder
    assert told is not None and told.usage == settings_of(Path(told.path))
    assert (told.usage.pooling, told.usage.normalise) == ("mean", True)
    assert (told.usage.query_prefix, told.usage.passage_prefix) == (QUERY, PASSAGE)
    folder = Path(told.path)
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept >= {"config.json", "model.safetensors", "tokenizer.json", "modules.json"}
    assert kept >= {"1_Pooling/config.json", "config_sentence_transformers.json"}


def test_loaded_it_gives_the_vectors_it_was_trained_to_give(tmp_path: Path) -> None:
    model = SyllableEncoder(Recipe(), SEED)
    texts = ["mayor of bore", "river of the capital of tanu"]
    model.save(tmp_path)
    with torch.no_grad():
        own = model([QUERY + text for text in texts]).numpy()
    np.testing.assert_allclose(Encoder(tmp_path).queries(texts), own, atol=1e-6)


def test_every_query_it_learns_from_is_in_words_that_it_knows(world: World) -> None:
    rng, tokenizer = random.Random(SEED), SyllableEncoder(Recipe(), SEED).tokenizer
    asked = [ask(fact, rng) for fact in world.facts]
    assert all(fact.subject in text.split() for fact, text in zip(world.facts, asked, strict=True))
    ids = tokenizer([QUERY + text for text in asked])["input_ids"]
    assert all(tokenizer.unk_token_id not in row and len(row) <= 64 for row in ids)


def test_neighbours_share_a_syllable_and_every_batch_has_some(world: World) -> None:
    near = neighbours(world)
    chosen = batch(world, near, 2, random.Random(SEED))
    assert all(
        {name[:2], name[2:]} & {fact.subject[:2], fact.subject[2:]}
        for name, others in near.items()
        for facts in others
        for fact in facts
    )
    assert len(set(chosen)) == len(chosen) > 24


def test_a_bare_name_is_answered_by_all_that_name_it() -> None:
    facts = [Fact("mayor", "bore", "kelu"), Fact("tower", "bore", "duva"),
             Fact("capital", "xanu", "bore"), Fact("mayor", "bori", "lami")]  # fmt: skip
    scores = torch.tensor([[1.0, 1, 1, 1]] * 4)
    worse, better = scores.clone(), scores.clone()
    worse[0, 3] += 1  # another name's fact before them
    better[0, 2] += 1
    asked = ["bore", "tower of bore", "capital of xanu", "mayor of bori"]
    assert contrast(worse, asked, facts) > contrast(scores, asked, facts)
    assert contrast(better, asked, facts) <= contrast(scores, asked, facts)


def naive(scores: list[list[float]], facts: Sequence[Fact]) -> float:
    """The loss of plain queries, term by term."""
    answer, named = [], []
    for fact, row in zip(facts, scores, strict=True):
        answer.append(math.log(sum(map(math.exp, row))) - row[facts.index(fact)])
        strange = [
            math.exp(score)
            for score, other in zip(row, facts, strict=True)
            if fact.subject not in (other.subject, other.value)
        ]
        for score, other in zip(row, facts, strict=True):
            if other.subject == fact.subject:
                named.append(math.log(math.exp(score) + sum(strange)) - score)
    return sum(answer) / len(answer) + sum(named) / len(named)


def test_the_loss_is_what_its_formula_says() -> None:
    facts = make_world(SEED, 2).facts
    scores = torch.randn(24, 24, generator=torch.Generator().manual_seed(SEED))
    loss = contrast(scores, plain(facts), facts)
    assert loss.item() == pytest.approx(naive(scores.tolist(), facts), rel=1e-5)
