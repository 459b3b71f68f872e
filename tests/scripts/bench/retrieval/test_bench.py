"""The retrieval benchmark: what it asks, how it counts, and that a tiny run is a real one."""

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.index.bm25 import BM25Index
from retrieval_server.index.words import words
from retrieval_server.protocol import Document
from scripts import cli
from scripts.bench.harness import Processes, Rows
from scripts.bench.retrieval import answers
from scripts.bench.retrieval import bench as bench_retrieval
from scripts.bench.retrieval import corpus as corpora
from scripts.bench.retrieval.baseline import naive_app
from scripts.bench.retrieval.bench import BenchRetrievalOptions, tables
from scripts.bench.retrieval.load import figures, percentile
from scripts.bench.retrieval.overload import SATURATING, OverloadRow
from scripts.bench.retrieval.parts import PARTS, Part, Parts
from scripts.bench.retrieval.recall import recall
from scripts.bench.retrieval.run import (
    GOALS,
    Bench,
    Row,
    compared,
    medians,
    over_naive,
    rows,
    same,
    summary,
)
from scripts.wiki.wiki import WikiFiles

TOLD = """Package: alpha
Depends: libc6 (>= 2.3), beta | gamma,
 delta:any
Description: Reads the first letter
Tag: role::program,
 use::reading

Package: alpha
Description: Another version

Package: silent
"""
LETTERS = [
    Document(c, f'"package {c}"\nwrites the letter {c} again. Section x') for c in "abcdefgh"
]
questions = st.lists(st.sampled_from(["Who", "wrote", "the", "Iliad", "of", "x-ray"]),
                     min_size=2, max_size=8).map(" ".join)  # fmt: skip


def test_packages_are_told_once_and_in_words() -> None:
    assert list(corpora.packages(TOLD)) == [
        (
            "alpha",
            '"alpha"\nReads the first letter. Tagged role program, use reading. '
            "Needs or suggests libc6, beta, delta.",
        )
    ]


def test_without_packages_there_is_a_remedy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(corpora.NoCorpus, match=r"no apt-cache.*--corpus FILE.jsonl"):
        corpora.debian(tmp_path, 5)
    (tmp_path / "apt-cache").write_text(f"#!/bin/sh\n/bin/echo '{TOLD}'\n")
    (tmp_path / "apt-cache").chmod(0o755)
    with pytest.raises(corpora.NoCorpus, match=r"knows 1 packages of 5: run `apt-get update`"):
        corpora.debian(tmp_path, 5)
    assert json.loads(corpora.debian(tmp_path, 1).read_text())["id"] == "alpha"


def test_queries_are_words_of_a_passage_seeded_and_different() -> None:
    queries = corpora.draw_queries(LETTERS, 30, seed=1)
    assert (
        queries == corpora.draw_queries(LETTERS, 30, seed=1) != corpora.draw_queries(LETTERS, 30, 2)
    )
    assert len(set(queries)) == 30 and all(2 <= len(query.split()) <= 7 for query in queries)
    texts = [each.contents.replace('"', "").replace("\n", " ") for each in LETTERS]
    assert all(any(query in text for text in texts) for query in queries)
    with pytest.raises(corpora.NoCorpus, match="too few for 1,000"):
        corpora.draw_queries(LETTERS[:1], 1000, seed=1)


@given(question=questions, seed=st.integers(0, 99))
def test_siblings_ask_nearly_the_same(question: str, seed: int) -> None:
    asked = corpora.siblings(question, seed)
    assert asked == corpora.siblings(question, seed) and len(asked) == 8 and question in asked
    for sibling in asked:
        more = Counter(words(sibling)) - Counter(words(question))
        assert not Counter(words(question)) - Counter(words(sibling)) and more.total() <= 1


def test_half_of_the_siblings_ask_the_very_same() -> None:
    groups = [corpora.siblings(f"who wrote book {i}", 0) for i in range(300)]
    same_strings = sum(
        sibling == f"who wrote book {i}" for i, g in enumerate(groups) for sibling in g
    )
    bags = [len({tuple(sorted(words(sibling))) for sibling in group}) for group in groups]
    assert 0.5 < same_strings / 2400 < 0.65 and 1.5 < sum(bags) / 300 < 2.5


@given(st.lists(st.floats(0, 9), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_least_that_so_many_do_not_exceed(
    values: list[float], fraction: float
) -> None:
    enough = [v for v in values if sum(w <= v for w in values) >= fraction * len(values)]
    assert percentile(values, fraction) == min(enough)


def test_the_window_counts_answers_and_an_open_loop_times_what_was_due() -> None:
    answered = [(0.0, 0.5), (0.9, 1.5), (1.2, 1.4), (1.9, 2.1), (1.5, 9.0), (2.5, 2.6)]
    closed = figures(answered, 1.0, 1.0, is_open=False)
    assert closed["qps"] == 2 and closed["p50_s"] == pytest.approx(0.2) and closed["max_s"] == 7.5
    opened = figures(answered, 1.0, 1.0, is_open=True)
    assert opened["qps"] == 2 and opened["p50_s"] == pytest.approx(0.2) and opened["max_s"] == 7.5
    assert figures([], 0.0, 1.0, is_open=True) == dict.fromkeys(opened, None) | {"qps": 0}


def test_a_run_goes_on_with_the_rows_it_has(tmp_path: Path) -> None:
    def measured_again() -> None:
        raise AssertionError("measured again")

    kept = Rows(tmp_path, "code a")
    assert kept.get("row", lambda: {"qps": 1.5}) == {"qps": 1.5}
    (tmp_path / "cut-off.new").write_text('{"qps')
    assert Rows(tmp_path, "code a").get("row", measured_again) == {"qps": 1.5}
    assert Rows(tmp_path, "code b").get("row", lambda: 2) == 2
    with pytest.raises(AssertionError):
        kept.get("other", measured_again)
    assert kept.get("other", lambda: 3) == 3
    kept.forget()
    assert kept.get("row", lambda: 4) == 4


def test_a_part_that_was_measured_alone_is_kept_until_the_whole_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def one(self: Parts, part: Part, kept: Rows, passages: int | None) -> dict[str, int]:
        kept.get("row", lambda: measured.append(part))
        return {part: 1}

    monkeypatch.setattr(Parts, "measure", one)
    monkeypatch.setattr(BenchRetrievalOptions, "corpora", lambda self: {})

    def run(only: Part | None = None, fresh: bool = False) -> list[str]:
        measured.clear()
        options = BenchRetrievalOptions(out=tmp_path, only=only, fresh=fresh)
        told = bench_retrieval.measure(options, print)
        assert told.keys() == {*([only] if only else PARTS), "method"}
        return [*measured]

    assert run("overload") == ["overload"] and run("scale") == ["scale"]
    assert run("scale") == [] and run("scale", fresh=True) == ["scale"]
    assert run() == ["served"], "the others are there"
    assert run() == ["served", "overload", "scale"], "a finished one begins anew"


def test_the_tables_are_of_the_parts_that_were_measured() -> None:
    row = {"row": msgspec.to_builtins(OverloadRow(50, 1, SATURATING, 1.0)), "name": "x", "qps": 4.0,
           "p50_s": 0.1, "p99_s": 0.2, "askers": 3, "failed": 0, "retried": 0, "server_cpu": 0.1,
           "load_cpu": 0.1}  # fmt: skip
    assert len(tables({"overload": [row], "overload_goodput_min": 1.0})) == 2
    held = answers.summary({"questions": 100, "passages": 9, "bm25": 60, "tantivy": 57})
    assert held["tantivy_top3_minus_bm25"] == pytest.approx(-0.03)
    goal = answers.GOALS["tantivy_top3_minus_bm25"]
    assert not goal.met(held["tantivy_top3_minus_bm25"]) and goal.met(-0.02)
    *_, told, goals = tables(held)
    assert told.row_count == 2 and goals.row_count == 1
    (none,) = tables(answers.summary(None))
    assert none.row_count == 0, "what was left out has no verdict"


@pytest.mark.slow
def test_answers_are_counted_as_the_audit_of_a_corpus_counts_them(tmp_path: Path) -> None:
    corpus, asked = tmp_path / "corpus.jsonl", tmp_path / "eval.jsonl"
    corpus.write_text("".join(json.dumps({"id": c.id, "contents": c.contents}) + "\n"
                              for c in LETTERS))  # fmt: skip
    one = {"question": "which letter does package c write", "answers": ["letter c"]}
    rows = [one, *({"question": f"which is package {n}", "answers": ["none"]} for n in range(25))]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = WikiFiles(**{each.name: corpus for each in fields(WikiFiles)} | {"eval": asked})
    with Processes(tmp_path) as processes:
        told = answers.answers(processes, files, tmp_path, tmp_path, fresh=False)
    assert told == {"passages": 8, "questions": 26, "bm25": 1, "tantivy": 1}


ids = st.lists(st.lists(st.integers(0, 20), unique=True, max_size=10), min_size=1, max_size=5)


@given(found=ids, exact=ids)
def test_recall_is_the_mean_share_of_the_exact(found, exact) -> None:
    size = min(len(found), len(exact))
    found, exact = found[:size], [[*row, 21] for row in exact[:size]]
    total = 0.0
    for some, all_ in zip(found, exact, strict=True):
        total += sum(1 for position in all_ if position in some) / len(all_)
    assert recall(found, exact) == pytest.approx(total / size)


@pytest.mark.slow
def test_the_axes_are_those_of_a_full_svd() -> None:
    import numpy as np
    import torch

    from scripts.bench.retrieval.recall import _right_singular

    random = np.random.default_rng(0)
    dense = (random.normal(size=(200, 90)) * 0.5 ** np.arange(90)).astype(np.float32)
    axes = _right_singular(torch.tensor(dense).to_sparse_csr(), 4).numpy()
    exact = np.linalg.svd(dense)[2][:4].T
    assert axes @ axes.T == pytest.approx(exact @ exact.T, abs=1e-3)


def test_results_are_the_same_but_for_neighbours_of_equal_score() -> None:
    one = [("a", 2.0), ("b", 1.0), ("c", 1.0)]
    assert same(one, [("a", 2.0), ("c", 1.0), ("b", 1.0 + 1e-7)])
    assert same(one, [("a", 2.0), ("b", 1.0), ("d", 1.0)])  # another one at the cut
    assert not same(one, [("d", 2.0), ("b", 1.0), ("c", 1.0)])
    assert not same(one, [("a", 2.0), ("b", 1.0), ("c", 0.9)])
    assert not same(one, one[:2])


def test_every_answer_of_ours_is_compared_with_every_other() -> None:
    a, b = [("a", 1.0)], [("b", 2.0)]
    found = {"ours": {"0/0": [a], "1/0": [a, b], "2/0": [a]}, "aiohttp": {"0/0": [a], "1/0": [a]}}
    assert compared(found) == {"compared": 2, "different": 1}


def test_a_side_is_told_by_medians_and_sums() -> None:
    runs = [
        {"qps": q, "errors": 1, "error_kinds": {}, "server_peak_rss_bytes": q} for q in (3, 9, 4)
    ]
    told = medians(runs)
    assert told["qps"] == 4 and told["errors"] == 3 and told["server_peak_rss_bytes"] == 9


def _found(row: Row) -> dict[str, object]:
    side = {"p50_s": 0.002, "p99_s": 0.1, "errors": 1, "refused_503": 2, "calls_per_query": 0.25}
    sides = {name: side | {"qps": 10.0, "p50_s": 0.001} for name in row.sides}
    sides["ours"] = side | {"qps": 30.0}
    return {"row": {"name": row.name}, "sides": sides, "compared": 5, "different": 0}


@pytest.mark.parametrize("quick", [True, False])
def test_the_figures_have_their_names(quick: bool) -> None:
    found = [_found(row) for index in ("bm25", "dense") for row in rows(index, quick)]
    recalls = {"hnsw": {"recall10": 0.9}, "ivf": {"recall10": 0.8}}
    told = summary(found, recalls)
    assert told.keys() >= GOALS.keys() and None not in told.values()
    assert told["bm25_over_naive"] == told["dense_over_naive"] == 3.0
    assert told["added_p50_ms"] == pytest.approx(1.0) and told["recall10_ivf"] == 0.8
    assert told["errors_at_1000"] == (4 if quick else 6) and told["compared"] == 5 * len(found)


def test_the_better_of_the_baselines_clients_counts() -> None:
    sides = {"ours": 6.0, "aiohttp": 3.0, "requests": 2.0, "bare": 5.0}
    assert over_naive({"sides": {name: {"qps": qps} for name, qps in sides.items()}}) == 2.0


def test_the_baseline_answers_as_search_r1_does() -> None:
    index = BM25Index(each.contents for each in LETTERS)
    asked = {"queries": ["letter c", "package h"], "topk": 2, "return_scores": True}
    with TestClient(naive_app(LETTERS, index, 3, loop=True)) as client:
        scored = client.post("/retrieve", json=asked).json()["result"]
        plain = client.post("/retrieve", json={"queries": ["letter c"]}).json()["result"]
    assert [[hit["document"]["id"] for hit in row] for row in scored] == [["c", "a"], ["h", "a"]]
    assert scored[0][0]["score"] == index.search(["letter c"], 1)[0][0].score
    assert [document["id"] for document in plain[0]] == ["c", "a", "b"]


@pytest.mark.slow
@pytest.mark.soak("benchmarks")
def test_a_tiny_run_compares_real_servers(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    documents = [
        Document(str(i), f'"package {i}"\nit has number {i} of {i % 7}') for i in range(300)
    ]
    lines = (json.dumps({"id": each.id, "contents": each.contents}) for each in documents)
    corpus.write_text("\n".join(lines))
    load = {"concurrency": 16, "seconds": 1.0, "warm_up_s": 0.2}
    with Processes(tmp_path) as processes:
        bench = Bench(tmp_path, processes, {"bm25": {"corpus": str(corpus)}})
        queries = corpora.draw_queries(documents, 64, 0)
        bench.units("groups", [corpora.siblings(query, 0) for query in queries])
        sides = ("ours", "bare", "aiohttp", "requests")
        found = bench.measure(Row("tiny", "bm25", "groups", sides, load))
        load = {"rate": 10.0, "concurrency": 64, "spread_s": 0.05, "seconds": 1.0}
        opened = bench.measure(Row("open", "bm25", "groups", ("ours", "aiohttp"), load))
    assert found["compared"] > 0 and found["different"] == opened["different"] == 0
    assert not {side: told for side, told in found["sides"].items() if told["errors"]}
    assert (
        found["sides"]["ours"]["calls_per_query"] < 1 == found["sides"]["bare"]["calls_per_query"]
    )
    assert {told["answered"] for told in opened["sides"].values()} == {160}  # in both seconds


@pytest.mark.slow
def test_the_encoder_has_the_shape_and_a_vocabulary_of_words(tmp_path: Path) -> None:
    from retrieval_server.encoder import Encoder

    folder = corpora.make_encoder(tmp_path / "encoder", [each.contents for each in LETTERS])
    assert corpora.make_encoder(folder, []) == folder  # is not made again
    encoder = Encoder(folder)
    assert encoder.usage.pooling == "mean" and encoder.usage.normalise
    vectors = encoder.queries(["package a", "the letter b"])
    assert vectors.shape == (2, 384) and abs(vectors[0] @ vectors[1]) < 0.9999


def test_nothing_to_search_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench_retrieval, "limit_threads", lambda _: None)  # of this process
    given_words = ["--corpus", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]
    assert cli.main(["bench", "retrieval", *given_words]) == 2
    assert "none.jsonl' does not exist" in capsys.readouterr().err
