"""A second look at what an index finds: a cross-encoder reads query and passage together.

Any model that transformers loads for sequence classification with one label (MiniLM of MS MARCO,
bge-reranker …). It scores the best candidates of the index, always as many; what comes after them
is left out.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retrieval_server.encoder import OF_THE_FOLDER, batches
from retrieval_server.encoder_settings import digest_of, require_encoder
from retrieval_server.index.base import Hit, Index
from retrieval_server.protocol import BadIndex, Document

MAX_TOKENS = 512  # of query and passage together, the longer one cut first


class CrossEncoder:
    """One model on one device. `path`: a folder as transformers saves it. Raises BadIndex."""

    def __init__(self, path: Path, dtype: str = "float32", device: str = "cpu") -> None:
        require_encoder(path, "retrieval.reranker")
        if device == "cuda" and not torch.cuda.is_available():
            raise BadIndex("the reranker's device is 'cuda', but torch finds no GPU: set 'cpu'")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, **OF_THE_FOLDER)
            model = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, dtype), use_safetensors=True, **OF_THE_FOLDER
            )
        except (SafetensorError, OSError, ValueError) as error:
            raise BadIndex(f"{str(path)!r} cannot be loaded as a reranker: {error}") from error
        if model.config.num_labels != 1:
            raise BadIndex(
                f"{str(path)!r} tells {model.config.num_labels} labels apart: a reranker gives one "
                "score: name a cross-encoder with one label"
            )
        self._model, self._device = model.eval().to(device), device
        longest = getattr(model.config, "max_position_embeddings", None) or MAX_TOKENS
        self._longest = min(MAX_TOKENS, int(longest))
        digest = digest_of(path)
        self.name = f"{path.name} {digest[:8]}"
        self.fingerprint = f"{digest} {dtype} {device}"

    def scores(self, query: str, passages: Sequence[str]) -> list[float]:
        """How well each passage answers the query; the same call gives the same bits."""
        found = [0.0] * len(passages)
        if not passages:
            return found
        pairs = self._tokenizer(
            [query] * len(passages), list(passages), truncation=True, max_length=self._longest
        )
        names = [name for name in pairs if name in self._tokenizer.model_input_names]
        with torch.inference_mode():
            for rows in batches([len(ids) for ids in pairs["input_ids"]]):
                chosen = {name: [pairs[name][row] for row in rows] for name in names}
                batch = self._tokenizer.pad(chosen, return_tensors="pt").to(self._device)
                logits = self._model(**batch).logits[:, 0].float().tolist()
                for row, score in zip(rows, logits, strict=True):
                    found[row] = score
        return found


class Reranked:
    """An index whose best `candidates` are put into the order of a cross-encoder."""

    def __init__(
        self, index: Index, passages: Sequence[Document], encoder: CrossEncoder, candidates: int
    ) -> None:
        self._index, self._passages, self._encoder = index, passages, encoder
        self._candidates = candidates
        self.name = f"{index.name}; the best {candidates} reranked by {encoder.name}"
        decisive = (index.fingerprint, encoder.fingerprint)
        self.fingerprint = blake3(msgspec.json.encode(decisive)).hexdigest(length=8)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """At most `candidates` passages, ties in corpus order; equal queries are read once."""
        different = list(dict.fromkeys(queries))
        rows = self._index.search(different, self._candidates)
        found = {
            query: self._ordered(query, row) for query, row in zip(different, rows, strict=True)
        }
        return [found[query][:top_k] for query in queries]

    def _ordered(self, query: str, row: Sequence[Hit]) -> list[Hit]:
        # A query at a time: in others' company padding would change the last digits.
        # The same text twice in a batch may get other last digits too.
        texts = {hit.position: self._passages[hit.position].contents for hit in row}
        different = list(dict.fromkeys(texts.values()))
        scores = dict(zip(different, self._encoder.scores(query, different), strict=True))
        hits = [Hit(position, scores[text]) for position, text in texts.items()]
        return sorted(hits, key=lambda hit: (-hit.score, hit.position))
