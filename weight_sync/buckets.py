"""Named tensors ⇄ a few flat byte buckets. Pure: no socket, no clock, no model.

A bucket is a one-dimensional uint8 tensor; a tensor lies in it at a 64-byte boundary, so that a
typed view onto it is always legal and the bytes between tensors stay zero (they are part of the
digest).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from weight_sync.protocol import ManifestMismatch, TensorSpec

ALIGNMENT_BYTES = 64

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Layout = dict[str, tuple[tuple[int, ...], str]]  # name → (shape, dtype name)


def plan(
    named_tensors: NamedTensors, bucket_bytes: int
) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Lay tensors out in order into buckets; returns (specs, bucket sizes in bytes).

    Buckets hold at most `bucket_bytes`; a larger tensor gets a bucket of its own. A tensor that
    shares its memory with an earlier one (tied weights) is left out; all tensors must be alive at
    once for that to be told. Raises ValueError on a name given twice.
    """
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    seen: set[object] = set()
    end = 0
    for name, tensor in _untied(named_tensors):
        if name in seen:
            raise ValueError(f"tensor name {name!r} is given twice")
        seen.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        if not sizes or (end > 0 and end + nbytes > bucket_bytes):
            sizes.append(ALIGNMENT_BYTES)
            end = 0
        dtype = dtype_name(tensor.dtype)
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, len(sizes) - 1, end, nbytes))
        end = -(-(end + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        sizes[-1] = max(end, ALIGNMENT_BYTES)
    return tuple(specs), tuple(sizes)


def allocate(bucket_sizes: Sequence[int]) -> list[torch.Tensor]:
    """Zeroed buckets, uint8[size] each."""
    return [torch.zeros(size, dtype=torch.uint8) for size in bucket_sizes]


def pack(
    named_tensors: NamedTensors, specs: Sequence[TensorSpec], buckets: Sequence[torch.Tensor]
) -> None:
    """Copy every tensor of `specs` into its place.

    Raises ManifestMismatch when the tensors are not those that were planned.
    """
    tensors = dict(_untied(named_tensors))
    require_same(
        {spec.name: (spec.shape, spec.dtype) for spec in specs},
        {name: (tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()},
        ("planned", "given"),
    )
    filled = [spec for spec in specs if spec.nbytes]
    if filled:
        places = [_view(spec, buckets) for spec in filled]
        torch._foreach_copy_(places, [tensors[spec.name].detach() for spec in filled])


def unpack(
    specs: Sequence[TensorSpec], buckets: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views onto the buckets, in the order of `specs`; nothing is copied."""
    for spec in specs:
        yield spec.name, _view(spec, buckets)


def digest(buckets: Iterable[torch.Tensor]) -> str:
    """blake2b (16 bytes, hexadecimal) over the buckets in order."""
    total = hashlib.blake2b(digest_size=16)
    for bucket in buckets:
        total.update(memoryview(bucket.numpy()))
    return total.hexdigest()


def require_same(
    left: Layout,
    right: Layout,
    sides: tuple[str, str],
) -> None:
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


def _shown(value: tuple[tuple[int, ...], str] | None) -> str:
    return "has none" if value is None else f"{value[1]}{list(value[0])}"


def _view(spec: TensorSpec, buckets: Sequence[torch.Tensor]) -> torch.Tensor:
    piece = buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.nbytes]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return piece.view(dtype).view(spec.shape)


def _untied(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[tuple[object, ...]] = set()
    for name, tensor in named_tensors:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        yield name, tensor
