"""The configurations that are run in full and planned; constants come of none of them."""

from pathlib import Path
from typing import Literal

import msgspec

from configs.load import load
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.bench.end_to_end.plan import PACE, shared
from scripts.bench.end_to_end.task import TaskFiles
from scripts.bench.overlap.server import Latency

CONFIG = REPOSITORY / "configs" / "demo.yaml"
SEED = 0
WARM_UP = 2  # steps, and max_staleness more
ROLLOUTS = 256  # in flight, of all actors together
START_S, STEP_S = 25.0, {"demo": 1.2, "deep": 3.0}  # about, on two cores
ModelName = Literal["demo", "deep"]
LAYERS: dict[ModelName, int] = {"demo": 2, "deep": 8}  # `deep`: what the demo says, at more cost


class Cell(msgspec.Struct, frozen=True):
    """One run; `steps` are counted ones, `again` its number among runs of the same."""

    model: ModelName
    actors: int
    staleness: int
    latency: Latency
    steps: int
    again: int = 0

    @property
    def name(self) -> str:
        """It in words."""
        p50_s, p99_s = self.latency.p50_s, self.latency.p99_s
        late = f"{p50_s:g} s" if p50_s == p99_s else f"{p50_s:g}-{p99_s:g} s"
        actors = f"{self.actors} actor{'s' * (self.actors > 1)}"
        return f"{self.model}, {actors}, max_staleness {self.staleness}, latency {late}"

    @property
    def uncounted(self) -> int:
        """Steps before those that count."""
        return WARM_UP + self.staleness

    @property
    def last(self) -> int:
        """The last step that counts."""
        return self.uncounted + self.steps

    @property
    def about_s(self) -> float:
        """About what it takes on two cores."""
        late_s = 2 * self.latency.p99_s if not self.staleness else self.latency.p50_s
        step_s = STEP_S[self.model] + late_s
        return START_S + 10 * self.actors + self.last * step_s

    def overrides(self, files: TaskFiles, model: Path, url: str) -> tuple[str, ...]:
        """The configuration, searching at `url`."""
        each = ROLLOUTS // self.actors
        return (
            *shared(files, model, SEED, url),
            *PACE,
            f"learner.total_steps={self.last + self.staleness + 1}",
            f"actors.count={self.actors}",
            f"actors.max_num_seqs={each}",
            f"actors.rollouts_in_flight={each}",
            f"replay.max_staleness={self.staleness}",
        )

    def config(self, files: TaskFiles, model: Path) -> Config:
        """The configuration as it is planned."""
        return load(CONFIG, self.overrides(files, model, "http://127.0.0.1:1"))


NONE, TAIL = Latency(0.0, 0.0), Latency(0.2, 2.0)


def fitted_cells(model: ModelName, steps: int, again: int = 0) -> tuple[Cell, Cell]:
    """The runs that constants are fitted to: learner and engine take turns, and work at once."""
    return Cell(model, 1, 0, NONE, steps, again), Cell(model, 1, 1, NONE, steps, again)


def late(seconds: float) -> Latency:
    """A constant one."""
    return Latency(seconds, seconds)


def quick_cells(steps: int) -> list[Cell]:
    """Those of `--quick`."""
    return [
        Cell("demo", 1, 2, TAIL, steps),
        Cell("demo", 2, 1, late(0.5), steps),
        Cell("demo", 1, 0, late(0.2), steps),
    ]


def all_cells(steps: int) -> list[Cell]:
    """All: actors, staleness, latency and model each vary."""
    return [
        Cell("demo", 1, 0, late(0.2), steps),
        Cell("demo", 1, 2, TAIL, steps),
        Cell("demo", 2, 1, late(0.5), steps),
        Cell("demo", 3, 4, late(1.0), steps),
        Cell("deep", 1, 2, NONE, steps),
        Cell("deep", 1, 4, late(1.0), steps),
        Cell("deep", 2, 2, TAIL, steps),
        Cell("deep", 3, 0, late(0.2), steps),
    ]
