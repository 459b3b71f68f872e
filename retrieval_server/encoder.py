"""Encoders of texts: any that transformers loads (E5, BGE, MiniLM …)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from retrieval_server.encoder_settings import (
    EncoderSettings,
    digest_of,
    require_encoder,
    settings_of,
)
from retrieval_server.protocol import BadIndex

BATCH_TOKENS = 8192  # of one forward pass, padding counted

# Its code does not run, nor is anybody asked whether it may, and nothing is fetched.
OF_THE_FOLDER = {"trust_remote_code": False, "local_files_only": True}
disable_progress_bar()  # one for each of a model's loads


class Encoder:
    """One model on one device. `path`: a folder as transformers saves it.

    `dtype`: of its weights; vectors are float32 in any case. Raises BadIndex naming the folder.
    """

    def __init__(
        self,
        path: str | Path,
        usage: EncoderSettings | None = None,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        self.path = Path(path)
        require_encoder(self.path)
        if device == "cuda" and not torch.cuda.is_available():
            raise BadIndex("the encoder's device is 'cuda', but torch finds no GPU: set 'cpu'")
        self.usage = usage or settings_of(self.path)
        self.dtype, self._device = dtype, device
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.path, **OF_THE_FOLDER)
            model = AutoModel.from_pretrained(
                self.path, dtype=getattr(torch, dtype), use_safetensors=True, **OF_THE_FOLDER
            )
        except (SafetensorError, OSError, ValueError) as error:
            raise BadIndex(f"{str(path)!r} cannot be loaded as an encoder: {error}") from error
        # An encoder-decoder (T5) is asked by its encoder alone.
        pair = getattr(model.config, "is_encoder_decoder", False)
        self._model = getattr(model, "encoder", model) if pair else model
        self._model.eval().to(device)
        longest = getattr(model.config, "max_position_embeddings", None)
        self._longest = int(longest) if longest else 1 << 30
        self.dimension = int(model.config.hidden_size)
        self.name = f"{self.path.name} {digest_of(self.path)[:8]}"

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
        for rows in batches([len(row) for row in ids]):
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


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows by length, together at most BATCH_TOKENS with the padding: little is computed for it."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        if batch and (len(batch) + 1) * lengths[row] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch
