"""The curriculum of a warm start: the demonstrations of each step; and its output folder."""

import contextlib
import hashlib
import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.load import ConfigError, save
from configs.runtime import files
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadModel
from scripts.warm_start.demonstrations import BadDemonstrations, Demonstration

if TYPE_CHECKING:  # it imports torch
    from learner.imitation import Segment

CURRICULUM, LOSSES, MODEL, CONFIG = "curriculum.json", "losses.json", "model", "config.yaml"
_DRAFT = files.draft_of(Path(CURRICULUM)).name


@dataclass(frozen=True, eq=False)
class Curriculum:
    """The demonstrations of each step. The seed decides, so that no order needs saving."""

    learnt: tuple[Demonstration, ...]
    held_out: tuple[Demonstration, ...]
    rows: int
    seed: int

    @classmethod
    def of(
        cls, demonstrations: Sequence[Demonstration], held_out: float, rows: int, seed: int
    ) -> "Curriculum":
        """Hold out that share of the *questions*, at least one. Raises BadDemonstrations."""
        questions = sorted({each.question for each in demonstrations})
        random.Random(f"{seed} held out").shuffle(questions)
        kept = set(questions[: max(round(held_out * len(questions)), held_out > 0)])
        learnt = tuple(each for each in demonstrations if each.question not in kept)
        if not learnt:
            raise BadDemonstrations(
                f"--held-out {held_out!r} of {len(questions)} questions leaves none to learn from: "
                "give more demonstrations, or --held-out 0"
            )
        seen = tuple(each for each in demonstrations if each.question in kept)
        return cls(learnt, seen, min(rows, len(learnt)), seed)

    def steps(self, epochs: float) -> int:
        """The number of steps that show every demonstration `epochs` times."""
        return max(1, math.ceil(epochs * len(self.learnt) / self.rows))

    def batch(self, step: int) -> list[tuple["Segment", ...]]:
        """The rows of optimiser step `step` (from 1), in an order drawn anew for each epoch."""
        draws = range((step - 1) * self.rows, step * self.rows)
        return [self._drawn(draw).segments for draw in draws]

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that decide what each step learns."""
        digest = hashlib.blake2b(digest_size=8)
        for each in (*self.learnt, *self.held_out):
            for tokens, own in each.segments:
                digest.update(np.asarray(tokens, np.int32).tobytes() + (b"w" if own else b"r"))
        return {
            "rows": self.rows,
            "learnt": len(self.learnt),
            "held_out": len(self.held_out),
            "seed": self.seed,
            "digest": digest.hexdigest(),
        }

    def _drawn(self, draw: int) -> Demonstration:
        epoch, place = divmod(draw, len(self.learnt))
        return self.learnt[_order(self.seed, epoch, len(self.learnt))[place]]


@lru_cache(2)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return tuple(order)


@dataclass
class OutputFolder:
    """A warm start's folder: the checkpoint to go on from, held-out losses up to there by step."""

    path: Path
    found: checkpoint.Checkpoint | None
    losses: dict[int, float]

    @classmethod
    @contextlib.contextmanager
    def held(cls, config: Config, curriculum: Curriculum) -> Iterator["OutputFolder"]:
        """Lock `run_dir`, read where the same curriculum stopped there, and record curriculum and
        settings. Raises BadCheckpoint, and ConfigError for a folder of something else, one in use
        or one that cannot be used. A refused start leaves nothing in a folder that held nothing.
        """
        folder = Path(config.run_dir)
        with contextlib.ExitStack() as stack:
            with _naming(folder):
                stack.enter_context(files.own_folder(folder, "another warm start"))
                out = cls._of(folder, config, curriculum)
                begins = not (folder / CURRICULUM).exists()
            try:
                with _naming(folder):
                    files.write_json(folder / CURRICULUM, curriculum.identity)
                    save(config, folder / CONFIG)
                yield out
            except (ConfigError, BadModel):
                if begins and not checkpoint.steps(folder):
                    _forget(folder)
                raise

    @classmethod
    def _of(cls, folder: Path, config: Config, curriculum: Curriculum) -> "OutputFolder":
        if not (folder / CURRICULUM).exists():
            _require_free(folder)
            return cls(folder, None, {})
        _refuse_another(folder, curriculum.identity)
        if (found := checkpoint.newest(folder)) is None:
            return cls(folder, None, {})
        checkpoint.check(found, config)
        known = json.loads((folder / LOSSES).read_text()) if (folder / LOSSES).exists() else {}
        losses = {int(step): loss for step, loss in known.items()}
        return cls(folder, found, {s: v for s, v in losses.items() if s <= found.manifest.step})

    @property
    def done(self) -> int:
        """The step of the checkpoint to go on from."""
        return self.found.manifest.step if self.found else 0

    def measured(self, step: int, loss: float) -> None:
        """Keep a held-out loss."""
        self.losses[step] = loss
        files.write_json(self.path / LOSSES, self.losses)

    def best(self, saved: Sequence[int]) -> int | None:
        """The step of `saved` with the lowest held-out loss; None where none was measured."""
        known = [step for step in saved if step in self.losses]
        return min(known, key=self.losses.__getitem__, default=None)

    def deliver(self, last: int) -> tuple[Path, str]:
        """Copy the best (or last) model whole to `path/model`; that path, and which step it is."""
        step, why = last, "the last"
        if (best := self.best(checkpoint.steps(self.path))) is not None:
            step, why = best, f"the best, with a held-out loss of {self.losses[best]:.4f}"
        source, final = self.path / "checkpoints" / f"step-{step}" / "model", self.path / MODEL
        with files.making(final, replaces=True) as draft:
            shutil.copytree(source, draft, dirs_exist_ok=True)
        return final, f"step {step}, {why}"


def _require_free(folder: Path) -> None:
    # The draft is of one that was killed before it began.
    if any(path.name != _DRAFT for path in folder.iterdir()):
        raise ConfigError(f"--out {str(folder)!r}: it holds something else: name a new one")


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except files.Locked as error:
        raise ConfigError(
            f"--out {str(folder)!r}: another warm start is learning there: wait for it, or name "
            "another folder"
        ) from error
    except files.LockUnsupported as error:
        raise ConfigError(
            f"--out {str(folder)!r}: it cannot be locked ({error.strerror}): name a folder on "
            "another file system"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}: {error.strerror or error}: name another folder"
        ) from error


def _forget(folder: Path) -> None:
    for name in (CURRICULUM, CONFIG, LOSSES, _DRAFT):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)


def _refuse_another(folder: Path, here: dict[str, Any]) -> None:
    try:
        there = json.loads((folder / CURRICULUM).read_text())
    except ValueError as error:
        raise ConfigError(f"{folder / CURRICULUM}: not JSON ({error}): name a new --out") from error
    different = [
        f"{name} = {there.get(name)!r} there, {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if different:
        raise ConfigError(
            f"--out {str(folder)!r} is of another curriculum: {'; '.join(different)}: give the "
            "same demonstrations and options, or name a new folder"
        )
