"""Settings read beside models, and vectors against a naive computation of each pooling."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from retrieval_server.encoder import Encoder
from retrieval_server.encoder_settings import EncoderSettings as Settings
from retrieval_server.encoder_settings import digest_of, settings_of
from retrieval_server.protocol import BadIndex
from tests.retrieval_server.encoders import make_encoder, pickled

TEXTS = ["the mayor of bore", "a", "who ?", "the capital of xanu is bore , and more " * 9, "a"]
NORMALIZE = [{"type": f"sentence_transformers.models.{n}"} for n in ("Transformer", "Normalize")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoders") / "tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of transformers."""
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def _naive(plain: tuple[Any, Any], text: str, usage: Settings) -> np.ndarray:
    """One text alone, without padding."""
    tokenizer, model = plain
    ids = tokenizer(text, truncation=True, max_length=64)["input_ids"]
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[usage.pooling]
    return (pooled / pooled.norm() if usage.normalise else pooled).numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalise", [True, False])
def test_vectors_agree_with_the_naive_ones(
    folder: Path, plain: tuple[Any, Any], pooling: str, normalise: bool
) -> None:
    usage = Settings(pooling, normalise, passage_prefix="passage: ")  # type: ignore[arg-type]
    encoder = Encoder(folder, usage)
    for texts, vectors in (
        (TEXTS, encoder.queries(TEXTS)),
        ([f"passage: {text}" for text in TEXTS], encoder.passages(TEXTS)),
    ):
        expected = np.stack([_naive(plain, text, usage) for text in texts])
        np.testing.assert_allclose(vectors, expected, atol=2e-6)


def test_many_texts_keep_their_places(folder: Path) -> None:
    encoder = Encoder(folder, Settings())
    texts = [f"the mayor of town {i} " * (1 + i % 7) for i in range(300)]
    vectors = encoder.passages(texts)
    alone = np.concatenate([encoder.passages([text]) for text in texts[::50]])
    np.testing.assert_allclose(vectors[::50], alone, atol=2e-6)
    assert np.array_equal(vectors, encoder.passages(texts))
    assert encoder.queries([]).shape == (0, encoder.dimension)


@pytest.mark.parametrize(
    ("name", "beside", "expected"),
    [
        ("intfloat-e5-base", {}, Settings("mean", True, "query: ", "passage: ")),
        (
            "bge-small-en",
            {},
            Settings("cls", True, "Represent this sentence for searching relevant passages: "),
        ),
        ("unknown", {}, Settings()),
        (
            "models--intfloat--e5-base/snapshots/0a",
            {},
            Settings("mean", True, "query: ", "passage: "),
        ),
        ("7be5bge0e5", {}, Settings()),  # a commit's digits are no name
        (
            "my-e5",  # prompts that were never set, as sentence-transformers writes them
            {"prompts": {"prompts": {"query": "", "document": ""}}},
            Settings("mean", True, "query: ", "passage: "),
        ),
        ("bge-m3", {}, Settings("cls")),
        (
            "told",
            {
                "pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
                "modules": NORMALIZE[:1],
                "prompts": {"prompts": {"query": "Q: ", "document": "D: "}},
            },
            Settings("cls", False, "Q: ", "D: "),
        ),
        (
            "newer",
            {"pooling": {"pooling_mode": "last"}, "modules": NORMALIZE},
            Settings("last"),
        ),
    ],
)
def test_usage_is_the_models_own(
    tmp_path: Path, name: str, beside: dict[str, object], expected: Settings
) -> None:
    assert settings_of(make_encoder(tmp_path / name, **beside)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "1_Pooling/config.json asks for"),
        ({"modules": [*NORMALIZE, {"type": "models.Dense"}]}, "asks for Dense, which we have not"),
    ],
)
def test_what_we_have_not_is_named(tmp_path: Path, beside: dict[str, object], said: str) -> None:
    with pytest.raises(BadIndex, match=said):
        settings_of(make_encoder(tmp_path / "m", **beside))  # type: ignore[arg-type]


def test_a_folder_that_is_no_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadIndex, match="holds no encoder: name a folder"):
        Encoder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadIndex, match="cannot be loaded as an encoder"):
        Encoder(tmp_path)


def test_a_digest_is_of_weights_and_words(tmp_path: Path) -> None:
    one, same, other = (make_encoder(tmp_path / str(i), seed) for i, seed in enumerate((0, 0, 1)))
    assert digest_of(one) == digest_of(same) != digest_of(other)


def test_a_digest_is_of_nothing_but_what_encodes(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "m")
    before = digest_of(folder)
    (folder / "onnx").mkdir()
    for name in ("README.md", "notes.txt", "train.json", "pytorch_model.bin", "onnx/config.json"):
        (folder / name).write_text("{}")
    assert digest_of(folder) == before
    (folder / "special_tokens_map.json").write_text('{"unk_token": "?"}')
    assert digest_of(folder) != before


def test_weights_that_are_no_safetensors_are_refused_unread(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(tmp_path / "canary"))
    with pytest.raises(BadIndex, match=r"pickled' holds no \*\.safetensors: only such weights"):
        Encoder(folder, Settings())
    (folder / "model.safetensors").write_bytes(b"0" * 8)  # and where both are there, or it is none
    with pytest.raises(BadIndex, match="cannot be loaded as an encoder"):
        Encoder(folder, Settings())
    assert not (tmp_path / "canary").exists()


def test_an_encoder_s_own_code_neither_runs_nor_is_asked_about(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "coded")
    canary = tmp_path / "canary"
    (folder / "modeling_own.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    told = json.loads((folder / "config.json").read_text())
    told |= {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.C"}}
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(BadIndex, match="cannot be loaded as an encoder"):
        Encoder(folder, Settings())
    assert not canary.exists()
