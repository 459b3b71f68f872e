"""The configuration and the tokenizer of a run, read once."""

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from configs.load import ConfigError, load
from configs.schema import Config
from scripts.runs.show import load_tokenizer
from scripts.setup.resolve import run_config


@lru_cache(64)
def config_of(run: Path) -> Config | None:
    """A run's configuration; None where it cannot be read."""
    try:
        return load(run_config(run))
    except ConfigError:
        return None


def tokenizer_of(run: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a run's model, or why there is none."""
    config = config_of(run)
    if config is None:
        return None, f"{run}: its configuration cannot be read, so numbers of tokens are shown"
    return _of_model(config.model.path)


@lru_cache(16)
def _of_model(path: str) -> tuple[Tokenizer | None, str]:
    try:
        return load_tokenizer(path), ""
    except Exception as error:  # noqa: BLE001 - of a file that is no tokenizer it raises anything
        return None, f"{error}: numbers of tokens are shown"
