"""The curve of a run: what its lines are called, and that none is missing."""

import msgspec
import pytest
from matplotlib import pyplot

from replay.protocol import EvalResult, SetResult
from scripts.runs.plot import draw_evaluations, draw_reports

BY_HOPS = {"1": 0.9, "2": 0.5}
RESULT = EvalResult(
    step=2,
    questions=10,
    em=0.7,
    sampled_em=0.6,
    em_by_hops=BY_HOPS,
    sampled_em_by_hops=BY_HOPS,
    searches=1.0,
    oldest_version=2,
    newest_version=2,
)


def labels(**changed: object) -> list[str]:
    """The legend of the curve of one evaluation."""
    figure, axes = pyplot.subplots()
    draw_evaluations(axes, [msgspec.structs.replace(RESULT, **changed)])
    pyplot.close(figure)
    return axes.get_legend_handles_labels()[1]


@pytest.mark.parametrize(
    ("hops", "names"),
    [
        ({"0": 0.7}, ["greedy", "sampled"]),
        (BY_HOPS, ["1 hop, greedy", "1 hop, sampled", "2 hops, greedy", "2 hops, sampled"]),
    ],
)
def test_hops_are_named_where_questions_have_some(hops: dict[str, float], names: list[str]) -> None:
    assert labels(em_by_hops=hops, sampled_em_by_hops=hops) == names


def test_greedy_evaluations_alone_are_drawn_too() -> None:
    assert labels(sampled_em=None, sampled_em_by_hops={}) == ["1 hop, greedy", "2 hops, greedy"]


def test_several_data_sets_are_drawn_each_for_itself() -> None:
    sets = {name: SetResult(5, 0.5, 0.25, 1.0) for name in ("nq", "hotpotqa")}
    assert labels(sets=sets) == ["nq", "hotpotqa"]
    assert labels(sets={"nq": sets["nq"]})[0] == "1 hop, greedy"


def test_a_step_without_a_rollout_s_end_is_no_reward_of_0() -> None:
    figure, axes = pyplot.subplots()
    stale = {"replay/staleness": 1.0}
    draw_reports(axes, [(1, stale | {"actor/reward": 0.5}), (2, stale), (3, {"actor/reward": 0.4})])
    rewards, staleness = (each.get_lines()[0] for each in figure.axes)
    pyplot.close(figure)
    assert [*rewards.get_xdata()] == [1, 3] and [*rewards.get_ydata()] == [0.5, 0.4]
    assert [*staleness.get_xdata()] == [1, 2] and [*staleness.get_ydata()] == [1.0, 1.0]
