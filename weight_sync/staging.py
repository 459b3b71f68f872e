"""Two reused sets of buckets: the learner's thread fills, the publisher's thread sends.

Neither thread waits: while one parcel is being sent, or kept for an actor that comes late, the
other set is filled, and filled again by the next version if nobody has asked for it (the latest
wins). A set that is being filled or sent is in nobody else's hands, so no parcel is ever torn.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from weight_sync.buckets import BucketViews, InTurn, allocate, plan
from weight_sync.protocol import TensorSpec


@dataclass(frozen=True)
class Parcel:
    """One version ready to be sent; `buckets` are the reader's until it asks for the next."""

    version: int
    specs: tuple[TensorSpec, ...]
    views: BucketViews = field(repr=False)
    probe_tokens: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    start_logprobs: tuple[float, ...]

    @property
    def buckets(self) -> list[torch.Tensor]:
        """The bytes, uint8[size] each."""
        return self.views.buckets

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return sum(map(len, self.buckets))


class Staging:
    """The double buffer; `put` on one thread, `newest` on another."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what floating tensors travel as; None: as they are."""
        self.overtaken = 0
        self.start_logprobs: tuple[float, ...] = ()  # of the probe under model.path's weights
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._lock = threading.Lock()
        self._specs: tuple[TensorSpec, ...] = ()
        self._free: list[BucketViews] = []
        self._ready: Parcel | None = None
        self._taken: Parcel | None = None

    def put(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        probe_tokens: Sequence[int],
        probe_logprobs: Sequence[float],
    ) -> None:
        """Copy a version in; it replaces one that was not taken yet.

        The first version fixes names, shapes and dtypes. Raises ManifestMismatch when a later one
        differs.
        """
        named = named_tensors if isinstance(named_tensors, InTurn) else list(named_tensors)
        if not self._specs:
            self._specs, sizes = plan(named, self._bucket_bytes, self._dtype)
            self._free = [BucketViews(self._specs, allocate(sizes), self._dtype) for _ in range(2)]
        with self._lock:
            if self._ready is not None:
                self._free.append(self._ready.views)
                self._ready = None
                self.overtaken += 1
            target = self._free.pop()
        try:
            target.pack(named)
        except BaseException:
            with self._lock:
                self._free.append(target)
            raise
        parcel = Parcel(
            version,
            self._specs,
            target,
            probe_tokens=tuple(map(int, probe_tokens)),
            probe_logprobs=tuple(map(float, probe_logprobs)),
            start_logprobs=self.start_logprobs,
        )
        with self._lock:
            self._ready = parcel

    def newest(self) -> Parcel | None:
        """The newest complete version, again as often as asked; None before the first.

        Its buckets are the caller's until the next call: only this frees those of an older one.
        """
        with self._lock:
            if self._ready is not None:
                if self._taken is not None:
                    self._free.append(self._taken.views)
                self._taken, self._ready = self._ready, None
            return self._taken
