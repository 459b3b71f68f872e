"""Texts → vectors, by any encoder that transformers loads (E5, BGE, MiniLM …).

How a model wants to be used is its own: pooling and normalisation come from the files that
sentence-transformers leaves beside it, prefixes from the prompts there, what they leave open from
the family in its name (as Search-R1's builder and server have it), the rest from the commonest use:
mean pooling, unit length, no prefix. Consumes texts; produces float32[N, D]; waits for its device.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from retrieval_server.protocol import BadIndex

Pooling = Literal["mean", "cls", "last"]
BATCH_TOKENS = 8192  # of one forward pass, padding counted
_FAMILIES: dict[
    str, tuple[Pooling, str, str]
] = {  # in the name: pooling, query's, passage's prefix
    "e5": ("mean", "query: ", "passage: "),
    "bge": ("cls", "Represent this sentence for searching relevant passages: ", ""),
}
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_READ = (".json", ".safetensors", ".bin", ".txt", ".model")  # what makes a model what it is

logger = logging.getLogger("retrieval_server")
disable_progress_bar()  # one for each of a model's loads


class Usage(msgspec.Struct, frozen=True):
    """How a model turns a text into a vector; vectors of two usages do not compare."""

    pooling: Pooling = "mean"
    normalise: bool = True
    query_prefix: str = ""
    passage_prefix: str = ""
    max_query_tokens: int = 256
    max_passage_tokens: int = 256


def usage_of(folder: Path) -> Usage:
    """How the model in `folder` wants to be used. Raises BadIndex for a pooling we have not."""
    config = _json(folder / "config.json")
    name = f"{folder.resolve().name} {config.get('_name_or_path', '')}".lower()
    family = next((of for part, of in _FAMILIES.items() if part in name), None)
    pooling, query, passage = family or ("mean", "", "")
    told = _told_pooling(folder)
    if not family and told is None:
        logger.warning("%s says nothing of pooling or prefixes: mean pooling, no prefix", folder)
    prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
    modules = [m["type"].rpartition(".")[2] for m in _json(folder / "modules.json") or []]
    if strange := [m for m in modules if m not in ("Transformer", "Pooling", "Normalize")]:
        raise BadIndex(f"{folder}/modules.json asks for {', '.join(strange)}, which we have not")
    return Usage(
        pooling=told or pooling,
        normalise=bool(family) or not modules or "Normalize" in modules,
        query_prefix=prompts.get("query") or query,
        passage_prefix=prompts.get("passage") or prompts.get("document") or passage,
    )


def digest_of(folder: Path) -> str:
    """A digest of the model's files: another one's vectors do not compare."""
    digest = blake3()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in _READ and p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0".encode()).update_mmap(path)
    return digest.hexdigest(length=16)


class Encoder:
    """One model on one device. `path`: a folder as transformers saves it.

    `dtype`: of its weights; vectors are float32 in any case. Raises BadIndex naming the folder.
    """

    def __init__(
        self,
        path: str | Path,
        usage: Usage | None = None,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise BadIndex(f"{str(path)!r} holds no encoder: name a folder with a config.json")
        if device == "cuda" and not torch.cuda.is_available():
            raise BadIndex("the encoder's device is 'cuda', but torch finds no GPU: set 'cpu'")
        self.usage = usage or usage_of(self.path)
        self._device = device
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.path)
            model = AutoModel.from_pretrained(self.path, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise BadIndex(f"{str(path)!r} cannot be loaded as an encoder: {error}") from error
        # An encoder-decoder (T5) is asked by its encoder alone.
        self._model = getattr(model, "encoder", model) if _is_pair(model) else model
        self._model.eval().to(device)
        longest = getattr(model.config, "max_position_embeddings", None)
        self._longest = int(longest) if longest else 1 << 30
        self.dimension = int(model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of queries, float32[N, D]; long ones are cut to `usage.max_query_tokens`."""
        return self._encode(
            [self.usage.query_prefix + t for t in texts], self.usage.max_query_tokens
        )

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of passages, float32[N, D]; the same texts in one call give the same bits."""
        usage = self.usage
        return self._encode([usage.passage_prefix + t for t in texts], usage.max_passage_tokens)

    def _encode(self, texts: list[str], max_tokens: int) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        if texts:
            asked = {"truncation": True, "max_length": min(max_tokens, self._longest)}
            ids = self._tokenizer(texts, return_attention_mask=False, **asked)["input_ids"]
            with torch.inference_mode():
                self._fill(vectors, ids)
        return vectors

    def _fill(self, vectors: NDArray[np.float32], ids: Sequence[Sequence[int]]) -> None:
        for rows in _batches([len(row) for row in ids]):
            batch = self._tokenizer.pad(
                {"input_ids": [ids[row] for row in rows]}, return_tensors="pt"
            ).to(self._device)
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            hidden = self._model(**given).last_hidden_state.float()
            vectors[rows] = self._pooled(hidden, given["attention_mask"]).cpu().numpy()

    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden [N, T, D], mask [N, T] → [N, D]."""
        weights = mask.unsqueeze(-1).float()
        if self.usage.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.usage.pooling == "last":
            # The last position that counts, wherever the padding is.
            last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
            pooled = hidden[torch.arange(len(hidden), device=mask.device), last]
        else:
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(pooled, dim=1) if self.usage.normalise else pooled


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows by length, together at most BATCH_TOKENS with the padding: little is computed for it."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        if batch and (len(batch) + 1) * lengths[row] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _is_pair(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _told_pooling(folder: Path) -> Pooling | None:
    told = _json(folder / "1_Pooling" / "config.json")
    chosen = [
        key for key, value in told.items() if key.startswith("pooling_mode") and value is True
    ]
    mode = told.get("pooling_mode")  # as newer versions write it
    if mode in get_args(Pooling):
        return mode  # type: ignore[no-any-return]
    if mode or len(chosen) > 1 or (chosen and chosen[0] not in _POOLINGS):
        raise BadIndex(
            f"{folder}/1_Pooling/config.json asks for {mode or chosen}: we have one of "
            f"{', '.join(get_args(Pooling))}"
        )
    return _POOLINGS[chosen[0]] if chosen else None


def _json(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise BadIndex(f"{str(path)!r} is not JSON: {error}") from error
