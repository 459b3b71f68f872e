"""Rollbacks: where a sentinel goes back to, what is kept for it, and when it stops instead."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, LearnerConfig, ReplayConfig
from configs.sentinels import SentinelsConfig
from learner.health.rollback import Rollback, good, good_before, needed
from learner.health.rules import RULES, Announcer
from learner.health.sentinels import Sentinels, Verdict, bounds, read_notes

WINDOW = RULES["ess"].window
LOW, FINE = {"learner/current_ess": 0.1}, {"learner/current_ess": 0.9}
STEPS = 100  # of the run
ONE = (Rollback(step=14, since=5, to=4, rule="ess", scale=0.5),)


def test_what_was_saved_before_a_rollback_and_after_its_checkpoint_is_not_good() -> None:
    assert good([0, 4, 8, 12, 14, 16], ONE) == [0, 4, 14, 16]
    again = (*ONE, Rollback(step=26, since=3, to=0, rule="ess", scale=0.25))
    assert good([0, 4, 8, 12, 14, 16, 26], again) == [0, 26]
    assert good_before(13, [0, 4, 8, 12, 14], ONE) == [4, 0]
    assert good_before(4, [4, 8], ONE) == []


def test_what_a_rollback_would_take_and_what_it_will_are_kept() -> None:
    assert needed(9, [0, 4, 8, 12, 16], ()) == [8, 12]
    assert needed(99, [0, 4, 8], ()) == [8]
    assert needed(1, [4, 8], ()) == [4]
    assert needed(13, [0, 4, 8, 12, 14, 16], ONE) == [4, 14]


def going_back(
    run_dir: Path, resumed_after: int = 0, made: tuple[Rollback, ...] = (), **fields: Any
) -> Sentinels:
    sentinels = SentinelsConfig(**({"ess": "rollback"} | fields))
    replay, learner = ReplayConfig(max_staleness=2), LearnerConfig(total_steps=STEPS)
    config = Config(run_dir=str(run_dir), sentinels=sentinels, replay=replay, learner=learner)
    return Sentinels(config, resumed_after, made)


def played(
    sentinels: Sentinels,
    first: int,
    last: int,
    gauges: dict[str, float] = LOW,
    saved: tuple[int, ...] = (0,),
) -> list[Verdict]:
    return [sentinels.judge(step, gauges, saved) for step in range(first, last + 1)]


def test_it_goes_back_behind_the_whole_window(tmp_path: Path) -> None:
    sentinels = going_back(tmp_path)
    *before, last = played(sentinels, 1, 4, FINE) + played(sentinels, 5, 10, LOW, (0, 4, 8))
    # Six low values of ten make the median low; the window begins at step 1.
    assert all(each.rollback is None for each in before)
    assert (
        last.rollback == Rollback(step=10, since=1, to=0, rule="ess", scale=0.5) and last.stop == ""
    )
    told = last.told
    assert (told["learner/rollbacks"], told["learner/rolled_back_to"]) == (1.0, 0.0)
    assert told["learner/rate_scale"] == 0.5 and told["learner/sentinel_ess"] == 1.0
    assert before[-1].told["learner/rollbacks"] == 0.0 and len(Announcer().lines(10, told)) == 2
    *_, noted = read_notes(tmp_path)
    assert noted.rollback == last.rollback and noted.fired == ("ess",)


def test_what_has_fired_for_long_goes_back_to_before_it_began(tmp_path: Path) -> None:
    played(going_back(tmp_path, ess="warn"), 1, 30, FINE)
    played(going_back(tmp_path, 30, ess="warn"), 31, 60)
    verdict = going_back(tmp_path, 60).judge(61, LOW, (20, 30, 40, 50))
    assert verdict.rollback is not None and verdict.rollback.to == 20  # fires from step 36 on


def test_after_it_all_rules_begin_anew_once_nothing_is_left_of_those_weights(
    tmp_path: Path,
) -> None:
    sentinels = going_back(tmp_path, likelihood="warn")
    falls = {"learner/likelihood_change_positive": -1.0}
    played(sentinels, 1, 9)
    assert sentinels.judge(10, LOW | falls, (0,)).rollback
    verdicts = played(sentinels, 11, 30, falls)
    fired = [step for step, each in enumerate(verdicts, 11) if each.told["learner/sentinels_fired"]]
    assert fired[0] == 10 + 2 + WINDOW  # max_staleness, and a window


def test_what_was_usual_before_it_is_so_after_it(tmp_path: Path) -> None:
    sentinels = going_back(tmp_path, grad_norm="rollback")
    played(sentinels, 1, 12, {"learner/grad_norm": 0.5})
    verdicts = played(sentinels, 13, 30, {"learner/grad_norm": 50.0})
    made = [each.rollback for each in verdicts if each.rollback]
    # A window of five, three of it high; later two steps are passed over and five are high: the
    # first window is of all steps since the rollback.
    assert [(each.step, each.since, each.to) for each in made] == [
        (15, 11, 0),
        (22, 16, 0),
        (29, 23, 0),
    ]


def test_the_bounds_that_are_told_are_those_that_are_judged_by(tmp_path: Path) -> None:
    """After a rollback the warm-up takes up what comes once the rules judge again."""
    sentinels = going_back(tmp_path)
    played(sentinels, 1, 9, LOW | {"learner/grad_norm": 20.0})
    assert sentinels.judge(10, LOW | {"learner/grad_norm": 20.0}, (0,)).rollback
    assert bounds(read_notes(tmp_path), 2)["grad_norm"] is None
    played(sentinels, 11, 12, {"learner/grad_norm": 20.0})  # of weights that are gone
    played(sentinels, 13, 40, {"learner/grad_norm": 0.5})
    told = bounds(read_notes(tmp_path), 2)
    assert told == {name: each.bound for name, each in sentinels._series.items()}
    assert (told["grad_norm"], told["ess"], told["entropy"]) == (5.0, 0.8, None)


def test_a_second_rollback_takes_no_weights_that_no_rule_has_judged(tmp_path: Path) -> None:
    sentinels, saved, made = going_back(tmp_path), [0], list[Rollback]()
    for step in range(1, 50):
        good = step <= (made[-1].step + 1 if made else 20)
        verdict = sentinels.judge(step, FINE if good else LOW, saved)
        made += [verdict.rollback] if verdict.rollback else []
        saved += [step] if verdict.rollback or step % 3 == 0 else []
        needed = sentinels.needed(step, saved)
        saved = [each for each in saved if each in (*needed, saved[-1])]
    # Of the window's ten steps five are low; then all of the first window that is judged.
    assert [(each.step, each.since, each.to) for each in made] == [
        (25, 16, 12),
        (37, 26, 25),
        (49, 38, 37),
    ]


def test_once_the_first_window_has_moved_on_it_counts_as_any_other(tmp_path: Path) -> None:
    sentinels = going_back(tmp_path)
    played(sentinels, 1, 10)
    played(sentinels, 11, 22, FINE)  # judged from 13 on
    assert sentinels.needed(22, (0, 10, 12, 14, 16)) == [10, 12]
    played(sentinels, 23, 23, FINE)
    assert sentinels.needed(23, (0, 10, 12, 14, 16)) == [12, 14]


def test_a_rule_keeps_its_checkpoint_whatever_another_one_s_window_is(tmp_path: Path) -> None:
    rules = dict.fromkeys(("ess", "grad_norm", "repeated_queries"), "rollback")
    sentinels = going_back(tmp_path, **rules)
    searched = FINE | {"learner/grad_norm": 0.5, "learner/repeated_queries": 0.0}
    played(sentinels, 1, 6, searched)
    played(sentinels, 7, 40, FINE | {"learner/grad_norm": 0.5})  # it searches no more
    saved = (0, 4, 24, 28, 32, 36, 40)
    # Windows begin at 1, at 31 and at 36.
    assert sentinels.needed(40, saved) == [0, 4, 28, 32, 36]
    high = FINE | {"learner/grad_norm": 50.0}
    *_, last = played(sentinels, 41, 43, high, saved)
    assert last.rollback and (last.rollback.since, last.rollback.to) == (39, 36)


@pytest.mark.parametrize(
    ("lost", "judged_from"), [({10}, 13), ({10, 11, 12}, 13), (range(10, 15), 15), (None, 15)]
)
def test_a_rollback_counts_that_is_not_noted(
    tmp_path: Path, lost: Collection[int] | None, judged_from: int
) -> None:
    first, path = going_back(tmp_path), tmp_path / "sentinels.jsonl"
    made = played(first, 1, 10)[-1].rollback
    assert made
    played(first, 11, 14)
    lines = enumerate(path.read_bytes().splitlines(keepends=True), 1)
    path.unlink() if lost is None else path.write_bytes(
        b"".join(line for step, line in lines if step not in lost)
    )
    again = going_back(tmp_path, 14, (made,))
    assert again.rollbacks == (made,) and again.needed(14, (0, 2, 10)) == [10]
    *before, last = played(again, 15, judged_from + WINDOW - 1, LOW, (0, 10))
    assert last.rollback and (last.rollback.since, last.rollback.to) == (11, 10)
    assert not any(each.rollback for each in before)


def test_at_the_last_step_nothing_is_gone_back_to(tmp_path: Path) -> None:
    played(going_back(tmp_path, ess="warn"), 1, STEPS - 1)
    last = going_back(tmp_path, STEPS - 1).judge(STEPS, LOW, (0,))
    assert (last.rollback, last.stop) == (None, "") and last.told["learner/sentinel_ess"] == 1.0


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    sentinels, saved = going_back(tmp_path), (0, 4, 8)
    played(sentinels, 1, 20, FINE)
    played(sentinels, 21, 24, LOW)
    asked = list[int]()
    verdict = sentinels.judge(25, LOW, saved, lambda step: asked.append(step) or step < 4)
    assert verdict.rollback and verdict.rollback.to == 0 and asked == [8, 4, 0]
    none = going_back(tmp_path, 24).judge(25, LOW, saved, lambda step: False)
    assert none.rollback is None and "no good checkpoint" in none.stop


def test_a_learner_that_resumes_judges_as_if_never_interrupted(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    steps = [FINE if step < 4 else LOW for step in range(1, 40)]
    sentinels = going_back(whole)
    expected = [sentinels.judge(step, gauges, (0,)) for step, gauges in enumerate(steps, 1)]
    made = [each.rollback for each in expected if each.rollback]
    assert [each.step for each in made] == [10, 22, 34]
    for resumed_after in (9, 10, 13, 25):
        first = going_back(cut)
        for step in range(1, resumed_after + 3):
            first.judge(step, steps[step - 1], (0,))
        known = tuple(each for each in made if each.step <= resumed_after)
        again = going_back(cut, resumed_after, known)
        found = [again.judge(step, steps[step - 1], (0,)) for step in range(resumed_after + 1, 40)]
        assert found == expected[resumed_after:] and again.rollbacks == tuple(made)
        (cut / "sentinels.jsonl").unlink()


def test_the_bound_and_the_lack_of_a_checkpoint_stop_it_by_name(tmp_path: Path) -> None:
    none = played(going_back(tmp_path / "none"), 1, WINDOW, saved=())[-1]
    assert none.rollback is None
    assert "; no good checkpoint is older than step 1: one is always kept where" in none.stop
    sentinels = going_back(tmp_path, rollbacks=1)
    first, *_, last = played(sentinels, 1, WINDOW)[-1:] + played(sentinels, 11, 12 + WINDOW)
    assert first.rollback and last.rollback is None
    assert "; all rollbacks (sentinels.rollbacks = 1) are used: resume with" in last.stop
    assert "sentinels.rollbacks=2, and maybe a lower sentinels.rollback_rate, or" in last.stop
    assert last.stop.startswith("sentinel ess at step 22: ") and "sentinels.ess=warn" in last.stop
    assert last.told["learner/rollbacks"] == 1.0 and last.told["learner/rate_scale"] == 0.5


def test_a_stop_goes_before_a_rollback(tmp_path: Path) -> None:
    falls = {"learner/likelihood_change_positive": -1.0}
    *_, last = played(going_back(tmp_path, likelihood="stop"), 1, WINDOW, LOW | falls)
    assert last.rollback is None and last.stop.startswith("sentinel likelihood")


@pytest.mark.parametrize("action", ["warn", "rollback"])
def test_checkpoints_are_kept_where_a_rule_may_ask_for_them(tmp_path: Path, action: str) -> None:
    sentinels = going_back(tmp_path, ess=action)
    played(sentinels, 1, 17, FINE)  # the window begins at step 8
    assert sentinels.needed(17, (0, 4, 8, 12, 16)) == ([4, 8] if action == "rollback" else [])
    assert sentinels.rolls_back == (action == "rollback")
