"""Reranking against scores taken one by one; what cannot rerank is refused by name."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from configs.retrieval import RetrievalConfig
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.index.open_index import look, open_index
from retrieval_server.index.rerank import CrossEncoder, Reranked
from retrieval_server.protocol import BadIndex, Document
from tests.retrieval_server.encoders import make_encoder, make_reranker, pickled

TEXTS = [f"mayor {i} of bore {'x' * i}" for i in range(12)]
PASSAGES = [Document(f"p{i}", text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("rerankers") / "cross")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> CrossEncoder:
    return CrossEncoder(folder)


def _naive(folder: Path, query: str, text: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        pair = tokenizer(query, text, truncation=True, max_length=64, return_tensors="pt")
        return float(model(**pair).logits[0, 0])


@pytest.mark.slow
def test_scores_are_those_of_each_pair_alone(folder: Path, encoder: CrossEncoder) -> None:
    texts = [TEXTS[3], "a", TEXTS[7], "long " * 99]
    expected = [_naive(folder, "who is mayor", text) for text in texts]
    assert encoder.scores("who is mayor", texts) == pytest.approx(expected, abs=1e-4)
    assert encoder.scores("who", []) == []
    assert len(encoder.scores("long " * 999, ["a", "b"])) == 2


def test_the_best_candidates_are_put_in_order(encoder: CrossEncoder) -> None:
    index = Reranked(BM25Index(TEXTS), PASSAGES, encoder, 6)
    candidates = [hit.position for hit in BM25Index(TEXTS).search(["mayor"], 6)[0]]
    scores = encoder.scores("mayor", [TEXTS[position] for position in candidates])
    order = sorted(zip(scores, candidates, strict=True), key=lambda each: (-each[0], each[1]))
    whole, other, again = index.search(["mayor", "unheard", "mayor"], 9)
    assert [(hit.score, hit.position) for hit in whole] == order and other == []
    assert index.search(["mayor"], 2) == [whole[:2]] and again == whole
    assert "bm25 (" in index.name and f"; the best 6 reranked by {encoder.name}" in index.name


def test_equal_scores_come_in_corpus_order(encoder: CrossEncoder) -> None:
    same = [Document(f"p{i}", "bore") for i in range(5)]
    index = Reranked(BM25Index(["bore"] * 5), same, encoder, 5)
    assert [hit.position for hit in index.search(["bore"], 5)[0]] == [0, 1, 2, 3, 4]


def test_a_reranker_is_part_of_the_version(tmp_path: Path, encoder: CrossEncoder) -> None:
    other = CrossEncoder(make_reranker(tmp_path / "cross", seed=1))
    indexes = [Reranked(BM25Index(TEXTS), PASSAGES, each, 6) for each in (encoder, other)]
    assert indexes[0].fingerprint != indexes[1].fingerprint


def test_a_configuration_names_it(tmp_path: Path, folder: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"\n".join(map(msgspec.json.encode, PASSAGES)))
    asked = RetrievalConfig(corpus=str(corpus), reranker=str(folder), rerank_candidates=7)
    look(asked)
    _, index = open_index(asked)
    assert index.name.startswith("bm25 (") and "the best 7 reranked by cross " in index.name
    with pytest.raises(ValueError, match=r"top_k = 9: more .*rerank_candidates \(7\)"):
        msgspec.structs.replace(asked, top_k=9)


def test_what_is_no_reranker_is_refused(tmp_path: Path) -> None:
    many = make_reranker(tmp_path / "many", labels=3)
    with pytest.raises(BadIndex, match=r"many' tells 3 labels apart: .* one label"):
        CrossEncoder(many)
    asked = RetrievalConfig(corpus=str(tmp_path / "c"), reranker=str(tmp_path))
    (tmp_path / "c").write_bytes(b'{"id": "1", "contents": "x"}')
    with pytest.raises(BadIndex, match=r"retrieval.reranker = '.*' holds no model: name a folder"):
        look(asked)
    bare = make_encoder(tmp_path / "pickled")
    (bare / "model.safetensors").unlink()
    (bare / "pytorch_model.bin").write_bytes(pickled(tmp_path / "canary"))
    for refuse in (lambda: CrossEncoder(bare), lambda: look(_with(asked, bare))):
        with pytest.raises(BadIndex, match=r"pickled' holds no .*safetensors: only such weights"):
            refuse()
    assert not (tmp_path / "canary").exists()


def _with(asked: RetrievalConfig, reranker: Path) -> RetrievalConfig:
    return msgspec.structs.replace(asked, reranker=str(reranker))
