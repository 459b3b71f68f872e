"""What is told of a run's configuration: to trackers no secret, to TensorBoard what differs."""

import json
from typing import Any

import msgspec

from configs.load import leaves, marked
from configs.schema import Config
from configs.section import NAMES_SECRET, REACHES_OUT, RUNS_CODE

MOST_CHARS = 200  # of a value


def told_config(config: Config) -> dict[str, Any]:
    """The fields of a configuration, by dotted names, that are no secret's: none that runs code,
    names a secret or an address, for these may hold one.
    """
    kept_back = {field for mark in (NAMES_SECRET, REACHES_OUT, RUNS_CODE) for field in marked(mark)}
    found = leaves(msgspec.to_builtins(config))
    return {field: value for field, value in found if field not in kept_back}


def hyper_parameters(config: Config) -> dict[str, str | float]:
    """Dotted field → value, of every field that differs from its default; numbers stay numbers."""
    usual = dict(leaves(msgspec.to_builtins(Config())))
    return {
        field: _shown(value)
        for field, value in told_config(config).items()
        if field != "run_dir" and value != usual.get(field)
    }


def _shown(value: object) -> str | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:MOST_CHARS]
