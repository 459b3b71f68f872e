"""Which weights an evaluation loads, and what else stands beside them.

Consumes a run, a checkpoint or a Hugging Face folder; produces the folder that an engine loads (a
checkpoint keeps its weights and their average as one each) and the configuration that it was
trained by. Waits for nothing but the disk; imports no engine.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.changes import recorded_config
from configs.load import ConfigError, dump, load, parse
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadCheckpoint

MODEL, EMA = WEIGHTS = ("model", "ema")  # folders of a checkpoint
# What a model folder holds that the answers depend on: weights, shape, tokenizer, template, code.
_READ = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
# A run's own port may be in use, by that run; what it searched by is no answer to other searches.
_NOT_INHERITED = ("retrieval.port=0", "retrieval.recorded=")


@dataclass(frozen=True)
class Weights:
    """A model folder, what to call it, and the configuration (YAML) that came with it: '' where
    none did.
    """

    name: str
    folder: Path
    config: str = ""


def find(given: str, weights: str) -> Weights:
    """The weights that MODEL and `--weights` name. Raises ConfigError."""
    path = Path(given)
    if (path / "config.json").is_file():
        if weights != MODEL:
            raise ConfigError(
                f"--weights {weights}: {given!r} is a model folder and has no average beside it: "
                "name the checkpoint (or run) that it is of, or leave --weights out"
            )
        return Weights(path.resolve().name, path.resolve())
    if (path / checkpoint.MANIFEST).is_file():
        return _of_checkpoint(path.resolve(), weights)
    if (path / "config.yaml").is_file():
        return _of_run(path.resolve(), weights)
    raise ConfigError(
        f"MODEL = {given!r}: no run (config.yaml), checkpoint ({checkpoint.MANIFEST}) or Hugging "
        "Face folder (config.json): name one of them"
    )


def configured(found: Weights, config_path: str | None, overrides: Sequence[str]) -> Config:
    """The configuration to evaluate by: `--config`, else the weights' own; with overrides. Raises
    ConfigError.
    """
    changes = [*_NOT_INHERITED, *overrides]
    if config_path:
        return load(config_path, changes)
    if not found.config:
        raise ConfigError(
            f"MODEL = {str(found.folder)!r}: a model folder says nothing of prompts and searches: "
            "name a configuration, for example --config configs/base.yaml"
        )
    return parse(found.config, changes, str(found.folder))


def digest(folder: Path) -> str:
    """blake2b of all in a model folder that answers depend on, names included. Raises ConfigError
    where it cannot be read.
    """
    whole = hashlib.blake2b(digest_size=16)
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in _READ and path.is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "blake2b").hexdigest()
                whole.update(f"{path.name} {content}\n".encode())
    except OSError as error:
        raise ConfigError(f"MODEL = {str(folder)!r} cannot be read: {error}") from error
    return whole.hexdigest()


def _of_run(path: Path, weights: str) -> Weights:
    best = path / "checkpoints" / checkpoint.BEST
    try:
        if best.is_dir():
            return _of_checkpoint(best.resolve(), weights)
        if newest := checkpoint.newest(path):
            return _of_checkpoint(newest.folder, weights)
    except BadCheckpoint as error:
        raise ConfigError(str(error)) from error
    raise ConfigError(
        f"MODEL = {str(path)!r}: this run has no checkpoint yet (learner.checkpoint_every): wait "
        "for one, or name the folder of a model"
    )


def _of_checkpoint(path: Path, weights: str) -> Weights:
    folder = path / weights
    if not (folder / "config.json").is_file():
        there = [each for each in WEIGHTS if (path / each / "config.json").is_file()]
        raise ConfigError(
            f"--weights {weights}: checkpoint {str(path)!r} holds no such weights, only "
            f"{' and '.join(there) or 'none at all'}: name others with --weights, or another "
            "checkpoint"
        )
    try:
        config = dump(recorded_config(checkpoint.read(path).manifest.config))
    except (BadCheckpoint, ValueError) as error:
        raise ConfigError(
            f"MODEL = {str(path)!r}: its configuration cannot be read: {error}: name its model "
            f"folder, {folder}, and a configuration with --config"
        ) from error
    run = path.parent.parent.name if path.parent.name == "checkpoints" else ""
    average = "" if weights == MODEL else f"-{weights}"
    return Weights(f"{run}-{path.name}{average}".lstrip("-"), folder, config)
