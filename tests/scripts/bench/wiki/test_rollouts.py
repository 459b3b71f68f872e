"""What a run's log tells: the curve, and which rollouts are shown before and after."""

from typing import Any

import msgspec
import numpy as np

from replay.log.records import EvaluationFinished, Record, Reported
from replay.protocol import EvalResult, Lease
from replay.trajectory import Question, Sampling
from scripts.bench.wiki.rollouts import before_and_after, curve, first_of_each, page
from scripts.runs.show import Shown
from tests.replay.conftest import trajectory_for

PERU = Question("q", "What is the capital of Peru?", ("Lima",))


def shown(version: int, kind: Any = "eval", temperature: float = 0.0, answer: str = "") -> Shown:
    lease = Lease(1, 0, kind, PERU, Sampling(temperature))
    found = trajectory_for(lease, version=version)
    return PERU, msgspec.structs.replace(found, answer=answer or None), None


def test_a_curve_has_the_reward_of_each_step_and_what_was_evaluated() -> None:
    def result(step: int, em: float) -> EvaluationFinished:
        return EvaluationFinished(9.0, EvalResult(step, 16, em, 0.2, {}, {}, 1.0, step, step))

    log: list[Record] = [
        result(0, 0.25),
        Reported(1.0, 1, 1, {"actor/reward": 0.1}),
        Reported(2.0, 1, 2, {"actor/reward": 0.9}),
        Reported(3.0, 1, 2, {"actor/reward": 0.3}),  # trained again
        Reported(4.0, 1, 3, {}),  # nothing had come in
        result(3, 0.5),
    ]
    found = curve(log)
    assert (found["step"], found["reward"]) == ([1, 2], [0.1, 0.3])
    assert [(each["step"], each["em"]) for each in found["evaluated"]] == [(0, 0.25), (3, 0.5)]


def test_the_first_question_of_each_of_the_first_kinds_is_shown() -> None:
    kinds = [("a", "older"), ("b", "older"), ("c", "year"), ("d", "maker"), ("e", "origin")]
    assert first_of_each(kinds) == ["a", "c", "d"]


def test_greedy_rollouts_of_the_first_and_last_version_are_told() -> None:
    def words(tokens: Any) -> str:
        return " ".join(map(str, np.asarray(tokens).tolist()))

    rolled = [
        shown(0, answer="Quito"),
        shown(0, temperature=1.0, answer="sampled"),
        shown(0, kind="train", answer="trained"),
        shown(2, answer="on the way"),
        shown(4, answer="Lima"),
    ]
    told = before_and_after(rolled, ["q", "gone"], 4, words)
    assert [(each["when"], each["answer"], each["em"]) for each in told] == [
        ("before", "Quito", 0.0),
        ("after", "Lima", 1.0),
    ]
    assert told[0]["turns"] == [{"action": "5 6 7", "observation": "8", "malformed": False}]
    text = page([(3, each) for each in told])
    assert text.count("## Seed 3, q: What is the capital of Peru?") == 1
    assert "**Before**: answered 'Quito', wrong (answered)" in text
    assert "**After**: answered 'Lima', right (answered)\n\n    5 6 7\n    > 8" in text
