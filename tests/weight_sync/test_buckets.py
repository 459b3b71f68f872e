"""Properties of the layout and the digest of packed tensors."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync import buckets
from weight_sync.protocol import ManifestMismatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of mixed dtypes and shapes, scalars, empty and non-contiguous ones among them."""
    drawn = draw(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = [
        torch.randint(0, 200, shape, generator=generator).to(dtype) for shape, dtype in drawn
    ]
    transposed = draw(st.booleans())
    return {f"t{i}": t.T if transposed and t.ndim == 2 else t for i, t in enumerate(tensors)}


def filled(model: dict[str, torch.Tensor], bucket_bytes: int = 96):
    specs, sizes = buckets.plan(model.items(), bucket_bytes)
    staging = buckets.allocate(sizes)
    buckets.BucketViews(specs, staging).pack(model.items())
    return specs, staging


@given(models(), st.integers(1, 300))
@settings(max_examples=60)
def test_round_trip_is_exact(model: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    back = dict(buckets.unpack(*filled(model, bucket_bytes)))
    assert list(back) == list(model)
    for name, tensor in model.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)


@given(models(), st.integers(1, 300))
@settings(max_examples=60)
def test_tensors_do_not_overlap_and_are_aligned(
    model: dict[str, torch.Tensor], bucket_bytes: int
) -> None:
    specs, sizes = buckets.plan(model.items(), bucket_bytes)
    for one, other in itertools.pairwise(specs):
        assert one.bucket < other.bucket or one.offset_bytes + one.nbytes <= other.offset_bytes
    for spec in specs:
        assert spec.offset_bytes % buckets.ALIGNMENT_BYTES == 0
        assert spec.offset_bytes + spec.nbytes <= sizes[spec.bucket]


@given(st.data())
@settings(max_examples=60)
def test_digest_changes_with_any_bit(data: st.DataObject) -> None:
    _, staging = filled({"a": torch.arange(30.0), "b": torch.arange(7)})
    before = buckets.digest(staging)
    bucket = data.draw(st.sampled_from(staging))
    at, bit = data.draw(st.integers(0, len(bucket) - 1)), data.draw(st.integers(0, 7))
    bucket[at] ^= 1 << bit
    assert buckets.digest(staging) != before
    bucket[at] ^= 1 << bit
    assert buckets.digest(staging) == before


def test_a_bucket_holds_at_most_its_bytes_unless_one_tensor_is_larger() -> None:
    model = {"a": torch.zeros(16), "b": torch.zeros(16), "c": torch.zeros(100), "d": torch.zeros(1)}
    specs, sizes = buckets.plan(model.items(), 128)
    assert [spec.bucket for spec in specs] == [0, 0, 1, 2]
    assert sizes == (128, 448, 64)


def test_tied_weights_are_sent_once() -> None:
    embed = torch.nn.Parameter(torch.ones(4, 4))
    model = {"embed": embed, "head": embed, "view": embed[:2], "empty": torch.zeros(0)}
    specs, _ = buckets.plan([*model.items(), ("empty2", torch.zeros(0))], 1024)
    assert [spec.name for spec in specs] == ["embed", "view", "empty", "empty2"]


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        buckets.plan([("a", torch.zeros(1)), ("a", torch.ones(1))], 64)


@pytest.mark.parametrize(
    ("given_instead", "said"),
    [
        ({"a": torch.zeros(3)}, r"'a': planned float32\[2\], given float32\[3\]"),
        ({"a": torch.zeros(2).half()}, r"planned float32\[2\], given float16\[2\]"),
        ({}, r"'a': planned float32\[2\], given has none"),
    ],
)
def test_other_tensors_than_planned_are_named(given_instead: dict, said: str) -> None:
    specs, staging = filled({"a": torch.zeros(2)})
    with pytest.raises(ManifestMismatch, match=said):
        buckets.BucketViews(specs, staging).pack(given_instead.items())


class Gathered:
    """A model of which one tensor at a time is whole."""

    def __init__(self, model: dict[str, torch.Tensor]) -> None:
        self.model = model

    def begin(self) -> Iterator[tuple[str, torch.Tensor]]:
        whole = torch.empty(0)
        for name, tensor in self.model.items():
            whole = tensor.clone()
            yield name, whole
            whole.zero_() if whole.numel() else None


@given(models())
@settings(max_examples=30)
def test_tensors_that_are_whole_only_in_their_turn_are_copied_then(model) -> None:
    named = buckets.InTurn(Gathered(model).begin)
    specs, sizes = buckets.plan(named, 96)
    staging = buckets.allocate(sizes)
    buckets.BucketViews(specs, staging).pack(named)
    assert buckets.digest(staging) == buckets.digest(filled(model)[1])
    named = buckets.InTurn(Gathered(dict(list(model.items())[1:])).begin)
    with pytest.raises(ManifestMismatch, match="given has none"):
        buckets.BucketViews(specs, staging).pack(named)


@given(models())
@settings(max_examples=30)
def test_floating_tensors_travel_as_the_actors_hold_them(model) -> None:
    specs, sizes = buckets.plan(model.items(), 96, torch.bfloat16)
    places = buckets.BucketViews(specs, buckets.allocate(sizes), torch.bfloat16)
    places.pack(model.items())
    for name, tensor in buckets.unpack(specs, places.buckets):
        own = model[name]
        assert tensor.dtype == (torch.bfloat16 if own.is_floating_point() else own.dtype)
        assert torch.equal(tensor, own.to(tensor.dtype))


def test_threads_change_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = [torch.arange(3 << 20, dtype=torch.int32).view(torch.uint8), torch.ones(7).byte()]
    alone = buckets.digest(staging)
    monkeypatch.setattr(buckets, "THREADED_BYTES", 0)
    assert buckets.digest(staging) == alone
    assert buckets.digest([torch.cat(staging)]) == alone


def test_buckets_on_a_gpu_are_nobody_else_s_before_bytes_are_received_into_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transport writes on a stream of its own: what is queued on this one must not come later."""
    done: list[str] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: done.append("zeros queued"))
    monkeypatch.setattr(
        torch, "empty", lambda size, **_: done.append("allocated") or empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: done.append(f"waited, {place}"))
    assert [len(each) for each in buckets.allocate((64, 128), "cuda:0")] == [64, 128]
    assert done == ["allocated", "allocated", "waited, cuda:0"]
