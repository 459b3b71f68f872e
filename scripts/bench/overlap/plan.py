"""The cells of `forage bench overlap`, in the order in which they are measured.

First every loop and latency at each number of rollouts in flight, to find its own best; then those
bests again, several times. Each cell stands between two windows of the reference: a machine that is
slower for a while is so for both.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from scripts.bench.harness import Report
from scripts.bench.overlap.loops import Loop
from scripts.bench.overlap.run import Bench, Cell, Timing
from scripts.bench.overlap.server import Latency

ZERO, TAIL = Latency(0.0, 0.0), Latency(0.2, 2.0)
NO_LATENCY = "no_latency"
COMPARED: dict[str, tuple[Loop, Latency]] = {
    NO_LATENCY: ("continuous", ZERO),
    "overlap_50ms": ("continuous", Latency(0.05, 0.05)),
    "overlap_200ms": ("continuous", Latency(0.2, 0.2)),
    "overlap_1s": ("continuous", Latency(1.0, 1.0)),
    "overlap_tail": ("continuous", TAIL),
    "sync_overlapped_tail": ("sync", TAIL),
    "lockstep_tail": ("lockstep", TAIL),
    "sync_overlapped_no_latency": ("sync", ZERO),
    "lockstep_no_latency": ("lockstep", ZERO),
}
SEARCH_REFERENCE = 2  # rollouts in flight a seat: enough to fill the seats when nothing waits
REPEAT_LEASES = 1_000_000  # a repeat's leases are numbered from a multiple of this


class Plan(msgspec.Struct, frozen=True):
    """The plan of a run; runs of equal plans may be put together. `multiples`: rollouts in flight,
    of `seats` (the engine's max_num_seqs); `unwaited`: those where nothing is waited for;
    `batches`: those of the loops that work in batches. `code`: a digest of what is measured.
    """

    names: tuple[str, ...]
    seats: int
    layers: int
    multiples: tuple[int, ...]
    unwaited: tuple[int, ...]
    batches: tuple[int, ...]
    cell: Timing
    reference: Timing
    repeats: int
    code: str = ""

    def cells(self, name: str) -> list[Cell]:
        """The cells among which this name's best is looked for."""
        loop, latency = COMPARED[name]
        multiples = self.multiples if latency != ZERO else self.unwaited
        if loop != "continuous":
            multiples = self.batches
        return [Cell(loop, latency, multiple * self.seats) for multiple in multiples]

    def searches(self) -> list[tuple[str, Cell]]:
        """The cells of the search, one multiple after the other; none where there is no choice."""
        rows = [[(name, cell) for cell in self.cells(name)] for name in self.names]
        columns = itertools.zip_longest(*(row for row in rows if len(row) > 1))
        return [each for column in columns for each in column if each is not None]


class Unit(msgspec.Struct, frozen=True):
    """A cell's figures, and the reference's tokens/s before and after; `repeat` 0: the search."""

    name: str
    cell: Cell
    repeat: int
    figures: dict[str, Any]
    reference: Cell
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Tokens per second over the reference's."""
        return float(self.figures["tokens_per_s"]) / statistics.mean((self.before, self.after))


class Kept(msgspec.Struct, frozen=True):
    """The part of a file of figures that a run goes on with."""

    plan: Plan
    units: list[Unit]


class Units:
    """The units of a plan; those that are there already are not measured again."""

    def __init__(
        self,
        plan: Plan,
        kept: Sequence[Unit],
        save: Callable[[Sequence[Unit]], None],
        report: Report,
    ) -> None:
        self.all = list(kept)
        self._plan, self._save, self._report = plan, save, report
        self._last: tuple[Cell, float] | None = None  # the reference, and its latest window

    async def measure(self, bench: Bench) -> None:
        """Measure what is missing. Raises CellFailed."""
        plan = self._plan
        reference = Cell("continuous", ZERO, SEARCH_REFERENCE * plan.seats)
        for name, cell in plan.searches():
            await self._compare(bench, name, cell, reference, 0)
        reference = self.best(NO_LATENCY)
        names = [name for name in plan.names if name != NO_LATENCY]
        for repeat in range(1, plan.repeats + 1):
            for name in names if repeat % 2 else reversed(names):
                await self._compare(bench, name, self.best(name), reference, repeat)

    @property
    def complete(self) -> bool:
        """True when nothing is missing."""
        repeated = self._plan.repeats * (len(self._plan.names) - 1)
        return len(self.all) == len(self._plan.searches()) + repeated

    def best(self, name: str) -> Cell:
        """The cell of the search that had most tokens per second, going by its own reference."""
        only, *others = self._plan.cells(name)
        if not others:
            return only
        return max(self.of(name, search=True), key=lambda unit: unit.ratio).cell

    def of(self, name: str, search: bool = False) -> list[Unit]:
        """This name's units, of the search or of the repeats."""
        return [unit for unit in self.all if unit.name == name and (unit.repeat == 0) == search]

    async def _compare(
        self, bench: Bench, name: str, cell: Cell, reference: Cell, repeat: int
    ) -> None:
        if any((u.name, u.cell, u.repeat) == (name, cell, repeat) for u in self.all):
            return
        plan, first = self._plan, repeat * REPEAT_LEASES
        if self._last is None or self._last[0] != reference:
            found = await bench.measure(reference, plan.reference, first)
            self._last = reference, found["tokens_per_s"]
        before = self._last[1]
        figures = await bench.measure(cell, plan.cell, first)
        found = await bench.measure(reference, plan.reference, first)
        self._last = reference, found["tokens_per_s"]
        unit = Unit(name, cell, repeat, figures, reference, before, self._last[1])
        self.all.append(unit)
        self._save(self.all)
        what = f"repeat {repeat}" if repeat else "search"
        self._report(f"{what}: {name}, {cell.rollouts} in flight: {unit.ratio:.3f}")
