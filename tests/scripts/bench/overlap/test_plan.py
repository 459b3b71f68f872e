"""The overlap's benchmark: its choice, its figures, the file it goes on with and refuses."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from scripts import cli
from scripts.bench.overlap import bench as bench_overlap
from scripts.bench.overlap.bench import summary
from scripts.bench.overlap.plan import NO_LATENCY, Plan, Units
from scripts.bench.overlap.run import Cell, Timing


class Known:
    """A bench whose rates are known, on a machine that gets slower and slower."""

    def __init__(self, slowdown: float = 0.0) -> None:
        self.measured = list[Cell]()
        self._slowdown = slowdown

    async def measure(self, cell: Cell, timing: Timing, first: int) -> dict[str, Any]:
        speed = 1 - self._slowdown * len(self.measured)
        self.measured.append(cell)
        share = {"continuous": 1.0, "sync": 0.5, "lockstep": 0.25}[cell.loop]
        rate = share * min(100.0, 50 * cell.rollouts / (1 + 2 * cell.latency.p50_s))
        zeros = dict.fromkeys(("waited_p50_s", "waited_p99_s", "shared", "seats_filled"), 0.0)
        counts = {"rollouts": 2, "searches": 3, "cpu": {"engine": 1.0, "actor": 0.2, "server": 0.1}}
        return {"tokens_per_s": speed * rate, **zeros, **counts}


def plan_of(*names: str, repeats: int = 3, seats: int = 1) -> Plan:
    timing = Timing(0.1, 0.3)
    return Plan((NO_LATENCY, *names), seats, 2, (1, 2, 4), (1, 2), (2,), timing, timing, repeats)


def units_of(plan: Plan, *kept: Any) -> Units:
    return Units(plan, kept, lambda _: None, lambda _: None)


async def test_each_latency_has_its_own_best() -> None:
    plan = plan_of("overlap_1s", "overlap_tail", "lockstep_tail")
    units = units_of(plan)
    await units.measure(Known())
    found = summary(units, plan)
    best = {NO_LATENCY: 2, "overlap_1s": 4, "overlap_tail": 4, "lockstep_tail": 2}
    assert found["rollouts_in_flight"] == best and units.complete
    assert found["overlap_1s"] == pytest.approx(200 / 3 / 100)
    assert found["overlap_tail"] == 1.0 and found["overlap_50ms"] is None
    assert found["lockstep_tail"] == pytest.approx(0.25 * 100 / 1.4 / 100)
    assert found["tokens_per_s_no_latency"] == 100.0
    assert found["rows"][0]["searches_per_rollout"] == 1.5


async def test_a_machine_that_slows_down_does_so_for_both() -> None:
    units = units_of(plan_of("overlap_1s"))
    await units.measure(Known(slowdown=0.01))
    for unit in units.of("overlap_1s"):
        assert unit.before > unit.after and unit.ratio == pytest.approx(2 / 3)


async def test_what_is_measured_is_kept(tmp_path: Path) -> None:
    plan, path, bench = plan_of("overlap_1s"), tmp_path / "found.json", Known()

    def save(units: Any) -> None:
        bench_overlap.write(path, plan, units, {})
        if len(units) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await Units(plan, [], save, lambda _: None).measure(bench)
    kept = bench_overlap.held(path, plan)
    assert len(kept) == 6
    bench.measured.clear()
    resumed = units_of(plan, *kept)
    await resumed.measure(bench)
    assert resumed.complete and len(resumed.all) == 8
    assert [cell.latency.p50_s for cell in bench.measured] == [0, 1, 0, 1, 0]


def test_another_plan_s_file_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "found.json"
    bench_overlap.write(path, plan_of("overlap_1s", seats=3), [], {})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="measured with seats = 3, not 1: remove it"):
        bench_overlap.held(path, plan_of("overlap_1s"))
    assert cli.main(["bench", "overlap", "--quick", "--json", str(path)]) == 2
    assert "remove it, or name another file" in capsys.readouterr().err
    assert path.read_bytes() == before
