"""Checkpoints that are whole or absent: `checkpoints/step-N/{model,[ema],[anchor],[critic],state}`;
and the incarnation, the number of the learner's starts, in `<run_dir>/incarnation`.

A folder is written under another name, fsynced, then renamed: a reader (or a restart) never meets
half of one. Each rank forces its part of `state` to the disk itself before rank 0 names the whole;
another number of ranks may go on from it. `model`, `ema` and `anchor` are Hugging Face folders,
usable as `model.path` by transformers and by vLLM; of an adapter, which is merged into `model`, the
averages and `adapter` are PEFT folders. Resuming needs `state` and `checkpoint.json`.
Nothing here imports torch: a launcher reads checkpoints too.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from safetensors import SafetensorError, safe_open

from configs.load import differences, recorded_config
from configs.runtime.files import (
    DRAFT_SUFFIX,
    OLD_SUFFIX,
    making,
    remove_folder,
    replacing,
    sync,
    weights_bytes,
    weights_digest,
    write_durably,
)
from configs.runtime.watchdog import phase
from configs.schema import Config
from learner.errors import BadCheckpoint
from learner.health.rollback import Rollback

if TYPE_CHECKING:  # it imports torch
    from transformers import PreTrainedTokenizerBase

MANIFEST = "checkpoint.json"
BEST = "best"
INCARNATION_FILE = "incarnation"
_NAME = re.compile(r"step-(\d+)")
# Entries of a model's config.json that say nothing about its shape.
_INCIDENTAL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")


class Exporter(Protocol):
    """The trainer, which writes weights and state."""

    def export(self, folder: Path, /) -> None:
        """Write model, averages and state into `folder`."""
        ...


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `checkpoint.json`; `replay_position` is the last batch trained."""

    step: int
    incarnation: int
    replay_position: int
    seed: int
    dtype: str
    ranks: int
    zero_stage: int
    optimiser: str
    architecture: dict[str, Any]
    architecture_digest: str
    base_digest: str = ""  # of the weights in model.path, where an adapter is trained on them
    rollbacks: tuple[Rollback, ...] = ()  # up to this step
    config: dict[str, Any]

    @classmethod
    def of(
        cls, config: Config, step: int, incarnation: int, rollbacks: tuple[Rollback, ...] = ()
    ) -> "Manifest":
        """The manifest of a checkpoint made now. Raises BadCheckpoint when `model.path` is gone."""
        architecture = read_architecture(config.model.path)
        text = json.dumps(architecture, sort_keys=True)
        return cls(
            step=step,
            incarnation=incarnation,
            replay_position=step,
            seed=config.seed,
            dtype=config.model.dtype,
            ranks=config.learner.ranks,
            zero_stage=config.learner.zero_stage,
            optimiser=config.learner.optimiser,
            architecture=architecture,
            architecture_digest=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
            base_digest=_base_digest(config),
            rollbacks=rollbacks,
            config=msgspec.to_builtins(config),
        )


class Checkpoint(msgspec.Struct, frozen=True):
    """A whole checkpoint."""

    folder: Path
    manifest: Manifest


def save(
    config: Config,
    step: int,
    trainer: Exporter,
    tokenizer: "PreTrainedTokenizerBase",
    incarnation: int = 1,
    rollbacks: tuple[Rollback, ...] = (),
) -> Path:
    """Write the checkpoint of `step` durably and return its folder."""
    parent = _parent(config.run_dir)
    parent.mkdir(parents=True, exist_ok=True)
    for suffix in (DRAFT_SUFFIX, OLD_SUFFIX):
        for leftover in parent.glob(f"step-*{suffix}"):
            shutil.rmtree(leftover)
    final = folder_of(config.run_dir, step)
    with making(final, replaces=True) as draft:
        trainer.export(draft)
        for model in draft.glob("*/config.json"):
            tokenizer.save_pretrained(model.parent)
        manifest = msgspec.json.encode(Manifest.of(config, step, incarnation, rollbacks))
        (draft / MANIFEST).write_bytes(msgspec.json.format(manifest))
    sync(parent.parent)
    return final


@contextmanager
def saving(config: Config, name: str) -> Iterator[None]:
    """The phase in which a checkpoint is written or read: as long as its bytes may take."""
    weights = weights_bytes(config.model.path)
    shown = f"{config.learner.saved_bytes(weights) / 1e9:.1f} GB"
    with phase(f"{name} ({shown})", config.learner.saving_s(weights)):
        yield


def retain(
    run_dir: str | Path,
    keep: int,
    choose: Callable[[Sequence[int]], int | None],
    needed: Collection[int] = (),
) -> None:
    """Point `best` to the step that `choose` picks of those saved, or leave it where it picks none;
    remove all others but the newest `keep` and those that are `needed`.
    """
    parent, saved = _parent(run_dir), steps(run_dir)
    best = choose(saved)
    if best is None:  # its score may be lost: it is still the best that is known
        link = parent / BEST
        match = _NAME.fullmatch(link.readlink().name) if link.is_symlink() else None
        best = int(match[1]) if match else None
    else:
        with replacing(parent / BEST, durable=False) as draft:
            draft.symlink_to(f"step-{best}")
    for old in saved[:-keep]:
        if old != best and old not in needed:
            remove_folder(folder_of(run_dir, old))


def folder_of(run_dir: str | Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return _parent(run_dir) / f"step-{step}"


def steps(run_dir: str | Path) -> list[int]:
    """The steps with a checkpoint, in order."""
    found = (_NAME.fullmatch(path.name) for path in _parent(run_dir).glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def newest(run_dir: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None. Raises BadCheckpoint when it cannot be read."""
    saved = steps(run_dir)
    return read(folder_of(run_dir, saved[-1])) if saved else None


def read(folder: Path) -> Checkpoint:
    """The checkpoint in this folder. Raises BadCheckpoint."""
    try:
        content = (folder / MANIFEST).read_bytes()
        return Checkpoint(folder, msgspec.json.decode(content, type=Manifest))
    except (OSError, msgspec.DecodeError) as error:
        raise BadCheckpoint(
            f"checkpoint {str(folder)!r}: {MANIFEST} cannot be read: {error}; to train on from its "
            f"weights, start a new run with model.path={folder / 'model'}"
        ) from error


def check(checkpoint: Checkpoint, config: Config) -> None:
    """Raise BadCheckpoint, naming every difference, unless `config` can go on from it."""
    ours, theirs = read_architecture(config.model.path), checkpoint.manifest.architecture
    values = {
        f"{key} of model.path": (theirs.get(key), ours.get(key))
        for key in sorted(ours.keys() | theirs.keys())
    }
    if checkpoint.manifest.base_digest:
        of_base = checkpoint.manifest.base_digest, _base_digest(config)
        values[f"the digest of the weights in {config.model.path!r}"] = of_base
    try:
        values |= differences(recorded_config(checkpoint.manifest.config), config)
    except ValueError as error:
        raise BadCheckpoint(
            f"checkpoint {str(checkpoint.folder)!r}: its configuration cannot be read: {error}; to "
            f"train on from its weights, start a new run with "
            f"model.path={checkpoint.folder / 'model'}"
        ) from error
    unequal = [
        f"{field} = {there!r} there, {here!r} here"
        for field, (there, here) in values.items()
        if there != here
    ]
    if unequal:
        what = "another architecture" if ours != theirs else "another setting"
        raise BadCheckpoint(
            f"checkpoint {str(checkpoint.folder)!r} is of {what}: {'; '.join(unequal)}; put "
            "back the run's own settings, model.path and checkpoints, or start a new run"
        )
    states = _states(checkpoint, config)
    if missing := [str(path) for path in states if not path.is_file()]:
        raise BadCheckpoint(
            f"checkpoint {str(checkpoint.folder)!r} is not whole: {', '.join(missing)} is missing; "
            "put it back, or remove the checkpoint"
        )


def check_whole(folder: Path, config: Config) -> None:
    """Raise BadCheckpoint unless `config` can go on from this folder and each file of its state has
    all of its bytes.
    """
    found = read(folder)
    check(found, config)
    for path in _states(found, config):
        try:
            with safe_open(path, "numpy"):
                pass  # it compares header and length
        except (OSError, SafetensorError) as error:
            raise BadCheckpoint(f"checkpoint {str(folder)!r}: {path}: {error}") from error


def next_incarnation(run_dir: str | Path, known: int = 0) -> int:
    """Count this start durably: one more than any before, `known` (a checkpoint's) included.

    A learner that was stopped and wakes up beside its successor is refused by its lower number.
    Raises BadCheckpoint where the file holds no number.
    """
    incarnation = max(last_incarnation(run_dir), known) + 1
    write_durably(Path(run_dir) / INCARNATION_FILE, f"{incarnation}\n")
    return incarnation


def last_incarnation(run_dir: str | Path) -> int:
    """The number of starts so far. Raises BadCheckpoint where the file holds no number."""
    path = Path(run_dir) / INCARNATION_FILE
    text = path.read_text() if path.exists() else "0"
    if not text.strip().isdecimal():
        raise BadCheckpoint(
            f"{path}: {text!r} is not a number: write the highest incarnation in the event log"
        )
    return int(text)


def read_architecture(model_path: str | Path) -> dict[str, Any]:
    """The entries of a model's `config.json` that shape it. Raises BadCheckpoint."""
    path = Path(model_path) / "config.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"model.path = {str(model_path)!r}: {path.name}: {error}") from error
    return {key: content[key] for key in sorted(content) if key not in _INCIDENTAL}


def _states(checkpoint: Checkpoint, config: Config) -> list[Path]:
    """The files of its training state, and of a critic's."""
    kinds = ["state", "critic"] if config.learner.has_critic_model else ["state"]
    names = [f"rank-{rank}.safetensors" for rank in range(checkpoint.manifest.ranks)]
    return [checkpoint.folder / kind / name for kind in kinds for name in names]


def _base_digest(config: Config) -> str:
    return weights_digest(config.model.path) if config.learner.lora.rank else ""


def _parent(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"
