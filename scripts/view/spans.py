"""The spans of lanes in the index: each with its parts, and all in cells of several lengths. A time
of any length is answered from a bounded number of rows.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from scripts.view.bins import FACTOR, WIDTHS, Parts, changes, coarser, summed
from scripts.view.lanes import Span

TABLES = """
CREATE TABLE spans (run INTEGER, begun REAL, ended REAL, parts BLOB);
CREATE INDEX by_end ON spans (run, ended, begun);
CREATE TABLE cells (run INTEGER, level INTEGER, cell INTEGER, key INTEGER, count INTEGER,
    seconds REAL, PRIMARY KEY (run, level, cell, key)) WITHOUT ROWID;
CREATE TABLE steps (run INTEGER, number INTEGER, at REAL, step INTEGER, published INTEGER);
CREATE INDEX by_moment ON steps (run, at);
"""


def keep(base: sqlite3.Connection, run: int, spans: Sequence[Span]) -> None:
    """Write spans that have ended."""
    if not spans:
        return
    parts = Parts.of(spans)
    packed = np.column_stack(parts).tobytes()
    counts = (len(each.parts) + len(each.searches) + len(each.levels) for each in spans)
    ends = [32 * n for n in accumulate(counts, initial=0)]
    base.executemany(
        "INSERT INTO spans VALUES (?, ?, ?, ?)",
        [
            (run, each.begun, each.ended, packed[first:last])
            for each, (first, last) in zip(spans, pairwise(ends), strict=True)
        ],
    )
    found = summed(changes(parts, 0.0, WIDTHS[0]))
    for level, width in enumerate(WIDTHS):
        if level:
            found = summed(coarser(found, 0, FACTOR, width / FACTOR))
        rows = zip(*(each.tolist() for each in found), strict=True)
        base.executemany(
            "INSERT INTO cells VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "count = count + excluded.count, seconds = seconds + excluded.seconds",
            [(run, level, cell, key, count, seconds) for cell, key, count, seconds in rows],
        )


def unpacked(rows: Iterable[tuple[bytes]]) -> Parts:
    """Return the parts of rows of the table `spans`."""
    return Parts.unpacked(np.frombuffer(b"".join(parts for (parts,) in rows)))
