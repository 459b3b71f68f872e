"""A run that goes back: the loop with a scripted replay around a real trainer."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from configs.schema import Config, WeightSyncConfig
from configs.sentinels import SentinelsConfig
from learner import checkpoint
from learner.evaluations import Evaluations
from learner.health.sentinels import Sentinels
from learner.loop import train
from learner.run import Run
from learner.trainer import Trainer
from learner.worker import take_up
from replay.protocol import Batch
from tests.learner.test_loop import Publisher, Replay, Written

BAD = range(9, 15)  # fires at step 14 over steps 5 to 14


class Crash(Exception):
    """The end of a learner."""


@pytest.fixture
def config(config: Config) -> Config:
    learner = msgspec.structs.replace(
        config.learner, total_steps=18, checkpoint_every=4, lr=1e-3, keep_checkpoints=1
    )
    sentinels = SentinelsConfig(no_signal="rollback")
    return msgspec.structs.replace(config, learner=learner, sentinels=sentinels)


@pytest.fixture
def begin(word_tokenizer: Any, batch: Callable[..., Batch]) -> Iterator[Callable[[Config], Run]]:
    """begin(config): the run from its newest checkpoint, or from the start."""
    trainers: list[Trainer] = []

    def make(config: Config) -> Run:
        found, script = checkpoint.newest(config.run_dir), []
        while trainers:
            trainers.pop().close()
        trainers.append(trainer := Trainer(config))
        step, made = (found.manifest.step, found.manifest.rollbacks) if found else (0, ())
        if found:
            take_up(found, trainer)
        replay = Replay(script, batch, Path(config.run_dir) / "checkpoints")
        replay.batch = lambda step, version: msgspec.structs.replace(
            batch(step, version), gauges={"replay/no_signal_fraction": float(step in BAD)}
        )
        run = Run(
            config=config,
            trainer=trainer,
            tokenizer=word_tokenizer,
            probe=(3, 4, 5),
            reader=replay,
            publisher=Publisher(script),
            metrics=Written(),
            evaluations=Evaluations(config.run_dir, step if found else None),
            sentinels=Sentinels(config, step, made),
            step=step,
            saved=step,
        )
        run.resume() if found else run.start()
        return run

    yield make
    for trainer in trainers:
        trainer.close()


def state(config: Config, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.folder_of(config.run_dir, step) / "state" / "rank-0.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def at(run: Run, step: int, each: Callable[[], None]) -> None:
    """Have something happen before a step is sampled."""
    plain = run.reader.sample

    def sample(done: int) -> Any:
        if done + 1 == step:
            each()
        return plain(done)

    run.reader.sample = sample


def crash() -> None:
    raise Crash


def test_it_takes_up_the_last_good_checkpoint_as_this_step_s_at_half_the_rate(
    config: Config, begin: Callable[[Config], Run]
) -> None:
    seldom = msgspec.structs.replace(config, weight_sync=WeightSyncConfig(publish_every=3))
    run, states = begin(seldom), dict[int, dict[str, torch.Tensor]]()
    at(run, 5, lambda: states.update({4: state(config, 4)}))
    at(run, 15, lambda: states.update({14: state(config, 14)}))
    assert train(run) == "completed" and run.step == 18
    assert equal(states[4], states[14]) and any("optimiser" in name for name in states[4])
    lines = [entry for entry in run.reader.script if entry[1:] == (14,)]
    assert lines == [("publish", 14), ("report", 14), ("committed", 14)]
    rates = [run.metrics[step]["learner/lr"] for step in (13, 14, 15, 18)]
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4]
    told = run.metrics[14]
    assert (told["learner/rollbacks"], told["learner/rolled_back_to"]) == (1.0, 4.0)
    assert "learner/rolled_back_to" not in run.metrics[15]
    assert [run.metrics[step]["learner/rate_scale"] for step in (13, 14, 18)] == [1.0, 0.5, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["committed", "published"])
def test_a_learner_that_dies_goes_on_from_what_was_rolled_back_bit_for_bit(
    config: Config, begin: Callable[[Config], Run], tmp_path: Path, ends: str
) -> None:
    whole = begin(config)
    train(whole)
    last, gauges = state(config, 18), whole.metrics
    shutil.rmtree(config.run_dir)
    dies = begin(config)
    if ends == "committed":
        at(dies, 16, crash)
    else:  # before the step is reported and saved
        dies.publisher.publish = lambda version, *_: crash() if version == 14 else None
    with pytest.raises(Crash):
        train(dies)
    again = begin(config)
    assert again.step == (14 if ends == "committed" else 12)
    assert train(again) == "completed" and equal(state(config, 18), last)
    timed = ("learner/update_s", "learner/tokens_per_s")
    for step, told in again.metrics.items():
        names = told.keys() - {*timed}
        assert {n: told[n] for n in names} == {n: gauges[step][n] for n in names}, step


@pytest.mark.slow
def test_the_start_is_saved_and_good_checkpoints_outlive_the_number_that_is_kept(
    config: Config, begin: Callable[[Config], Run]
) -> None:
    run, there = begin(config), dict[int, list[int]]()
    assert checkpoint.steps(config.run_dir) == [0] and run.saved == 0
    for step in range(2, 19):
        at(run, step, lambda s=step: there.update({s: checkpoint.steps(config.run_dir)}))
    train(run)
    assert there[10] == [0, 4, 8]  # the window begins at 1
    assert there[13] == [0, 4, 12]  # at 3; the newest is kept in any case
    assert there[15] == [0, 14]  # 0 is the best; 14 is as good as 4


def cut(folder: Path) -> None:
    """Take the last bytes of a checkpoint's state."""
    path = folder / "state" / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damaged", "ends", "to"),
    [
        ([4], "completed", [0.0]),
        pytest.param([0, 4], "no good checkpoint", [], marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_without_any_the_run_stops(
    config: Config,
    begin: Callable[[Config], Run],
    caplog: pytest.LogCaptureFixture,
    damaged: list[int],
    ends: str,
    to: list[float],
) -> None:
    run = begin(config)
    at(run, 14, lambda: [cut(checkpoint.folder_of(config.run_dir, step)) for step in damaged])
    assert ends in train(run)
    told = (gauges.get("learner/rolled_back_to") for gauges in run.metrics.values())
    assert [each for each in told if each is not None] == to
    assert "there is no going back to step 4: checkpoint" in caplog.text


def test_the_notes_are_on_the_disk_before_the_checkpoint(
    config: Config, begin: Callable[[Config], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, synced = begin(config), list[tuple[int, bool]]()
    there = lambda: (run.step, run.step in checkpoint.steps(config.run_dir))  # noqa: E731
    monkeypatch.setattr(run.sentinels, "sync", lambda: synced.append(there()))
    at(run, 9, crash)
    with pytest.raises(Crash):
        train(run)
    assert synced == [(4, False), (8, False)]


def test_there_is_no_start_s_checkpoint_where_nothing_goes_back(
    config: Config, begin: Callable[[Config], Run]
) -> None:
    begin(msgspec.structs.replace(config, sentinels=SentinelsConfig()))
    assert checkpoint.steps(config.run_dir) == []
