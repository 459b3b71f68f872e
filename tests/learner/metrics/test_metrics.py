"""The sums of a fleet's numbers, and what is written."""

from pathlib import Path

from msgspec import structs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.load import parse
from learner.metrics.metrics import Metrics, aggregate, evaluation_gauges
from learner.metrics.settings import told_config
from replay.protocol import EvalResult, SetResult

RESULT = EvalResult(20, 300, 0.5, 0.25, {"1": 0.75, "2": 0.25}, {"1": 0.5, "2": 0.0}, 1.5, 18, 20)


def test_rates_and_counters_add_up_tails_are_the_worst_and_the_rest_is_averaged() -> None:
    fleet = {
        "actor-0": {"actor/tokens_per_s": 10.0, "retrieval/latency_p99_s": 0.5, "x/mean": 1.0,
                    "actor/token_mismatch": 1.0},
        "actor-1": {"actor/tokens_per_s": 20.0, "retrieval/latency_p99_s": 0.25, "x/mean": 2.0,
                    "retrieval/errors": 3.0, "retrieval/latency_p50_s": 0.125,
                    "actor/token_mismatch": 1.0},
    }  # fmt: skip
    assert aggregate(fleet) == {
        "actor/tokens_per_s": 30.0,
        "retrieval/latency_p99_s": 0.5,
        "x/mean": 1.5,
        "actor/token_mismatch": 2.0,
        "retrieval/errors": 3.0,
        "retrieval/latency_p50_s": 0.125,
    }
    assert aggregate({}) == {}


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"learner/loss": 0.5})
        metrics.evaluation(RESULT)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("learner/loss")] == [(1, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/em")] == [(20, 0.5)]
    expected = {"eval/sampled_em": 0.25, "eval/em_hops_2": 0.25, "eval/sampled_em_hops_1": 0.5}
    assert {name: events.Scalars(name)[0].value for name in expected} == expected


def test_a_later_process_hides_what_it_writes_again(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"learner/loss": float(step)})
    with Metrics(tmp_path, purge_step=3) as metrics:
        metrics.write(3, {"learner/loss": 7.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = [(e.step, e.value) for e in events.Scalars("learner/loss")]
    assert written == [(1, 1.0), (2, 2.0), (3, 7.0)]


def test_each_data_set_has_gauges_of_its_own() -> None:
    of_set = SetResult(3, 0.25, None, 1.0, {"judge": 0.5})
    changed = {"parts": {"f1": 0.75}, "sampled_parts": {"f1": 0.5}, "sets": {"nq": of_set}}
    gauges = evaluation_gauges(structs.replace(RESULT, **changed))
    told = {name: value for name, value in gauges.items() if "nq/" in name or "f1" in name}
    assert told == {
        "eval/f1": 0.75,
        "eval/sampled_f1": 0.5,
        "eval/nq/em": 0.25,
        "eval/nq/judge": 0.5,
        "eval/nq/questions": 3.0,
        "eval/nq/searches_per_rollout": 1.0,
    }


def test_without_tensorboard_there_are_no_event_files(tmp_path: Path) -> None:
    with Metrics(tmp_path, config=parse("", ["learner.trackers=[]"], "")) as metrics:
        metrics.write(1, {"learner/loss": 0.5})
    assert list(tmp_path.iterdir()) == [] and metrics.gauges() == {}


def test_no_tracker_is_told_what_may_be_a_secret() -> None:
    overrides = (
        "retrieval.url=http://me:hunter2@host",
        "retrieval.token_file=/keys/token",
        "seed=7",
    )
    told = told_config(parse("", overrides, ""))
    assert told["seed"] == 7 and told["learner.lr"] == 1e-6
    assert "hunter2" not in str(told) and "/keys" not in str(told)
