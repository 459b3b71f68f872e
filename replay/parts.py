"""The parts of a batch whose payloads do not fit one message: each bounded, none twice.

A cut follows from the lengths of the payloads alone, so a replay that was started again makes the
same one.
"""

from collections.abc import Sequence

PART_BYTES = 32 << 20  # of payloads; one payload alone may be half of that


def cut(payloads: Sequence[bytes], most_bytes: int) -> list[tuple[bytes, ...]]:
    """Cut payloads, in their order, into parts of at most so many bytes, or of one payload."""
    parts: list[list[bytes]] = []
    left = 0
    for payload in payloads:
        if not parts or len(payload) > left:
            parts.append([])
            left = most_bytes
        parts[-1].append(payload)
        left -= len(payload)
    return [tuple(part) for part in parts]


def joined(payloads: Sequence[bytes], sizes: Sequence[int]) -> tuple[tuple[bytes, ...], ...]:
    """Return the payloads by group; raise ValueError where there are not as many as `sizes` say."""
    if len(payloads) != sum(sizes):
        raise ValueError(f"{len(payloads)} payloads for groups of {sum(sizes)} in all")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(tuple(payloads[end - size : end]) for end, size in zip(ends, sizes, strict=True))
