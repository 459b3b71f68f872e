"""The similarity of an answer and the gold answers: the cosine of sentence embeddings, 0 to 1. The
encoder works on the CPU in a thread of its own; `rewards.similarity.timeout_s` bounds the wait.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.errors import Unscorable
from actors.rewards.single_flight import SingleFlight
from configs.load import ConfigError
from configs.rewards import SimilarityConfig
from retrieval_server.batching import Batcher
from retrieval_server.protocol import BadIndex

if TYPE_CHECKING:
    from retrieval_server.encoder import Encoder

_BATCH_TEXTS = 32
_REMEMBERED = 8192  # vectors: siblings say the same, and their accepted answers are the same
Vector = NDArray[np.float32]


class Similarity:
    """Compares texts by one encoder; close it when done."""

    def __init__(self, encoder: "Encoder", threads: int = 1, timeout_s: float = 30.0) -> None:
        import torch  # loaded with the encoder

        self._encoder, self._timeout_s = encoder, timeout_s
        self._thread = ThreadPoolExecutor(1, "similarity", torch.set_num_threads, (threads,))
        self._batcher: Batcher[Vector] = Batcher(self._encode, max_batch=_BATCH_TEXTS)
        self._vectors: SingleFlight[str, Vector] = SingleFlight(_REMEMBERED)

    @classmethod
    def open(cls, config: SimilarityConfig) -> "Similarity":
        """Load `rewards.similarity.model`. Raises ConfigError naming it."""
        from retrieval_server.encoder import Encoder  # torch: for who asks for this part alone

        try:
            return cls(Encoder(Path(config.model)), config.threads, config.timeout_s)
        except BadIndex as error:
            raise ConfigError(f"rewards.similarity.model = {config.model!r}: {error}") from error

    async def close(self) -> None:
        """Abandon waiting texts."""
        await self._vectors.close()
        await self._batcher.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def best(self, answer: str, golds: Sequence[str]) -> float:
        """Return the largest cosine of the answer and a gold one, not below 0.

        Raises Unscorable (`similarity`) where the encoder fails or takes too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                vector, *others = await asyncio.gather(*map(self._vector, (answer, *golds)))
        except (TimeoutError, RuntimeError, ValueError, IndexError) as error:
            late = f"no vector within {self._timeout_s:g} s (rewards.similarity.timeout_s)"
            cause = late if deadline.expired() else f"{type(error).__name__}: {error}"
            raise Unscorable("similarity", cause) from error
        return max(0.0, *(min(1.0, float(vector @ other)) for other in others))

    async def _vector(self, text: str) -> Vector:
        text = text.encode(errors="replace").decode()  # tokenizers refuse lone surrogates
        return await self._vectors.get(text, self._ask)

    async def _ask(self, text: str) -> Vector:
        [[vector]] = await self._batcher.search([text], 1)
        if not np.isfinite(vector).all():  # its cosines would be NaN, which max and min let pass
            raise ValueError("the encoder gave a vector that is not finite")
        return vector

    async def _encode(self, texts: list[str], *_: float) -> list[list[Vector]]:
        """Encode texts to unit length, as passages, with no query's prefix, on both sides."""
        loop = asyncio.get_running_loop()
        vectors = await loop.run_in_executor(self._thread, self._encoder.passages, texts)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # `_ask` says of which text a vector is not finite
            return [[vector] for vector in vectors / np.maximum(lengths, 1e-12)]
