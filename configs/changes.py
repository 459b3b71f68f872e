"""Where two configurations of one run differ, and which of it a run may live with.

Consumes two configurations; produces the fields that keep one from going on with the other's run.
Waits for nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from configs.schema import Config

MAY_CHANGE = ("learner.total_steps", "learner.eval_every", "learner.checkpoint_every")
# These follow the machine; the fleet may grow.
OPEN = (
    *("run_dir", "retrieval.port", "retrieval.token_file", "rewards.judge.url"),
    *("rewards.judge.key_file", "actors.count"),
)


def recorded_config(tree: object) -> Config:
    """A configuration as a log or a checkpoint holds it. Raises ValueError."""
    return msgspec.convert(tree, Config)


def differences(recorded: Config, given: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted field → both values, of every field that a run must keep and `given` does not."""
    ours, theirs = (dict(leaves(msgspec.to_builtins(config))) for config in (given, recorded))
    return {
        field: (value, ours[field])
        for field, value in theirs.items()
        if field not in (*MAY_CHANGE, *OPEN) and value != ours[field]
    }


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names and values of what a tree of sections says."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
