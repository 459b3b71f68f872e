"""One rank's part of the training state: all that the next step depends on.

fp32 masters, optimiser moments and step counts, the averages' masters and update counts, and the
random generators. Read by as many ranks at the same ZeRO stage it is the state that was saved, bit
for bit; by another number of ranks, or at another stage, the same masters, moments and averages.
It names the settings it was made with and is refused under others; nothing in it is executable.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from configs.schema import Config
from learner.errors import BadModel
from learner.model import state_files
from learner.model.ema import Averages
from learner.model.shards import Piece, Shards
from learner.model.state_files import MASTER, MOMENT, RANK, RANKS, StateFiles, path_of

FORMAT = "2"


class Stateful(Protocol):
    """The engine of one rank, as far as its state is concerned."""

    rank: int
    ranks: int
    model: nn.Module
    device: torch.device

    @property
    def shards(self) -> Shards:
        """This rank's part of the weights."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by Hugging Face name."""
        ...

    def optimiser_state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimiser's live state by master."""
        ...


def save_state(folder: Path, config: Config, engine: Stateful, averages: Averages) -> None:
    """Write this rank's file into `folder`; it is on the disk when this returns."""
    shards, moments = engine.shards, engine.optimiser_state()
    masters, pieces = shards.masters(), shards.saved()
    runs = {MASTER: [(piece, piece.of(masters)) for piece in pieces]}
    for piece in pieces:
        for key, value in moments.get(masters[piece.master], {}).items():
            if isinstance(value, Tensor):
                of_piece = piece.of({piece.master: value}) if value.dim() else value.clone()
                runs.setdefault(f"{MOMENT}/{key}", []).append((piece, of_piece))
    own = _random_states(engine.device)
    for kind, average in averages.all().items():
        runs[kind] = [(piece, piece.of(average.master)) for piece in pieces]
        own[_updates(kind)] = torch.tensor(average.updates)
    settings = _settings(config, engine) | {RANK: str(engine.rank), RANKS: str(engine.ranks)}
    state_files.write(path_of(folder, engine.rank), settings, runs, own)


def load_state(folder: Path, config: Config, engine: Stateful, averages: Averages) -> None:
    """Take the state back, also into the weights that compute. Collective.

    It must hold every average that the configuration uses; others are left in it. Raises BadModel
    naming the field that differs, or what is missing, before anything is changed.
    """
    shards = engine.shards
    masters, pieces = shards.masters(), shards.pieces()
    settings = _settings(config, engine)
    with state_files.opened(folder, pieces, settings, engine.rank, engine.ranks) as files:
        _check_averages(folder, files, averages, config)
        with torch.no_grad():
            for piece in pieces:
                files.copy(MASTER, piece, piece.of(masters))
                for kind, average in averages.all().items():
                    files.copy(kind, piece, piece.of(average.master))
            _load_moments(files, pieces, masters, engine.optimiser_state())
        for kind, average in averages.all().items():
            average.updates = int(files.own(_updates(kind)))
        shards.load(shards.own())
        torch.set_rng_state(files.own("random/cpu"))
        if engine.device.type == "cuda" and files.has("random/cuda"):
            torch.cuda.set_rng_state(files.own("random/cuda"), engine.device)


def _load_moments(
    files: StateFiles,
    pieces: Sequence[Piece],
    masters: Mapping[str, Tensor],
    moments: dict[Tensor, dict[str, Any]],
) -> None:
    for master in masters.values():
        moments.pop(master, None)
    for piece in pieces:
        master = masters[piece.master]
        for key in files.moments(piece.weight):
            kept = moments.setdefault(master, {})
            # Step counts are scalars, which the optimiser keeps on the CPU.
            if (scalar := files.scalar(f"{MOMENT}/{key}", piece.weight)) is not None:
                kept[key] = scalar
                continue
            if key not in kept:
                kept[key] = torch.zeros_like(master, requires_grad=False)  # padding's stay 0
            files.copy(f"{MOMENT}/{key}", piece, piece.of({piece.master: kept[key]}))


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _settings(config: Config, engine: Stateful) -> dict[str, str]:
    """The settings that give the numbers their meaning, by field."""
    shapes = sorted((name, *shape) for name, shape in engine.shapes().items())
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=6).hexdigest()
    return {
        "format": FORMAT,
        "model.path": f"{type(engine.model).__name__} {digest}",
        "model.dtype": config.model.dtype,
        "learner.optimiser": config.learner.optimiser,
        "learner.anchor": config.learner.anchor,
    }


def _updates(kind: str) -> str:
    return f"{kind}_updates"


def _check_averages(folder: Path, files: StateFiles, averages: Averages, config: Config) -> None:
    for kind in averages.all():
        if not files.has(_updates(kind)):
            field = "proximal" if kind == "ema" else "anchor"
            raise BadModel(
                f"state {str(folder)!r} holds no {kind!r}, the average of learner.{field} = "
                f"{getattr(config.learner, field)!r}: resume with the run's own learner.{field}, "
                "or start a new run from the checkpoint's model/ folder"
            )
