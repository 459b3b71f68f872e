"""What the algorithms come to on the demo task: exact match of whole runs, by seed.

Each trains on trajectories two updates old, as the demo does at most, for as many steps as the demo
takes, in one process, as the runs of `forage bench staleness` do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from scripts.bench.staleness.report import Record, reaches
from scripts.bench.staleness.run import Job
from scripts.bench.staleness.slices import Slice
from scripts.bench.staleness.task import world_of

AGE, STEPS, EVAL_EVERY, SEEDS, EM_GOAL = 2, 80, 10, (0, 1, 2), 0.9
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),  # configs/demo.yaml as it stands
    "ppo": (
        "learner.baseline=critic",
        "learner.advantage_std=whiten",
        "learner.critic.lr=1e-3",
        "learner.critic.updates=2",
    ),
}
Key = tuple[str, int]  # algorithm, seed


def plan(seeds: Sequence[int]) -> dict[Key, Job]:
    """Every run; makes their worlds."""
    jobs: dict[Key, Job] = {}
    for seed in seeds:
        files = world_of(seed)
        for name, changes in ALGORITHMS.items():
            overrides = (*files, f"learner.total_steps={STEPS}", *changes)
            jobs[name, seed] = Job(overrides, AGE, seed, EVAL_EVERY)
    return jobs


def label(key: Key) -> str:
    """What a line calls a run."""
    return "{}, seed {}".format(*key)


def summary(jobs: Mapping[Key, Job], finished: Slice) -> dict[str, Any]:
    """`NAME_em`, the greedy exact match at the end of the worst seed, None before any is there; and
    a row a run.
    """
    rows = [
        _row(*key, record)
        for key, job in jobs.items()
        if (record := finished.record(job)) is not None
    ]
    worst = {
        f"{name}_em": min((row["em"] for row in rows if row["algorithm"] == name), default=None)
        for name in ALGORITHMS
    }
    return {**worst, "learning": rows}


def _row(name: str, seed: int, record: Record) -> dict[str, Any]:
    evaluations = record["evaluations"]
    steps = [int(each["update"]) for each in evaluations]
    greedy = [float(each["greedy"]) for each in evaluations]
    return {
        "algorithm": name,
        "seed": seed,
        "em": greedy[-1],
        "sampled_em": float(evaluations[-1]["sampled"]),
        "em_goal_step": reaches(steps, greedy, EM_GOAL),
        "seconds": record["seconds"],
    }


def make_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A line a run."""
    table = Table(title=f"The demo task, {STEPS} steps on rollouts {AGE} updates old")
    for name in ("algorithm", "seed", "EM", "sampled", f"steps to {EM_GOAL}", "seconds"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in rows:
        goal = row["em_goal_step"]
        table.add_row(
            row["algorithm"],
            str(row["seed"]),
            f"{row['em']:.3f}",
            f"{row['sampled_em']:.3f}",
            "–" if goal is None else f"{goal:.0f}",
            f"{row['seconds']:.0f}",
        )
    return table
