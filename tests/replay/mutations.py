"""Mutations of the files of a log: what may become of them on a disk, or as they are copied; and of
a record or message that its writer then sealed.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from replay.log.format import FRAME, HEADER, MAX_RECORD_BYTES

Files = dict[int, bytes]  # segment → its bytes
NUMBERS = (-1, 0, 1, 2, 7, 2**31, 2**40, 2**63 - 1, -(2**63), 10**12, float("nan"), 1e308)


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def starts(data: bytearray) -> list[int]:
    """Return where frames begin, as far as their lengths lead."""
    at, found = HEADER.size, []
    while at + FRAME.size <= len(data):
        found.append(at)
        at += FRAME.size + FRAME.unpack_from(data, at)[0]
    return found


def stretch(data: bytearray, rng: random.Random) -> tuple[int, int]:
    """Anywhere, or from a record's start to another's."""
    if rng.randrange(3) == 0 and (whole := starts(data)):
        first, last = sorted(rng.choices([*whole, len(data)], k=2))
        return first, last
    at = rng.randrange(len(data))
    return at, at + rng.choice((1, rng.randint(1, 30), rng.randint(1, 400)))


def double(data: bytearray, rng: random.Random) -> None:
    start, end = stretch(data, rng)
    data[end:end] = data[start:end]


def remove(data: bytearray, rng: random.Random) -> None:
    start, end = stretch(data, rng)
    del data[start:end]


def exchange(data: bytearray, rng: random.Random) -> None:
    (a, b), (c, d) = sorted((stretch(data, rng), stretch(data, rng)))
    if b <= c:
        data[a:d] = data[c:d] + data[b:c] + data[a:b]


def zero(data: bytearray, rng: random.Random) -> None:
    start, end = stretch(data, rng)
    data[start:end] = bytes(len(data[start:end]))


def lengthen(data: bytearray, rng: random.Random) -> None:
    """Another length in one frame: off by little, off by much, none, more than there may be."""
    if whole := starts(data):
        at = rng.choice(whole)
        length = FRAME.unpack_from(data, at)[0]
        wrong = (length + rng.choice((-1, 1)), 0, rng.randrange(1 << 32), MAX_RECORD_BYTES, 2000)
        data[at : at + 4] = (rng.choice(wrong) % (1 << 32)).to_bytes(4, "little")


INSIDE: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip, cut, double, remove, exchange, zero, lengthen,
)  # fmt: skip


def mutated(files: Files, rng: random.Random) -> Files:
    """One to three changes."""
    changed = dict(files)
    for _ in range(rng.randint(1, 3)):
        one, other = rng.choice(sorted(changed)), rng.choice(sorted(changed))
        data, how = bytearray(changed[one]), rng.randrange(12)
        if how < 9 and data:
            rng.choice(INSIDE)(data, rng)
            changed[one] = bytes(data)
        elif how == 9:
            changed[one], changed[other] = changed[other], changed[one]
        elif how == 10:  # a stretch of one segment stands in another
            start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            at = rng.randrange(len(changed[other]) + 1)
            changed[other] = changed[other][:at] + changed[one][start:end] + changed[other][at:]
        elif len(changed) > 1:
            del changed[one]
    return changed


def leaves(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a tree: its container, and the key there."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    found = [(tree, key) for key in keys]
    for key in keys:
        if isinstance(tree[key], dict | list):
            found += leaves(tree[key])
    return found


def changed(payload: bytes, rng: random.Random) -> bytes:
    """The record with one value changed for another of its kind, or taken away or doubled."""
    tree = msgspec.msgpack.decode(payload)
    place, key = rng.choice(leaves(tree))
    value = place[key]
    if isinstance(value, list):
        place[key] = value[1:] if rng.randrange(2) else value * 2
    elif isinstance(value, bool) or value is None or isinstance(value, dict):
        place[key] = rng.choice((True, None, {}, 0))
    elif isinstance(value, int | float):
        place[key] = rng.choice((*NUMBERS, value + 1, value - 1))
    elif isinstance(value, bytes):
        data = bytearray(value or b"x")
        flip(data, rng)
        place[key] = bytes(data)
    else:
        place[key] = rng.choice(("", "train", "eval", "group_deadline", value + "x", "Stopped"))
    return msgspec.msgpack.encode(tree)
