"""Named tensors ⇄ a few flat byte buckets. Pure: no socket, no clock, no model.

A bucket is a one-dimensional uint8 tensor; a tensor lies in it at a 64-byte boundary, so that a
typed view onto it is always legal and the bytes between tensors stay zero (they are part of the
digest).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from blake3 import blake3

from weight_sync.protocol import ManifestMismatch, TensorSpec

ALIGNMENT_BYTES = 64
THREADED_BYTES = 16 << 20  # below, threads take longer to start than they save
_THREADS = 8

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Layout = dict[str, tuple[tuple[int, ...], str]]  # name → (shape, dtype name)


class InTurn:
    """Named tensors of which each is whole only until the next is asked for, as ZeRO-3 gathers
    them; may be gone through again and again. Tied ones come once.
    """

    def __init__(self, begin: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._begin()


def plan(
    named_tensors: NamedTensors, bucket_bytes: int, dtype: torch.dtype | None = None
) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Lay tensors out in order into buckets; returns (specs, bucket sizes in bytes).

    Buckets hold at most `bucket_bytes`; a larger tensor gets a bucket of its own. A tensor that
    shares its memory with an earlier one (tied weights) is left out. Floating tensors travel as
    `dtype` where one is given. Raises ValueError on a name given twice.
    """
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    seen: set[object] = set()
    end = 0
    for name, tensor in _untied(named_tensors):
        if name in seen:
            raise ValueError(f"tensor name {name!r} is given twice")
        seen.add(name)
        sent = _sent(tensor.dtype, dtype)
        nbytes = tensor.numel() * sent.itemsize
        if not sizes or (end > 0 and end + nbytes > bucket_bytes):
            sizes.append(ALIGNMENT_BYTES)
            end = 0
        shape, bucket = tuple(tensor.shape), len(sizes) - 1
        specs.append(TensorSpec(name, shape, dtype_name(sent), bucket, end, nbytes))
        end = -(-(end + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        sizes[-1] = max(end, ALIGNMENT_BYTES)
    return tuple(specs), tuple(sizes)


def allocate(bucket_sizes: Sequence[int], place: str = "cpu") -> list[torch.Tensor]:
    """Buckets, uint8[size] each: on `cpu` zeroed, and pinned where there is a GPU; on a GPU of any
    content, for bytes that fill them whole. Nothing that is queued there touches these any more, so
    another stream may write at once: zeros, or the reads of what lay there before, would come late.
    """
    if place != "cpu":
        made = [torch.empty(size, dtype=torch.uint8, device=place) for size in bucket_sizes]
        torch.cuda.synchronize(place)
        return made
    pinned = torch.cuda.is_available()
    return [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for size in bucket_sizes]


class BucketViews:
    """Views onto one set of buckets: the tensors of a layout that was planned for `dtype`."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        buckets: list[torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.buckets, self._dtype = buckets, dtype
        self._views = dict(unpack(specs, buckets))
        self._like = {name: (view.shape, view.dtype) for name, view in self._views.items()}

    def pack(self, named_tensors: NamedTensors) -> None:
        """Copy every tensor into its place, cast to what it travels as; returns when all are there.

        Raises ManifestMismatch, having copied nothing (of tensors that come in turn: perhaps some),
        when the tensors are not those that were planned.
        """
        if isinstance(named_tensors, InTurn):
            given = {}
            for name, tensor in named_tensors:
                given[name] = self._layout(tensor)
                if (tensor.shape, _sent(tensor.dtype, self._dtype)) == self._like.get(name):
                    self._views[name].copy_(tensor.detach())
            require_same(self._planned(), given, ("planned", "given"))
            return
        with torch.no_grad():
            self._pack(named_tensors)

    def _pack(self, named_tensors: NamedTensors) -> None:
        """With thousands of tensors every microsecond for each counts."""
        views, layout, dtype = self._views, self._like, self._dtype
        tensors: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors:
            fits = (tensor.shape, _sent(tensor.dtype, dtype)) == layout.get(name)
            (tensors if fits else others)[name] = tensor
        if others or len(tensors) != len(views):
            self._require_tied(tensors, others)
        froms = list(tensors.values())
        if froms:
            torch._foreach_copy_([views[name] for name in tensors], froms, non_blocking=True)
            if froms[0].is_cuda:
                torch.cuda.synchronize()

    def _require_tied(
        self, tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
    ) -> None:
        """Refuse others than those that share the memory of one that is sent."""
        sent = {(each.data_ptr(), *_memory(each)) for each in tensors.values()}
        strange = {n: t for n, t in others.items() if (t.data_ptr(), *_memory(t)) not in sent}
        given = {name: self._layout(tensor) for name, tensor in (tensors | strange).items()}
        require_same(self._planned(), given, ("planned", "given"))

    def _planned(self) -> Layout:
        return {name: self._layout(view) for name, view in self._views.items()}

    def _layout(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), dtype_name(_sent(tensor.dtype, self._dtype))


def unpack(
    specs: Sequence[TensorSpec], buckets: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views onto the buckets, in the order of `specs`; nothing is copied."""
    for spec in specs:
        piece = buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.nbytes]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        yield spec.name, piece.view(dtype).view(spec.shape)


def digest(buckets: Iterable[torch.Tensor]) -> str:
    """blake3 (16 bytes, hexadecimal) over the buckets in order: 7 times as fast as blake2b.

    Where they are large, on as many threads as this process has processors, up to 8; the digest is
    the same.
    """
    whole = list(buckets)
    large = sum(map(len, whole)) >= THREADED_BYTES
    total = blake3(max_threads=min(_THREADS, len(os.sched_getaffinity(0))) if large else 1)
    for bucket in whole:
        total.update(memoryview(bucket.cpu().numpy()))
    return total.hexdigest(length=16)


def require_same(left: Layout, right: Layout, sides: tuple[str, str]) -> None:
    """Raise ManifestMismatch, with both sides' values, unless names, shapes and dtypes agree."""
    wrong = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    if not wrong:
        return
    lines = [
        f"{name!r}: {sides[0]} {_shown(left.get(name))}, {sides[1]} {_shown(right.get(name))}"
        for name in wrong[:3]
    ]
    raise ManifestMismatch(f"{len(wrong)} tensors differ: {'; '.join(lines)}")


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the prefix: `float32`."""
    return str(dtype).removeprefix("torch.")


def _sent(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor travels as."""
    return asked if asked is not None and own.is_floating_point else own


def _shown(value: tuple[tuple[int, ...], str] | None) -> str:
    return "has none" if value is None else f"{value[1]}{list(value[0])}"


def _untied(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(named_tensors, InTurn):
        yield from named_tensors
        return
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if tensor.numel():
            first = seen.get(address := tensor.data_ptr())
            if first is None:
                seen[address] = tensor
            elif _memory(first) == _memory(tensor):
                continue
        yield name, tensor


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors at one address that are the same tensor."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
