"""What is learnt when, and where a curriculum goes on."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from configs.load import ConfigError
from configs.schema import Config, ModelConfig
from learner import checkpoint
from learner.errors import BadModel
from scripts.warm_start.curriculum import Curriculum, OutputFolder
from scripts.warm_start.demonstrations import BadDemonstrations, Demonstration
from tests.scripts.conftest import Exporter


def demonstrations(count: int, of_each: int = 1) -> list[Demonstration]:
    return [
        Demonstration(f"question {number}", (([number], False), ([number, sibling], True)))
        for number in range(count)
        for sibling in range(of_each)
    ]


def names(curriculum: Curriculum, step: int) -> list[int]:
    return [int(segments[0][0][0]) for segments in curriculum.batch(step)]


def test_every_epoch_shows_each_once_in_an_order_of_its_own() -> None:
    curriculum = Curriculum.of(demonstrations(6), 0.0, 2, seed=3)
    epochs = [[m for step in range(n, n + 3) for m in names(curriculum, step)] for n in (1, 4, 7)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert names(Curriculum.of(demonstrations(6), 0.0, 2, seed=3), 5) == names(curriculum, 5)


def test_a_step_may_end_one_epoch_and_begin_the_next() -> None:
    curriculum = Curriculum.of(demonstrations(5), 0.0, 3, seed=0)
    drawn = [name for step in range(1, 6) for name in names(curriculum, step)]
    assert [sorted(drawn[at : at + 5]) for at in (0, 5, 10)] == [list(range(5))] * 3


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.1, 1), (2.5, 7)])
def test_steps_are_the_epochs_rounded_up(epochs: float, steps: int) -> None:
    assert Curriculum.of(demonstrations(5), 0.0, 2, seed=0).steps(epochs) == steps


def test_a_question_is_learnt_or_held_out_with_all_its_siblings() -> None:
    curriculum = Curriculum.of(demonstrations(20, of_each=3), 0.2, 4, seed=1)
    learnt, held_out = (
        {each.question for each in part} for part in (curriculum.learnt, curriculum.held_out)
    )
    assert len(held_out) == 4 and not learnt & held_out
    assert len(curriculum.learnt) == 48 and len(curriculum.held_out) == 12


def test_one_question_at_least_is_held_out_and_none_where_none_is_asked_for() -> None:
    assert len(Curriculum.of(demonstrations(3), 0.01, 4, seed=0).held_out) == 1
    assert not Curriculum.of(demonstrations(3), 0.0, 4, seed=0).held_out
    with pytest.raises(BadDemonstrations, match=r"--held-out 0.5 of 1 questions leaves none"):
        Curriculum.of(demonstrations(1), 0.5, 4, seed=0)


def stopped(config: Config, curriculum: Curriculum) -> OutputFolder:
    """Where it is, once that has been written down and the folder is free again."""
    with OutputFolder.held(config, curriculum) as place:
        return place


@pytest.fixture
def config(tmp_path: Path, inputs: dict[str, str]) -> Config:
    model = ModelConfig(path=inputs["model.path"])
    return Config(model=model, run_dir=str(tmp_path / "out"))


@pytest.fixture
def curriculum() -> Curriculum:
    return Curriculum.of(demonstrations(6), 0.0, 2, seed=0)


def test_it_goes_on_from_its_newest_checkpoint(config: Config, curriculum: Curriculum) -> None:
    place = stopped(config, curriculum)
    for step, loss in enumerate((3.0, 1.0, 2.0, 0.5)):
        place.measured(step, loss)
    for step in (1, 2):
        checkpoint.save(config, step, Exporter(), None)
    again = stopped(config, curriculum)
    assert again.done == 2 and again.losses == {0: 3.0, 1: 1.0, 2: 2.0}
    assert again.best([1, 2]) == 1 and again.best([]) is None


def test_what_was_never_saved_begins_again(config: Config, curriculum: Curriculum) -> None:
    stopped(config, curriculum)
    assert stopped(config, curriculum).done == 0


def test_another_is_refused_by_what_differs(config: Config, curriculum: Curriculum) -> None:
    stopped(config, curriculum)
    other = Curriculum.of(demonstrations(7), 0.0, 3, seed=0)
    with pytest.raises(ConfigError, match=r"rows = 2 there, 3 here; learnt = 6 there, 7 here"):
        stopped(config, other)
    written = [Demonstration(e.question, e.segments[::-1]) for e in demonstrations(6)]
    with pytest.raises(ConfigError, match="digest = "):
        stopped(config, Curriculum.of(written, 0.0, 2, seed=0))


def test_another_setting_is_refused(config: Config, curriculum: Curriculum) -> None:
    stopped(config, curriculum)
    checkpoint.save(config, 1, Exporter(), None)
    learner = msgspec.structs.replace(config.learner, lr=0.5)
    with pytest.raises(checkpoint.BadCheckpoint, match=r"learner\.lr = 1e-06 there, 0\.5 here"):
        stopped(msgspec.structs.replace(config, learner=learner), curriculum)


def test_a_folder_with_something_else_in_it_is_left_alone(
    config: Config, curriculum: Curriculum
) -> None:
    Path(config.run_dir).mkdir()
    for name in ("thesis.tex", "config.yaml", "losses.json"):
        (Path(config.run_dir) / name).touch()
    with pytest.raises(ConfigError, match="it holds something else: name a new one"):
        stopped(config, curriculum)
    assert len(list(Path(config.run_dir).iterdir())) == 3


def test_one_that_was_killed_before_it_began_is_no_obstacle(
    config: Config, curriculum: Curriculum
) -> None:
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "curriculum.json.draft").write_text("{")
    stopped(config, curriculum)
    assert stopped(config, curriculum).done == 0


def test_a_folder_is_of_one_process_at_a_time(config: Config, curriculum: Curriculum) -> None:
    other = Curriculum.of(demonstrations(7), 0.0, 3, seed=0)
    with OutputFolder.held(config, curriculum) as place:
        for another in (curriculum, other):  # whatever it holds is not read yet
            with pytest.raises(ConfigError, match="another warm start is learning there"):
                stopped(config, another)
        assert place.done == 0
        checkpoint.save(config, 3, Exporter(), None)
    assert stopped(config, curriculum).done == 3


def test_a_folder_that_was_removed_and_made_anew_is_locked_anew(
    config: Config, curriculum: Curriculum, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock, removed = Path(config.run_dir), fcntl.flock, list[Path]()

    def late(descriptor: int, how: int) -> None:
        if not removed:
            folder.rmdir()
            removed.append(folder)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        OutputFolder.held(config, curriculum),
        pytest.raises(ConfigError, match="another warm start is learning there"),
    ):
        stopped(config, curriculum)


def test_a_folder_that_can_be_none_is_refused(config: Config, curriculum: Curriculum) -> None:
    Path(config.run_dir).touch()
    with pytest.raises(ConfigError, match=r"--out '.*out': Not a directory: name another folder"):
        stopped(config, curriculum)
    under = msgspec.structs.replace(config, run_dir=f"{config.run_dir}/under")
    with pytest.raises(ConfigError, match=r"under': Not a directory: name another folder"):
        stopped(under, curriculum)


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """An empty folder that this process may only read; as root it is nobody meanwhile."""
    folder, user = Path(tempfile.mkdtemp()), os.geteuid()
    folder.chmod(0o555)
    os.seteuid(user or 65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.rmdir()


@pytest.mark.parametrize("name", ["", "new/out"])
def test_a_folder_that_cannot_be_written_is_refused(
    config: Config, curriculum: Curriculum, unwritable: Path, name: str
) -> None:
    there = msgspec.structs.replace(config, run_dir=str(unwritable / name))
    with pytest.raises(ConfigError, match=r"--out '/.*': Permission denied: name another folder"):
        stopped(there, curriculum)
    assert not list(unwritable.iterdir())


def test_a_folder_that_cannot_be_locked_is_refused(
    config: Config, curriculum: Curriculum, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(ConfigError, match=r"it cannot be locked \(No locks available\): name a"):
        stopped(config, curriculum)
    assert not Path(config.run_dir).exists()


def test_what_a_refused_start_made_is_gone_again(
    config: Config, curriculum: Curriculum, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_config: Config, path: Path) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("scripts.warm_start.curriculum.save", full)
    for name in ("new/out", "out"):
        there = msgspec.structs.replace(config, run_dir=str(tmp_path / "runs" / name))
        with pytest.raises(ConfigError, match="No space left on device: name another folder"):
            stopped(there, curriculum)
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_refused_leaves_nothing_of_what_began(
    config: Config, curriculum: Curriculum
) -> None:
    folder = Path(config.run_dir)
    for learnt in (False, True):
        with pytest.raises(BadModel), OutputFolder.held(config, curriculum):
            (folder / "tensorboard").mkdir()
            if learnt:
                checkpoint.save(config, 1, Exporter(), None)
            raise BadModel("no weights")
        assert folder.exists() is learnt
    assert stopped(config, curriculum).done == 1


def test_a_refused_start_leaves_what_was_there(config: Config, curriculum: Curriculum) -> None:
    stopped(config, curriculum)
    (
        Path(config.run_dir) / "curriculum.json.draft"
    ).mkdir()  # nobody can write there, not even root
    with pytest.raises(ConfigError, match="Is a directory: name another folder"):
        stopped(config, curriculum)
    (Path(config.run_dir) / "curriculum.json.draft").rmdir()
    assert stopped(config, curriculum).done == 0


def exported(config: Config, steps: int) -> None:
    """Checkpoints of that many steps, each with a model that says which it is."""
    for step in range(1, steps + 1):
        folder = checkpoint.save(config, step, Exporter(), None)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "step").write_text(str(step))


def test_the_best_measured_checkpoint_is_delivered_in_place_of_an_earlier_one(
    config: Config, curriculum: Curriculum
) -> None:
    place = stopped(config, curriculum)
    exported(config, 3)
    assert place.deliver(3)[1] == "step 3, the last"
    for step, loss in ((0, 0.1), (1, 3.0), (2, 1.0), (3, 2.0)):
        place.measured(step, loss)
    model, which = place.deliver(3)
    assert which == "step 2, the best, with a held-out loss of 1.0000"
    assert (model / "step").read_text() == "2"
    assert not [path.name for path in place.path.glob("model.*")]


def test_what_is_there_stays_until_another_model_is_whole(
    config: Config, curriculum: Curriculum
) -> None:
    place = stopped(config, curriculum)
    exported(config, 1)
    model, _ = place.deliver(1)
    (place.path / "checkpoints" / "step-1" / "model" / "step").unlink()
    (place.path / "checkpoints" / "step-1" / "model").rmdir()
    with pytest.raises(OSError, match="step-1"):
        place.deliver(1)
    assert (model / "step").read_text() == "1"
