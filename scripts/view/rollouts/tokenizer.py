"""The configuration and the tokenizer of a run, read once, and again where they have changed."""

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from configs.load import ConfigError, load
from configs.schema import Config
from scripts.runs.show import load_tokenizer
from scripts.setup.resolve import run_config


def config_of(run: Path) -> Config | None:
    """A run's configuration; None where it cannot be read."""
    try:
        path = run_config(run)
    except ConfigError:
        return None
    return _config(path, _state(path))


@lru_cache(64)
def _config(path: Path, _: tuple[int, ...]) -> Config | None:
    try:
        return load(path)
    except ConfigError:
        return None


def _state(file: Path) -> tuple[int, ...]:
    """What is another once a file is; nothing where there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def tokenizer_of(run: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a run's model, or why there is none."""
    config = config_of(run)
    if config is None:
        return None, f"{run}: its configuration cannot be read, so numbers of tokens are shown"
    path = config.model.path
    return _of_model(path, _state(Path(path, "tokenizer.json")))


@lru_cache(16)
def _of_model(path: str, _: tuple[int, ...]) -> tuple[Tokenizer | None, str]:
    try:
        return load_tokenizer(path), ""
    except Exception as error:  # noqa: BLE001 - of a file that is no tokenizer it raises anything
        return None, f"{error}: numbers of tokens are shown"
