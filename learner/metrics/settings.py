"""A run's hyper-parameters: what its configuration says otherwise than the defaults."""

import json

import msgspec

from configs.load import leaves, marked
from configs.schema import Config
from configs.section import NAMES_SECRET, REACHES_OUT, RUNS_CODE, WRITES_THERE

# No field that holds a secret, a path to one or an address, and not the name of the run itself.
_MARKS = (NAMES_SECRET, REACHES_OUT, RUNS_CODE, WRITES_THERE)
KEPT_BACK = {"run_dir", *(field for mark in _MARKS for field in marked(mark))}
MOST_CHARS = 200  # of a value


def hyper_parameters(config: Config) -> dict[str, str | float]:
    """Dotted field → value, of every field that differs from its default; numbers stay numbers."""
    usual = dict(leaves(msgspec.to_builtins(Config())))
    return {
        field: _shown(value)
        for field, value in leaves(msgspec.to_builtins(config))
        if field not in KEPT_BACK and value != usual.get(field)
    }


def _shown(value: object) -> str | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:MOST_CHARS]
