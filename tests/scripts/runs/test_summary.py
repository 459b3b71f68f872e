"""The summary, the rollouts shown and the curve are folds over a log that a real ledger wrote."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from tokenizers import Tokenizer, models, pre_tokenizers

from configs.load import load
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from replay.codec import encode_trajectory
from replay.log.event_log import EventLog, read
from replay.log.records import (
    Delivered,
    EvaluationFinished,
    GroupDropped,
    GroupOpened,
    Leased,
    Record,
    Reported,
    RunResumed,
    RunStarted,
    Sampled,
)
from replay.log.summary import summarise
from replay.protocol import EvalResult, SetResult
from replay.trajectory import Kind, Question, Sampling, StopReason, TokenSequence, Trajectory, Turn
from scripts import cli
from scripts.runs import plot, show, summary
from tests.scripts.conftest import RecordedRun

QUESTION = Question("q", "who ?", ("me",), 1)


def rollout(group_id: int, kind: Kind, versions: list[int]) -> Trajectory:
    """One turn of len(versions) tokens."""
    count = len(versions)
    turn = Turn(
        np.arange(count, dtype=np.int32),
        np.zeros(count, np.float32),
        np.array(versions, np.int32),
        np.zeros(0, np.int32),
    )
    return Trajectory(
        group_id=group_id,
        sibling=0,
        question_id="q",
        kind=kind,
        actor_id="a",
        sampling=Sampling(),
        sequences=(TokenSequence(np.array([1], np.int32), (turn,)),),
        stop_reason=StopReason.ANSWERED,
        answer="me",
        reward=1.0,
    )


def group(group_id: int, kind: Kind, versions: list[int], now: float) -> list[Record]:
    """A group of one, opened, leased and delivered."""
    trajectory = rollout(group_id, kind, versions)
    payload = encode_trajectory(trajectory)
    return [
        GroupOpened(now, group_id, kind, QUESTION, 1, versions[0]),
        Leased(now, "a", group_id, (0,), (0,)),
        Delivered(now, "a", group_id, 0, payload, summarise(trajectory)),
    ]


def result(step: int, em: float) -> EvalResult:
    """An evaluation of ten questions."""
    by_hops = {"1": em, "2": em / 2}
    return EvalResult(step, 10, em, em / 2, by_hops, by_hops, 1.5, step, step)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A configuration whose run directory holds a small log."""
    records = [
        EvaluationFinished(100.0, result(0, 0.1)),
        *group(1, "train", [0, 0, 1], 100.0),
        *group(2, "train", [1], 101.0),
        *group(3, "eval", [1, 1], 102.0),
        GroupDropped(103.0, 2, "no_signal"),
        Sampled(104.0, 1, 3, (1,), (), {}),
        Reported(
            109.0,
            1,
            2,
            {
                "sync/generation_pause_s": 0.1,
                "learner/sentinel_ess": 1.0,
                "learner/rolled_back_to": 0.0,
            },
        ),
        Reported(
            110.0, 1, 3, {"sync/updates": 4.0, "sync/refits": 1.0, "sync/generation_pause_s": 0.3}
        ),
        EvaluationFinished(111.0, result(3, 0.9)),
    ]
    with EventLog.create(tmp_path / "events.log") as log:
        log.append(records)
    overrides = [f"run_dir={tmp_path}", f"model.path={tmp_path}", "learner.total_steps=3"]
    return load(REPOSITORY / "configs" / "base.yaml", overrides)


def test_the_summary_is_what_the_log_says(config: Config) -> None:
    numbers = {"retrieval/requests": 3.0, "actor/lost_requests": 1.0, "sync/updates": 4.0}
    gauges = {"a": numbers, "b": {"actor/token_mismatch": 2.0}}
    built = summary.build(config, "completed", "completed", 20.0, {"training": 9.0}, gauges)
    assert (built["em_start"], built["em_final"]) == (0.1, 0.9)
    assert built["em_final_by_hops"] == {"1": 0.9, "2": 0.45}
    assert (built["steps"], built["trajectories_trained"], built["tokens_trained"]) == (3, 1, 3)
    assert built["merged_whole"] == 1.0
    assert built["staleness_mean"] == pytest.approx((2 + 2 + 1) / 3, abs=1e-4)
    assert (built["staleness_max"], built["train_wall_s"]) == (2, 10.0)
    assert built["dropped_groups_by_cause"] == {"no_signal": 1}
    assert built["sentinels_fired_steps"] == {"ess": 1} and built["rollbacks"] == 1
    assert (built["retrieval_requests"], built["lost_requests"]) == (3, 1)
    assert (built["weight_syncs"], built["refits"], built["token_mismatches"]) == (4, 1, 2)
    assert (built["generation_pause_share"], built["generation_pause_p99_s"]) == (0.04, 0.298)
    assert built["rollout_tokens_per_s"] == pytest.approx((3 + 1 + 2) / 10)


def test_each_data_set_has_its_numbers_in_the_summary(config: Config) -> None:
    of = {0: SetResult(4, 0.25, 0.5, 1.0, {"judge": 0.1}), 3: SetResult(4, 0.75, 0.5, 1.0)}
    with EventLog.open(Path(config.run_dir) / "events.log") as log:
        for step, found in of.items():
            told = structs.replace(result(step, 0.5), sets={"nq": found}, parts={"f1": 0.5})
            log.append([EvaluationFinished(112.0, told)])
    built = summary.build(config, "completed", "completed", 20.0, {}, {})
    assert built["parts_start"] == {"f1": 0.5} and built["eval_sets"]["nq"] == {
        "questions": 4,
        "start": {"em": 0.25, "sampled_em": 0.5, "searches": 1.0, "judge": 0.1},
        "final": {"em": 0.75, "sampled_em": 0.5, "searches": 1.0},
    }
    assert list(summary.set_lines(built)) == ["nq: EM 0.250 -> 0.750, 4 questions"]


def test_an_evaluation_before_the_end_is_not_final(config: Config) -> None:
    longer = structs.replace(config, learner=structs.replace(config.learner, total_steps=9))
    built = summary.build(longer, "interrupted", "SIGINT", 20.0, {}, {})
    assert (built["em_start"], built["em_final"]) == (0.1, None)


def test_a_run_that_never_started_has_no_numbers(tmp_path: Path) -> None:
    config = load(REPOSITORY / "configs" / "base.yaml", [f"run_dir={tmp_path}"])
    built = summary.build(config, "failed", "actor-0 was killed", 1.0, {}, {})
    assert built["em_start"] is built["em_final"] is built["train_wall_s"] is None
    assert built["merged_whole"] is None
    assert built["status"] == "failed"


def test_rollouts_merged_whole_are_a_share_of_the_trained(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = make_recorded_run()
    run.train(0)
    run.train(1, sequences=3)
    fold = summary.RunFold(read(run.path / "events.log"))
    assert (fold.trajectories_trained, fold.merged_whole) == (8, 4)
    assert fold.tokens_trained == 4 * 8 + 4 * 3 * 8


def test_a_run_launched_twice_is_one_run() -> None:
    counted = {"retrieval/requests": 5.0, "sync/updates": 3.0, "actor/reward": 0.1}
    records = [
        RunStarted(100.0, 0, ""),
        EvaluationFinished(101.0, result(0, 0.1)),
        *group(1, "train", [0], 102.0),
        Sampled(103.0, 1, 1, (1,), (), {}),
        Reported(104.0, 1, 1, counted),
        EvaluationFinished(105.0, result(1, 0.3)),
        RunResumed(200.0, ""),
        Reported(201.0, 2, 1, counted | {"actor/reward": 0.2}),
        *group(2, "train", [1], 204.0),
        Sampled(205.0, 2, 2, (2,), (), {}),
        Reported(210.0, 2, 2, {}),
        EvaluationFinished(211.0, result(1, 0.4)),
        EvaluationFinished(212.0, result(2, 0.9)),
    ]
    fold = summary.RunFold(records)
    assert [fold.evaluations[step].em for step in (0, 1, 2)] == [0.1, 0.4, 0.9]
    assert fold.reports[1]["actor/reward"] == 0.2 and fold.launches == 2
    assert (fold.earlier_wall_s, fold.train_wall_s) == (5.0, 2.0 + 6.0)
    assert fold.earlier["retrieval/requests"] == 5 and fold.earlier["sync/updates"] == 3
    assert (fold.trajectories_trained, fold.staleness_max) == (2, 0)


def test_a_torn_tail_is_summarised_up_to_there(config: Config) -> None:
    path = Path(config.run_dir) / "events.log"
    path.write_bytes(path.read_bytes()[:-3])
    built = summary.build(config, "failed", "killed", 1.0, {}, {})
    assert built["steps"] == 3 and built["em_start"] == 0.1


def test_show_filters_and_colours(config: Config) -> None:
    run = Path(config.run_dir)
    assert [s[1].group_id for s in show.rollouts(run, step=3)] == [1]
    assert [s[1].group_id for s in show.rollouts(run, question="q")] == [3, 1]
    words = {"[UNK]": 0, "who": 1, "me": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = show.render(next(iter(show.rollouts(run, step=3))), backend)
    assert "trained step 3" in text.plain and "version 0-1" in text.plain
    assert any("green" in str(span.style) for span in text.spans)
    assert "sequence" not in text.plain


def test_each_of_several_sequences_is_shown_by_name_with_its_turns_and_versions() -> None:
    words = {"[UNK]": 0, "ask": 1, "say": 2, "read": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    said = rollout(1, "train", [3, 4, 4]).turns[0]
    said = structs.replace(said, action_tokens=np.array([2, 2, 2], np.int32))
    more = structs.replace(said, observation_tokens=np.array([3], np.int32))
    ask = np.array([1], np.int32)
    several = (
        TokenSequence(ask, (more, said)),
        TokenSequence(ask, (structs.replace(said, policy_versions=np.full(3, 5, np.int32)),), "2"),
        TokenSequence(ask, (said,), "summary"),
    )
    made = structs.replace(rollout(1, "train", [3]), sequences=several)
    head, *lines = show.render((QUESTION, made, 7), backend).plain.splitlines()
    assert "version 3-5, a, 3 sequences): answered" in head
    assert lines == [
        "[sequence 1 of 3: 2 turns, version 3-4]",
        "ask say say say read say say say",
        "[sequence 2 of 3: 1 turn, version 5]",
        "ask say say say",
        "[sequence 3 of 3, summary: 1 turn, version 3-4]",
        "ask say say say",
    ]


def test_a_run_without_an_evaluation_has_no_curve(
    recorded_run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run.train(0)
    assert cli.main(["plot", str(recorded_run.path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"RUN = '{recorded_run.path}': no evaluation has ended in it yet" in err


def test_the_curve_is_drawn(config: Config, tmp_path: Path) -> None:
    assert plot.draw(Path(config.run_dir)) == tmp_path / "curve.png"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
