"""The staleness benchmark on a tiny random model: exact ages, runs kept whole, what it reports."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import cli
from scripts.bench.harness import sources
from scripts.bench.staleness import bench
from scripts.bench.staleness.bench import BenchStalenessOptions
from scripts.bench.staleness.report import make_row, reaches, summarise
from scripts.bench.staleness.run import USED, Job, StaleRun, work

TEXT = "what is the mayor of bore ?"
QUESTIONS = [{"question": TEXT, "answers": ["kelu"], "hops": hops} for hops in (1, 2)]
PASSAGE = {"id": "1", "contents": "the mayor of bore is kelu ."}


@pytest.fixture
def make_job(tiny_model_path: Path, tmp_path: Path) -> Callable[[int], Job]:
    """Jobs of four updates whose weights change although no answer is ever right."""
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "corpus.jsonl").write_text(json.dumps(PASSAGE) + "\n")
    overrides = (
        f"model.path={tiny_model_path}",
        f"questions.train={tmp_path}/questions.jsonl",
        f"questions.eval={tmp_path}/questions.jsonl",
        f"retrieval.corpus={tmp_path}/corpus.jsonl",
        "replay.groups_per_step=2",
        "replay.group_size=2",
        "replay.drop_no_signal=false",
        "actors.max_action_tokens=8",
        "actors.max_turns=1",
        "learner.weight_decay=0.1",
        "learner.lr=1e-2",
        "learner.total_steps=4",
    )
    return lambda staleness: Job(overrides, staleness, seed=0, eval_every=2)


def copied(parameters: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in parameters]


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_update_learns_from_weights_exactly_so_old(
    make_job: Callable[[int], Job], staleness: int
) -> None:
    run = StaleRun(make_job(staleness))
    made = [copied(run.trainer.engine.trainable().values())]
    for update in range(1, 5):
        run.step()
        made.append(copied(run.trainer.engine.trainable().values()))
        version = max(0, update - 1 - staleness)
        used = copied(run.rollouts.policy.model.parameters())
        assert run.updates[-1]["version"] == run.rollouts.policy.version == version
        assert all(torch.equal(a, b) for a, b in zip(used, made[version], strict=True))
        assert not torch.equal(made[-1][0], made[-2][0])
    run.close()


@pytest.mark.slow
def test_a_run_is_kept_when_whole_and_the_report_is_made_of_kept_runs(
    make_job: Callable[[int], Job], tmp_path: Path
) -> None:
    folder, job = tmp_path / "runs", make_job(1)
    folder.mkdir()
    assert work(job, "late", time.time() - 1.0, str(folder)) == ""
    assert not list(folder.iterdir())
    assert "4 updates" in work(job, "default k=1", time.time() + 100.0, str(folder))
    record = json.loads((folder / f"{job.name}.json").read_text())
    assert [scores["update"] for scores in record["evaluations"]] == [0, 2, 4]
    options = BenchStalenessOptions(out=folder, json=folder / "out.json")
    bench.report({("default", 1, 0): job, ("clip", 1, 0): make_job(2)}, options)
    (row,) = json.loads((folder / "out.json").read_text())["rows"]
    assert (row["variant"], row["staleness"], row["seeds"]) == ("default", 1, [0])
    assert (folder / "staleness.png").is_file()


def test_equal_settings_share_a_run_and_others_do_not(make_job: Callable[[int], Job]) -> None:
    job = make_job(1)
    same = Job((*job.overrides, "learner.proximal=ema"), 1, 0, job.eval_every)
    other = Job((*job.overrides, "learner.proximal=behaviour"), 1, 0, job.eval_every)
    assert job.name == same.name
    coarse = Job((*job.overrides, "model.dtype=bfloat16"), 1, 0, job.eval_every)
    assert len({job.name, other.name, coarse.name, make_job(2).name}) == 4


def record(seed: int, curve: list[float], collapsed: bool = False) -> dict[str, Any]:
    names = ("sampled", "sampled_1", "sampled_2", "greedy", "greedy_1", "greedy_2")
    evaluations = [{"update": 10 * n} | dict.fromkeys(names, em) for n, em in enumerate(curve)]
    updates = [{"update": 1, "ess": 0.5, "largest_ratio": 3.0, "clipped": 0.1}]
    known = {"seed": seed, "evaluations": evaluations, "updates": updates, "seconds": 1.0}
    return known | {"collapsed": collapsed}


def test_the_updates_to_reach_a_level_lie_between_evaluations() -> None:
    assert reaches([0, 10, 20], [0.0, 0.5, 0.7], 0.6) == pytest.approx(15.0)
    assert reaches([0, 10], [0.0, 0.5], 0.6) is None
    assert reaches([0, 10], [0.8, 0.9], 0.6) == 0.0


def test_a_collapsed_run_counts_with_its_last_value_to_the_end() -> None:
    runs = [record(0, [0.1, 0.8, 0.8, 0.8]), record(1, [0.1, 0.0], collapsed=True)]
    row = make_row("none", 4, runs, 30)
    assert row["curve"]["sampled"] == pytest.approx([0.1, 0.4, 0.4, 0.4])
    assert row["final"]["sampled"] == pytest.approx(0.4)
    assert (row["collapsed"], row["seeds"]) == (1, [0, 1])


def test_a_run_that_lost_more_than_half_of_its_best_has_collapsed() -> None:
    lost, shaken = [0.1, 0.5, 0.8, 0.3, 0.3, 0.3], [0.1, 0.5, 0.8, 0.6, 0.3, 0.5]
    assert make_row("none", 8, [record(0, lost), record(1, shaken)], 50)["collapsed"] == 1


def test_the_summary_compares_the_default_with_fresh_data_and_with_clipping() -> None:
    rows = [
        make_row("default", 0, [record(0, [0.0, 0.7, 0.9])], 20),
        make_row("default", 8, [record(0, [0.0, 0.35, 0.7])], 20),
        make_row("clip", 8, [record(0, [0.0, 0.2, 0.4])], 20),
        make_row("none", 1, [record(0, [0.1, 0.0, 0.0], collapsed=True)], 20),
    ]
    summary = summarise(rows)
    assert summary["updates_ratio_at_8"] == pytest.approx(2.0)
    assert summary["margin_over_clip"]["8"] == pytest.approx((1.05 - 0.6) / 3)
    assert summary["margin_over_clip"]["4"] is None
    assert (summary["collapsed_default"], summary["collapsed_uncorrected"]) == (0, 1)
    assert (summary["worst_final_default"], summary["dead_uncorrected"]) == (pytest.approx(0.35), 1)


def test_a_cell_whose_runs_all_stopped_is_carried_to_the_end_too() -> None:
    stopped = [record(seed, [0.4, 0.3, 0.02], collapsed=True) for seed in (0, 1)]
    row = make_row("none", 16, stopped, 60)
    assert row["curve"]["update"] == [0, 10, 20, 30, 40, 50, 60]
    assert row["final"]["sampled"] == pytest.approx(0.02) and row["dead"] == 2


def test_a_number_without_its_runs_is_none() -> None:
    empty = summarise([], ["default k=0 seed=0"])
    assert empty["collapsed_default"] is empty["collapsed_uncorrected"] is None
    assert empty["missing"] == ["default k=0 seed=0"]
    curve = [0.0, 0.7, 0.9]
    both = [make_row("default", 8, [record(0, curve), record(1, curve)], 20)]
    both.append(make_row("clip", 8, [record(0, curve)], 20))
    assert summarise(both)["margin_over_clip"]["8"] is None


def test_all_code_that_changes_a_run_is_there_to_be_compared() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in sources(*USED)}
    assert names >= {
        "environments/search_r1.py",
        "environments/base.py",
        "policies/engine.py",
        "policies/kv_cache.py",
        "policies/transformers.py",
        "actors/rollout.py",
        "algorithm/advantage.py",
        "algorithm/importance.py",
        "algorithm/kl.py",
        "algorithm/loss.py",
        "algorithm/objectives.py",
        "algorithm/schedule.py",
        "model/collectives.py",
        "model/ema.py",
        "model/engine.py",
        "model/head.py",
        "model/scorer.py",
        "model/shards.py",
        "learner/update.py",
        "index/bm25.py",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--staleness", "-1"], "--staleness -1: at least 0"),
        (["--workers", "0"], "--workers 0: at least 1"),
        (["--updates", "0"], "--updates 0: at least 1"),
        (["--variants", "clop"], "--variants 'clop': one of default, clip"),
        (["--add", "ema"], "--add 'ema': write 'NAME=a.b=c d.e=f'"),
    ],
)
def test_bad_words_are_named(words: list[str], message: str, capsys: Any) -> None:
    assert cli.main(["bench", "staleness", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_variant_is_added_in_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BenchStalenessOptions] = []
    monkeypatch.setattr(bench, "plan", lambda options: given.append(options) or {})
    words = ["--add", "ema.95=learner.proximal=ema learner.proximal_decay=0.95"]
    words += ["--add", "b=learner.lr=1", "--variants", "clip", "b", "--schedule", "linear"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["bench", "staleness", *words, "learner.weight_decay=0.1"]) == 0
    (options,) = given
    assert options.known["ema.95"] == ("learner.proximal=ema", "learner.proximal_decay=0.95")
    assert (options.known["b"], options.names) == (("learner.lr=1",), ("clip", "b"))
    assert (options.schedule, options.overrides) == ("linear", ("learner.weight_decay=0.1",))
