"""Exact match by algorithm: every configuration is one, and the worst seed counts."""

import json
from pathlib import Path

import pytest

from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts.bench.algorithms import learning
from scripts.bench.staleness.run import Job
from scripts.bench.staleness.slices import Slice

DEMO = REPOSITORY / "configs" / "demo.yaml"


def test_the_demo_takes_as_many_steps() -> None:
    assert load(DEMO).learner.total_steps == learning.STEPS


def test_the_worst_seed_counts_and_none_where_no_run_is_there(tmp_path: Path) -> None:
    finished, jobs = Slice(tmp_path, workers=1, minutes=0.0), {}
    for seed, greedy in enumerate(([0.0, 0.8, 1.0], [0.0, 0.4, 0.96])):
        job = Job((), learning.AGE, seed, 10)
        jobs["grpo", seed] = job
        told = [{"update": 10 * n, "greedy": em, "sampled": em} for n, em in enumerate(greedy)]
        (tmp_path / f"{job.name}.json").write_text(json.dumps({"evaluations": told, "seconds": 2}))
    jobs["ppo", 0] = Job(learning.ALGORITHMS["ppo"], learning.AGE, 0, 10)
    found = learning.summary(jobs, finished)
    assert (found["grpo_em"], found["ppo_em"]) == (0.96, None)
    assert [row["em_goal_step"] for row in found["learning"]] == [
        pytest.approx(15.0),
        pytest.approx(10 + 10 * 0.5 / 0.56),
    ]
    assert learning.make_table(found["learning"]).row_count == 2
