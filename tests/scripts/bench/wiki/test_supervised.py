"""The supervised baseline: when it has learnt enough, and which model is kept."""

from pathlib import Path

import pytest

from scripts.bench.wiki.supervised import (
    RECORD,
    Learnt,
    Schedule,
    epoch_of,
    has_stopped,
    read,
    teach,
)
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline.commands import OutOfTime
from scripts.wiki.pipeline.start import Candidate
from tests.scripts.bench.wiki.commands import Commands, ems_of, seed

SCHEDULE = Schedule(every=4, patience=2, questions=3)


@pytest.mark.parametrize(
    ("ems", "stopped"),
    [
        ([], False),
        ([0.0], False),
        ([0.1, 0.3, 0.2], False),
        ([0.1, 0.3, 0.2, 0.3], True),  # as much is no more
        ([0.3, 0.2, 0.4, 0.1], False),
        ([0.3, 0.2, 0.1], True),
    ],
)
def test_learning_stops_when_the_last_two_do_not_exceed_the_best(
    ems: list[float], stopped: bool
) -> None:
    assert has_stopped(measured(ems), SCHEDULE, epoch=8) is stopped


@pytest.mark.parametrize(
    ("ems", "stopped"),
    [
        ([0.3, 0.2, 0.1], False),  # none of them has seen every demonstration
        ([0.3, 0.2, 0.1, 0.2], False),  # at 64 steps, the first
        ([0.3, 0.2, 0.1, 0.2, 0.1], True),
        ([0.3, 0.2, 0.1, 0.4, 0.1], False),
        ([0.3, 0.2, 0.1, 0.4, 0.1, 0.2], True),
    ],
)
def test_learning_does_not_stop_before_every_demonstration_is_seen(
    ems: list[float], stopped: bool
) -> None:
    assert has_stopped(measured(ems, every=16), SCHEDULE, epoch=60) is stopped


@pytest.mark.parametrize(("measurements", "stopped"), [(0, False), (3, False), (4, True)])
def test_a_schedule_of_one_epoch_ends_with_it_though_still_rising(
    measurements: int, stopped: bool
) -> None:
    rising = measured([0.1, 0.2, 0.3, 0.4][:measurements], every=16)
    assert has_stopped(rising, Schedule(patience=0), epoch=60) is stopped
    assert not has_stopped(rising, Schedule(), epoch=60)


def test_an_epoch_shows_every_demonstration(tmp_path: Path) -> None:
    plan = seed(tmp_path).plan
    plan.files.demonstrations.write_text("{}\n" * 479)
    assert epoch_of(plan) == 60  # of 8 each, the last of 7
    assert Schedule().questions == 0  # all


def measured(ems: list[float], every: int = 4) -> Learnt:
    return Learnt([Candidate(every * n, em, 1.0) for n, em in enumerate(ems, 1)])


def taught(folder: Path, commands: Commands) -> None:
    teach(folder / "supervised", seed(folder).plan, SCHEDULE, commands, lambda line: None)


def test_the_best_model_is_kept_with_its_configuration(tmp_path: Path) -> None:
    commands = Commands({4: 0.1, 8: 0.4, 12: 0.3, 16: 0.4})
    taught(tmp_path, commands)
    best = tmp_path / "supervised" / "best"
    assert (best / "model" / "steps").read_text() == "8" and (best / "config.yaml").exists()
    assert not (tmp_path / "supervised" / "warm").exists()  # gigabytes
    learnt = read(tmp_path / "supervised")
    assert ems_of(learnt) == [0.1, 0.4, 0.3, 0.4] and learnt.best is not None
    assert learnt.best.steps == 8
    warm = commands.asked[0]
    assert warm[warm.index("--rows") + 1] == "8" and warm[warm.index("--held-out") + 1] == "0"
    asked = commands.asked[1]
    assert asked[asked.index("--limit") + 1] == "3" and "asked=" in " ".join(asked)


def test_a_killed_end_is_made_up_for(tmp_path: Path) -> None:
    one = seed(tmp_path)
    folder, schedule = one.folder / "supervised", Schedule(every=4, patience=2)
    teach(folder, one.plan, schedule, Commands(), lambda line: None)
    assert one.is_done("supervised")
    for left in ("warm", "warm.old", "best.old"):
        (folder / left / "checkpoints").mkdir(parents=True)
        assert not one.is_done("supervised")
        again = Commands()
        teach(folder, one.plan, schedule, again, lambda line: None)
        assert one.is_done("supervised") and not again.asked
        assert {each.name for each in folder.iterdir()} == {
            "best", "learnt.json", "step-4", "step-8", "step-12",
        }  # fmt: skip


@pytest.mark.parametrize("ends_at", [1, 4, 5, 8])
def test_an_ended_slice_changes_nothing(ends_at: int, tmp_path: Path) -> None:
    ems = {4: 0.1, 8: 0.4, 12: 0.3, 16: 0.4}
    with pytest.raises(OutOfTime):
        taught(tmp_path, Commands(ems, ends_at))
    taught(tmp_path, Commands(ems))
    assert ems_of(read(tmp_path / "supervised")) == [0.1, 0.4, 0.3, 0.4]
    assert (tmp_path / "supervised" / "best" / "model" / "steps").read_text() == "8"
    done = Commands()
    taught(tmp_path, done)
    assert not done.asked


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text("[")
    with pytest.raises(WikiError, match=r"learnt\.json cannot be read .*: remove "):
        read(tmp_path)
