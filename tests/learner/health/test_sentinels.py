"""The sentinels of a run: what they keep, what they tell, what outlives a learner."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.schema import Config, LearnerConfig
from configs.sentinels import SentinelsConfig
from learner.health.rules import RULES, gauge_of, median_of
from learner.health.sentinels import FILE_NAME, Noted, Sentinels, actions, read_notes, spans

WINDOW = RULES["ess"].window
LOW, FINE = {"learner/current_ess": 0.1}, {"learner/current_ess": 0.9}


def watching(
    run_dir: Path, resumed_after: int = 0, baseline: Any = "mean", **actions: Any
) -> Sentinels:
    learner = LearnerConfig(baseline=baseline, advantage_std="none")
    sentinels = SentinelsConfig(**actions)
    config = Config(run_dir=str(run_dir), learner=learner, sentinels=sentinels)
    return Sentinels(config, resumed_after)


def judge(sentinels: Sentinels, step: int, gauges: dict[str, float]) -> Any:
    return sentinels.judge(step, gauges)[:2]


def played(sentinels: Sentinels, first: int, last: int, gauges: dict[str, float]) -> list[Any]:
    return [judge(sentinels, step, gauges) for step in range(first, last + 1)]


def test_a_warning_is_a_gauge_and_a_note_and_the_run_goes_on(tmp_path: Path) -> None:
    *before, (told, why) = played(watching(tmp_path), 1, WINDOW, LOW)
    assert all(t[gauge_of("ess")] == 0.0 == t["learner/sentinels_fired"] for t, _ in before)
    assert told[gauge_of("ess")] == 1.0 == told["learner/sentinels_fired"] and why == ""
    names = {gauge_of(name) for name in RULES} | {"learner/sentinels_fired"}
    assert set(before[-1][0]) == names and set(told) == names | {median_of("ess")}
    *_, last = read_notes(tmp_path)
    assert last == Noted(WINDOW, LOW, ("ess",))


def test_off_tells_nothing_and_stop_says_why_with_two_ways_on(tmp_path: Path) -> None:
    off = played(watching(tmp_path, ess="off"), 1, WINDOW, LOW)
    assert all(gauge_of("ess") not in told and not why for told, why in off)
    stops = played(watching(tmp_path, ess="stop"), 1, WINDOW, LOW)
    assert [bool(why) for _, why in stops] == [False] * (WINDOW - 1) + [True]
    why = stops[-1][1]
    assert why.startswith(f"sentinel ess at step {WINDOW}: ")
    assert "model.path=RUN/checkpoints/step-N/model" in why and "sentinels.ess=warn" in why


def test_a_rule_is_off_where_it_says_nothing(tmp_path: Path) -> None:
    """Groups of equal rewards are no sign where the baseline is not theirs."""
    for baseline, action in (("mean", "warn"), ("critic", "off"), ("none", "off")):
        learner = LearnerConfig(baseline=baseline, advantage_std="none")
        found = actions(Config(learner=learner, sentinels=SentinelsConfig(ess="stop")))
        assert (found["no_signal"], found["ess"]) == (action, "stop") and list(found) == list(RULES)


def test_what_is_said_is_the_median_not_the_step_s_own_value(tmp_path: Path) -> None:
    sentinels = watching(tmp_path, ess="stop")
    played(sentinels, 1, WINDOW - 1, LOW)
    told, why = judge(sentinels, WINDOW, FINE)
    assert told[median_of("ess")] == 0.1 and "(learner/current_ess at 0.1, below 0.8" in why


def test_a_step_without_the_gauge_splits_no_span(tmp_path: Path) -> None:
    sentinels = watching(tmp_path)
    played(sentinels, 1, WINDOW, LOW)
    (told, _), *_ = played(sentinels, WINDOW + 1, WINDOW + 2, {"learner/entropy": 0.5})
    assert told[gauge_of("ess")] == 1.0 and told[median_of("ess")] == 0.1
    assert watching(tmp_path, WINDOW + 1).judge(WINDOW + 2, {})[0][gauge_of("ess")] == 1.0
    (span,) = spans(read_notes(tmp_path))
    assert (span.name, span.first, span.last) == ("ess", WINDOW, WINDOW + 2)


@pytest.mark.parametrize("resumed_after", [4, WINDOW - 1, WINDOW + 3])
def test_a_learner_that_resumes_judges_as_if_never_interrupted(
    tmp_path: Path, resumed_after: int
) -> None:
    whole = watching(tmp_path / "whole")
    (tmp_path / "whole").mkdir()
    steps = [LOW if step > 5 else FINE for step in range(1, 31)]
    expected = [whole.judge(step, gauges) for step, gauges in enumerate(steps, 1)]
    cut = watching(tmp_path)
    for step in range(1, WINDOW + 5):
        cut.judge(step, steps[step - 1])
    again = watching(tmp_path, resumed_after)
    found = [again.judge(step, steps[step - 1]) for step in range(resumed_after + 1, 31)]
    assert found == expected[resumed_after:]
    assert [noted.step for noted in read_notes(tmp_path)] == list(range(1, 31))


def test_a_rule_that_was_off_knows_the_steps_before_once_it_is_on(tmp_path: Path) -> None:
    played(watching(tmp_path, ess="off"), 1, WINDOW, LOW)
    on = watching(tmp_path, WINDOW, ess="stop")
    assert on.judge(WINDOW + 1, LOW)[1]


def test_a_run_from_the_start_forgets_an_earlier_one(tmp_path: Path) -> None:
    played(watching(tmp_path), 1, WINDOW, LOW)
    told, _ = judge(watching(tmp_path), 1, LOW)
    assert told[gauge_of("ess")] == 0.0 and len(list(read_notes(tmp_path))) == 1


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    played(watching(tmp_path), 1, 3, FINE)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-5])
    watching(tmp_path, 3).judge(3, FINE)
    assert [noted.step for noted in read_notes(tmp_path)] == [1, 2, 3]


def test_what_is_no_number_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    sentinels = watching(tmp_path)
    for bad in (float("nan"), float("inf")):
        sentinels.judge(1, {"learner/entropy": bad, "learner/current_ess": 0.9})
    noted = [each.gauges for each in read_notes(tmp_path)]
    assert noted == [FINE] * 2


def test_bytes_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    watching(tmp_path).judge(1, FINE)
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"step": 2, "gauges": {"\xff\xfe": 1.0}}\n{"step": "two"}\n[]\n\n')
    assert [noted.step for noted in read_notes(tmp_path)] == [1]


def test_a_step_that_cannot_be_noted_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentinels = watching(tmp_path / "gone")
    assert sentinels.judge(1, FINE)[1] == ""
    assert "step 1 is not noted" in caplog.text


def test_steps_in_a_row_are_one_span() -> None:
    fired = [(), ("ess",), ("ess", "entropy"), ("entropy",), (), ("ess",)]
    lines = [Noted(step, {}, names) for step, names in enumerate(fired)]
    found = [(span.name, span.first, span.last) for span in spans(lines)]
    assert found == [("ess", 1, 2), ("entropy", 2, 3), ("ess", 5, 5)]


def test_a_line_holds_the_watched_gauges_alone(tmp_path: Path) -> None:
    watching(tmp_path).judge(1, FINE | {"learner/loss": 1.0})
    assert msgspec.json.decode((tmp_path / FILE_NAME).read_bytes(), type=Noted).gauges == FINE


@pytest.mark.parametrize(("baseline", "fires"), [("mean", 1.0), ("critic", None), ("none", None)])
def test_groups_of_equal_rewards_are_a_sign_where_groups_are_compared(
    tmp_path: Path, baseline: str, fires: float | None
) -> None:
    alike = {"replay/no_signal_fraction": 1.0}
    *_, (told, _) = played(watching(tmp_path, baseline=baseline), 1, WINDOW, alike)
    assert told.get(gauge_of("no_signal")) == fires
