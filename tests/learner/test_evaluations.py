"""The learner's record of evaluations, also after it was killed."""

from pathlib import Path

import msgspec
import pytest

from learner.errors import BadCheckpoint
from learner.evaluations import Evaluations
from replay.protocol import EvalResult, SetResult


def result(step: int, em: float, sampled_em: float = 0.0) -> EvalResult:
    return EvalResult(step, 1, em, sampled_em, {}, {}, 1.0, step, step)


def test_the_best_is_by_greedy_then_sampled_exact_match(tmp_path: Path) -> None:
    known = Evaluations(tmp_path)
    for step, em, sampled_em in ((0, 0.9, 0.9), (5, 0.5, 0.4), (10, 0.5, 0.6), (15, 0.5, 0.6)):
        assert known.record(result(step, em, sampled_em))
    known.ask(20)
    assert known.best([5, 10, 15, 20]) == 10, "the earliest of equals"
    assert known.best([5, 20]) == 5
    assert known.best([20, 25]) is None


def test_a_result_counts_once(tmp_path: Path) -> None:
    known = Evaluations(tmp_path)
    known.ask(5)
    assert known.unfinished == [5] and known.record(result(5, 0.5))
    assert not known.record(result(5, 0.9))
    assert known.unfinished == [] and known.finished(5)


def test_what_lies_after_the_resumed_step_is_forgotten(tmp_path: Path) -> None:
    before = Evaluations(tmp_path)
    for step in (0, 5, 10):
        before.record(result(step, 0.5))
    before.ask(15)
    assert Evaluations(tmp_path, resumed_after=5).scores.keys() == {0, 5}
    assert Evaluations(tmp_path, resumed_after=20).unfinished == [15]
    assert Evaluations(tmp_path).scores == {}


def test_a_spoilt_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "evaluations.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"evaluations\.json: cannot be read"):
        Evaluations(tmp_path, resumed_after=0)


def test_what_later_weights_answered_does_not_make_a_checkpoint_the_best(tmp_path: Path) -> None:
    known = Evaluations(tmp_path)
    known.record(result(5, 0.5))
    known.record(msgspec.structs.replace(result(10, 0.9), oldest_version=14, newest_version=15))
    assert known.finished(10) and known.best([5, 10]) == 5
    assert Evaluations(tmp_path, resumed_after=10).best([5, 10]) == 5


def test_the_best_is_by_the_score_that_is_named(tmp_path: Path) -> None:
    known = Evaluations(tmp_path)
    for step, judge, nq in ((5, 0.9, 0.1), (10, 0.2, 0.6), (15, 0.3, 0.6)):
        of_set = SetResult(1, nq, 0.5 if step == 10 else 0.7, 1.0, {"judge": 1.0 - judge})
        scored = {"parts": {"judge": judge}, "sets": {"nq": of_set}}
        known.record(msgspec.structs.replace(result(step, 0.5), **scored))
    known.record(result(20, 1.0))  # it told neither
    steps = [5, 10, 15, 20]
    for named, best in (("judge", 5), ("nq/em", 15), ("nq/judge", 10), ("em", 20), ("f1", None)):
        again = Evaluations(tmp_path, resumed_after=20, best=named)
        assert again.best(steps) == best, named
