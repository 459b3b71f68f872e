"""The model that a command is given: a run's, a checkpoint's, or a Hugging Face folder.

A checkpoint keeps its weights and their average as one folder each, which may be an adapter's.
Imports no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from configs import trust
from configs.load import ConfigError, dump, load, parse, recorded_config
from configs.runtime import strict_yaml
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadCheckpoint
from scripts.setup import adapter, hub

MODEL, EMA = WEIGHTS = ("model", "ema")  # folders of a checkpoint
_RUNS = "config.yaml"


@dataclass(frozen=True)
class Found:
    """A model folder: the words that named it, its own name, and the configuration on record of its
    training (a run's or a checkpoint's; None where there is none).
    """

    given: str
    folder: Path
    name: str
    record: Path | None


def find(given: str, weights: str = MODEL) -> Found:
    """The model, its weights, or those of a run's best or newest checkpoint. Raises ConfigError."""
    local = hub.model("MODEL", given)
    path = Path(local).resolve()
    if (path / "config.json").is_file():
        if weights != MODEL:
            raise ConfigError(
                f"--weights {weights}: {given!r} is a model folder and has no average beside it: "
                "name the checkpoint (or run) that it is of, or leave --weights out"
            )
        named = Path(given if local != given else path)
        own = path.parent if adapter.is_adapter(path.parent) else path
        return Found(given, path, named.name, _record_beside(own))
    if not (path / checkpoint.MANIFEST).is_file():
        if _is_model(path / weights):  # a warm start's, or what was copied
            return Found(given, _whole(path / weights), _named(path, weights), _record_of(path))
        if not (path / _RUNS).is_file():
            raise ConfigError(
                f"MODEL = {given!r}: no run ({_RUNS}), checkpoint ({checkpoint.MANIFEST}) or "
                "Hugging Face folder (config.json): name one of them"
            )
    of = _checkpoint_of(path)
    return Found(given, _weights_in(of, weights), _named(of, weights), _record_of(path))


def configured(
    given: str,
    record: Path | None,
    config_path: str | None,
    overrides: Sequence[str],
    *,
    trusted: bool = False,
    reads: Sequence[str] = (),
) -> Config:
    """The configuration in `--config`, else on record, with overrides; of a record that is not
    `trusted` the command `reads` no more than configs/trust.py lets it. Raises ConfigError.
    """
    if config_path:
        return load(config_path, overrides)
    if record is None:
        raise ConfigError(
            f"MODEL = {given!r} says nothing of prompts, turns and searches: name a configuration, "
            "--config FILE, for example configs/base.yaml"
        )
    config = _recorded(given, record, overrides)
    said = trust.given(overrides)
    trust.require(config, source=str(record), trust=trusted, given=said, of=reads)
    return config


def _recorded(given: str, record: Path, overrides: Sequence[str]) -> Config:
    if record.name == _RUNS:
        return load(record, overrides)
    try:
        recorded = dump(recorded_config(checkpoint.read(record.parent).manifest.config))
    except (BadCheckpoint, ValueError) as error:
        raise ConfigError(
            f"MODEL = {given!r}: its configuration cannot be read: {error}: name one, --config FILE"
        ) from error
    return parse(recorded, overrides, str(record.parent))


def _record_of(path: Path) -> Path | None:
    known = (path / _RUNS, path / checkpoint.MANIFEST)
    return next((file for file in known if file.is_file()), None)


def _record_beside(model: Path) -> Path | None:
    """That of the checkpoint, or of the warm start, in which a model folder lies; or one that was
    put into it: others have a file of that name too, which says nothing to us.
    """
    runs = [model / _RUNS, *([model.parent / _RUNS] if model.name in WEIGHTS else [])]
    known = (*filter(_is_ours, runs), model.parent / checkpoint.MANIFEST)
    return next((file for file in known if file.is_file()), None)


def _is_ours(file: Path) -> bool:
    """True for a configuration of ours: it has our fields, the run's directory among them."""
    try:
        tree = strict_yaml.read(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(tree, dict) and {"run_dir"} <= tree.keys() <= set(Config.__struct_fields__)


def _checkpoint_of(path: Path) -> Path:
    if (path / checkpoint.MANIFEST).is_file():
        return path
    best = path / "checkpoints" / checkpoint.BEST
    if best.is_dir():
        return best.resolve()
    if steps := checkpoint.steps(path):
        return path / "checkpoints" / f"step-{steps[-1]}"
    raise ConfigError(
        f"MODEL = {str(path)!r}: this run has no checkpoint yet (learner.checkpoint_every): wait "
        "for one, or name the folder of a model, with --config"
    )


def _weights_in(path: Path, weights: str) -> Path:
    folder = path / weights
    if not _is_model(folder):
        there = [each for each in WEIGHTS if _is_model(path / each)]
        raise ConfigError(
            f"--weights {weights}: checkpoint {str(path)!r} holds no such weights, only "
            f"{' and '.join(there) or 'none at all'}: name others with --weights, or another "
            "checkpoint"
        )
    try:
        checkpoint.read(path)
    except BadCheckpoint as error:
        raise ConfigError(
            f"{error}; to use them as they are, name their folder, {folder}, and a configuration "
            "with --config"
        ) from error
    return _whole(folder)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or adapter.is_adapter(folder)


def _whole(folder: Path) -> Path:
    return Path(adapter.whole("MODEL", str(folder)))


def _named(path: Path, weights: str) -> str:
    run = f"{path.parent.parent.name}-" if path.parent.name == "checkpoints" else ""
    return f"{run}{path.name}{'' if weights == MODEL else f'-{weights}'}"
