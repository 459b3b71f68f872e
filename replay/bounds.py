"""The bounds of a request, whatever the run: no number, list or text in it is taken beyond them.

A leaf. What the run itself bounds (its steps, groups and leases) is `replay.ledger.bounds`.
"""

from collections.abc import Iterable
from typing import Any

from replay.protocol import CodecError, Heartbeat, Request

MAX_CAPACITY = 1 << 16  # rollouts of one actor
MAX_ID_CHARS = 1024
MAX_CAUSE_CHARS = 1 << 16  # an engine's whole traceback
MAX_GAUGES = 1024
MAX_GAUGE = 1e30  # what is written of it has 32 bits; NaN stands for unknown
MAX_REWARD = 1e9  # its square, summed over a batch, has 32 bits
MAX_TEMPERATURE = 1e3
MAX_NUMBER = 2**53  # what any reader of JSON holds exactly
_RANGES = {
    "capacity": (0, MAX_CAPACITY),
    "incarnation": (0, MAX_NUMBER),
    "policy_version": (0, MAX_NUMBER),
    "step": (0, MAX_NUMBER),
    "part": (0, MAX_NUMBER),
    "group_id": (1, MAX_NUMBER),
    "sibling": (0, MAX_NUMBER),
    "after_step": (0, MAX_NUMBER),
    "after_evaluation": (0, MAX_NUMBER),
}
_LENGTHS = {
    "actor_id": (1, MAX_ID_CHARS),
    "instance": (0, MAX_ID_CHARS),
    "node": (0, MAX_ID_CHARS),
    "tokenizer_digest": (0, MAX_ID_CHARS),
    "cause": (0, MAX_CAUSE_CHARS),
    "held": (0, MAX_CAPACITY),
    "delivering": (0, MAX_CAPACITY),
    "gauges": (0, MAX_GAUGES),
}
_UNITS = {"held": "leases", "delivering": "leases", "gauges": "entries"}


def check_request(request: Request) -> None:
    """Raise CodecError naming the first field that is out of its bounds."""
    kind = type(request).__name__
    for field in request.__struct_fields__:
        value = getattr(request, field)
        if field in _RANGES:
            _check_number(f"{kind}.{field}", value, *_RANGES[field])
        elif field in _LENGTHS:
            _check_length(f"{kind}.{field}", value, _UNITS.get(field, "characters"))
        if field in ("held", "delivering"):
            _check_leases(f"{kind}.{field}", value)
        elif field == "gauges":
            for name, gauge in value.items():
                _check_length(f"{kind}.gauges: a name", name, "characters", (0, MAX_ID_CHARS))
                if abs(gauge) > MAX_GAUGE:
                    raise CodecError(f"{kind}.gauges: {name} is {gauge}: at most {MAX_GAUGE:g}")
    if isinstance(request, Heartbeat) and request.ready is not None:
        check_request(request.ready)


def _check_number(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise CodecError(f"{name} is {value}: {least} to {most}")


def _check_length(name: str, value: Any, unit: str, within: tuple[int, int] | None = None) -> None:
    least, most = within or _LENGTHS[name.rpartition(".")[2]]
    if not least <= len(value) <= most:
        raise CodecError(f"{name} has {len(value)} {unit}: {least} to {most}")


def _check_leases(name: str, leases: Iterable[tuple[int, int]]) -> None:
    for group_id, sibling in leases:
        if not (1 <= group_id <= MAX_NUMBER and 0 <= sibling <= MAX_NUMBER):
            raise CodecError(
                f"{name} names group {group_id}, sibling {sibling}: groups count from 1, "
                "siblings from 0"
            )
