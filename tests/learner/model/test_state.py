"""A training state read by other ranks, at another stage: every element in its place."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from configs.schema import Config, LearnerConfig
from learner.errors import BadModel
from learner.model.ema import Averages, Ema
from learner.model.shards import Partitioned, Scattered, Shards, Whole
from learner.model.state import load_state, save_state

SHAPES = {"embed": (5, 3), "norm": (3,), "bias": (1,), "head": (7, 2)}
CONFIG = Config(learner=LearnerConfig(proximal_decay=0.5))
LAYOUTS = [(stage, ranks) for stage in (0, 1, 3) for ranks in (1, 2, 3, 5)]


class Buffers(Partitioned):
    """Without the other ranks to gather from."""

    def load(self, values: dict[str, Tensor]) -> None: ...


class Rank:
    """An engine's state, laid out as DeepSpeed does at a ZeRO stage; padding is NaN."""

    device, model = torch.device("cpu"), nn.Module()

    def __init__(self, stage: int, rank: int, ranks: int, first: float | None) -> None:
        """Numbers from `first` on, another thousand for each kind; None: zeros."""
        self.rank, self.ranks, self.moments = rank, ranks, dict[Tensor, dict[str, Tensor]]()
        of = {0: self._whole, 1: self._partitioned, 3: self._scattered}[stage]
        filled = [torch.zeros(sum(map(numel, SHAPES)))] * 4
        if first is not None:
            filled = [torch.arange(len(filled[0])) + first + 1000 * kind for kind in range(4)]
        self.shards, others = of(filled[0]), [of(values).masters() for values in filled[1:]]
        for name, master in self.shards.masters().items():
            first_moment, second = (each[name].clone() for each in others[:2])
            step = torch.tensor(first or 0.0)
            self.moments[master] = {"exp_avg": first_moment, "exp_avg_sq": second, "step": step}
        self.averages = Averages(Ema(self, 0.5), None)
        self.averages.proximal.updates = int(first or 0)
        for name, value in self.averages.proximal.master.items():
            value.copy_(others[2][name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return SHAPES

    def optimiser_state(self) -> dict[Tensor, dict[str, Tensor]]:
        return self.moments

    def _whole(self, values: Tensor) -> Shards:
        parts = values.clone().split([numel(name) for name in SHAPES])
        named = {name: part.view(SHAPES[name]) for name, part in zip(SHAPES, parts, strict=True)}
        return Whole(named, None, self.rank, self.ranks)

    def _partitioned(self, values: Tensor) -> Shards:
        flat = torch.cat([values, torch.full((-len(values) % (2 * self.ranks),), torch.nan)])
        parts = flat[: len(values)].split([numel(name) for name in SHAPES])
        own = flat.chunk(self.ranks)[self.rank]
        return Buffers(dict(zip(SHAPES, parts, strict=True)), [own.clone()], [flat], [own])

    def _scattered(self, values: Tensor) -> Shards:
        sizes = [-(-numel(name) // self.ranks) for name in SHAPES]
        flat, weights = torch.full((sum(sizes),), torch.nan), {}
        parts = zip(values.split([numel(n) for n in SHAPES]), flat.split(sizes), strict=True)
        for name, (whole, own) in zip(SHAPES, parts, strict=True):
            weights[name] = weight = nn.Module()
            weight.ds_tensor, weight.ds_numel = own, len(whole)
            weight.ds_zero_partition_rank = self.rank
            found = whole[self.rank * len(own) : (self.rank + 1) * len(own)]
            own[: len(found)] = found
        return Scattered(weights, [flat.clone()], [flat], lambda: None)


def numel(name: str) -> int:
    return torch.Size(SHAPES[name]).numel()


def saved(folder: Path, stage: int, ranks: int) -> None:
    for rank in range(ranks):
        one = Rank(stage, rank, ranks, 100.0)
        save_state(folder, CONFIG, one, one.averages)


def gathered(ranks: Sequence[Rank], kind: str) -> dict[str, Tensor]:
    """Whole weights, from all ranks' pieces; what no piece covers is NaN."""
    whole = {name: torch.full((numel(name),), torch.nan) for name in SHAPES}
    for rank in ranks:
        masters = rank.shards.masters()
        values = {n: rank.moments[m][kind] for n, m in masters.items()} if "exp" in kind else {}
        values = values or (masters if kind == "master" else rank.averages.proximal.master)
        for piece in rank.shards.pieces():
            end = piece.start + piece.count
            whole[piece.weight][piece.start : end] = piece.of(values)
    return whole


@pytest.mark.parametrize(("stage", "ranks"), LAYOUTS)
def test_every_layout_reads_every_other(tmp_path: Path, stage: int, ranks: int) -> None:
    saved(tmp_path, stage, ranks)
    for other, number in LAYOUTS:
        read = [Rank(other, rank, number, None) for rank in range(number)]
        for rank in read:
            load_state(tmp_path, CONFIG, rank, rank.averages)
            assert rank.averages.proximal.updates == 100
            assert all(kept["step"] == 100.0 for kept in rank.moments.values())
        for index, kind in enumerate(("master", "exp_avg", "exp_avg_sq", "ema")):
            found = torch.cat([*gathered(read, kind).values()])
            assert torch.equal(found, torch.arange(len(found)) + 100.0 + 1000 * index), kind


@pytest.mark.parametrize(("stage", "ranks"), LAYOUTS)
def test_all_ranks_together_save_every_element_once(stage: int, ranks: int) -> None:
    pieces = [p for rank in range(ranks) for p in Rank(stage, rank, ranks, None).shards.saved()]
    elements = [(p.weight, p.start + i) for p in pieces for i in range(p.count)]
    assert sorted(elements) == sorted((name, i) for name in SHAPES for i in range(numel(name)))


def test_a_rank_opens_no_more_files_than_hold_its_elements(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5)
    for other in (0, 1, 3):
        path = tmp_path / f"rank-{other}.safetensors"
        path.write_bytes(path.read_bytes() if other == 0 else b"")  # rank 0's says how many
    rank = Rank(1, 2, 5, None)
    load_state(tmp_path, CONFIG, rank, rank.averages)
    expected = Rank(1, 2, 5, 100.0).shards.masters()
    assert torch.equal(rank.shards.masters()["partition.0"], expected["partition.0"])


def test_what_is_missing_of_a_state_is_named_and_nothing_changed(tmp_path: Path) -> None:
    saved(tmp_path, 3, 3)
    rank = Rank(3, 0, 2, None)
    (tmp_path / "rank-2.safetensors").unlink()
    with pytest.raises(BadModel, match=r"is not whole: rank-2.safetensors of 3 is missing"):
        load_state(tmp_path, CONFIG, rank, rank.averages)
    shutil.copy(tmp_path / "rank-1.safetensors", tmp_path / "rank-2.safetensors")
    rank = Rank(3, 1, 2, None)
    with pytest.raises(BadModel, match=r"learner.rank = '1' there, '2' here"):
        load_state(tmp_path, CONFIG, rank, rank.averages)
    assert not rank.shards.masters()["partition.0"].nan_to_num().any()
