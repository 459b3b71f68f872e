"""How many were in a state, on average, in each of some bins of time.

A span adds 1 to a level where it begins and takes 1 where it ends; a sample its own number. Of a
cell of time two sums are kept: of these changes, and of each times what of the cell is left behind
it. So the level's average in the cell is exact, whatever the length of spans, and sums of cells are
those of longer cells.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scripts.view.lanes import RETRIEVAL, STATES, Span

FACTOR = 4
WIDTHS = tuple(
    float(FACTOR**n) for n in range(1, 9)
)  # seconds of the cells that are kept: 4 s to 18 hours
STRIDE = 20  # states of a lane, in a key
assert len(STATES) <= STRIDE


class Changes(NamedTuple):
    """Sums of changes by cell and key (lane and state): their count, and the seconds that the level
    has them in their cell.
    """

    cells: NDArray[np.int64]
    keys: NDArray[np.int64]
    counts: NDArray[np.float64]
    seconds: NDArray[np.float64]


class Parts(NamedTuple):
    """Parts of spans: their keys, begins and ends, and how many each counts for."""

    keys: NDArray[np.int64]
    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    counts: NDArray[np.float64]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Parts":
        """Return the parts of spans."""
        found = list[tuple[int, float, float, int]]()
        for each in spans:
            key = each.lane * STRIDE
            found += [(key + state, a, b, 1) for state, a, b in each.parts]
            found += [(RETRIEVAL * STRIDE + state, a, b, 1) for state, a, b in each.searches]
            found += [(on * STRIDE + state, a, b, n) for on, state, a, b, n in each.levels]
        return cls.unpacked(np.array(found, np.float64))

    @classmethod
    def unpacked(cls, numbers: NDArray[np.float64]) -> "Parts":
        """Return the parts of which these are the rows."""
        table = numbers.reshape(-1, 4)
        return cls(table[:, 0].astype(np.int64), table[:, 1], table[:, 2], table[:, 3])


def changes(parts: Parts, origin: float, width: float) -> Changes:
    """Return the changes that parts make, in cells of a width from an origin on."""
    times = np.concatenate([parts.begins, parts.ends]) - origin
    signs = np.concatenate([parts.counts, -parts.counts])
    cells = np.floor(times / width)
    return Changes(
        cells.astype(np.int64),
        np.tile(parts.keys, 2),
        signs,
        signs * ((cells + 1) * width - times),
    )


def summed(found: Changes) -> Changes:
    """Return the changes of each cell and key as one."""
    order = np.lexsort((found.keys, found.cells))
    cells, keys = found.cells[order], found.keys[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (np.diff(cells) != 0) | (np.diff(keys) != 0)
    starts = np.flatnonzero(first)
    sums = [np.add.reduceat(each[order], starts) if len(starts) else each for each in found[2:]]
    return Changes(cells[starts], keys[starts], sums[0], sums[1])


def coarser(found: Changes, first: int, times: int, width: float) -> Changes:
    """Return changes in cells `times` as long, from cell `first` on."""
    cells, within = np.divmod(found.cells - first, times)
    left = (times - 1 - within) * width
    return Changes(cells, found.keys, found.counts, found.seconds + found.counts * left)


def together(*found: Changes) -> Changes:
    """Return all these changes."""
    return Changes(
        np.concatenate([each.cells for each in found]),
        np.concatenate([each.keys for each in found]),
        np.concatenate([each.counts for each in found]),
        np.concatenate([each.seconds for each in found]),
    )


def averages(found: Changes, keys: int, bins: int, width: float) -> NDArray[np.float64]:
    """Return the level's average by key and bin; what changes before the first bin is counted, what
    has another key is not.
    """
    known = found.keys < keys
    before = known & (found.cells < 0)
    start = np.bincount(found.keys[before], found.counts[before], keys)
    inside = known & (found.cells >= 0) & (found.cells < bins)
    places = found.keys[inside] * bins + found.cells[inside]
    counts, seconds = (
        np.bincount(places, each[inside], keys * bins).reshape(keys, bins)
        for each in (found.counts, found.seconds)
    )
    levels = start[:, None] + np.cumsum(counts, axis=1) - counts
    return np.maximum(levels + seconds / width, 0.0)
