"""The loop and a run's cadence, with a scripted replay and publisher around a real update."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.runtime.signals import StopRequested
from configs.schema import Config, WeightSyncConfig
from configs.sentinels import SentinelsConfig
from learner.batch import TrainingBatch
from learner.errors import BadBatch
from learner.evaluations import Evaluations
from learner.health.sentinels import Sentinels
from learner.loop import train
from learner.model.ema import Averages
from learner.run import Run
from learner.update import update
from replay.protocol import Batch, EvalResult, Stop

Script = list[tuple[Any, ...]]


def result(step: int) -> EvalResult:
    return EvalResult(step, 1, 1.0, 1.0, {}, {}, 1.0, step, step)


class Replay:
    """Serves batches and notes what it is asked; takes as committed what `folder` holds."""

    wait_for_batch_s = wait_for_oldest_s = 0.5

    def __init__(self, script: Script, batch: Callable[..., Batch], folder: Path):
        self.script, self.batch, self.folder, self.stop_at = script, batch, folder, 99
        self.recorded: int | Stop = 0
        self.results = set[int]()

    def resume(self, step: int) -> int | Stop:
        self.script.append(("resume", step))
        return self.recorded

    def sample(self, step: int) -> Batch | Stop:
        return Stop("no reward left") if step == self.stop_at else self.batch(step + 1, step)

    def evaluate(self, step: int, wait: bool, deadline_s: float) -> EvalResult | None:
        self.script.append(("evaluate", step, wait))
        return result(step) if wait or step in self.results else None

    def report(self, step: int, gauges: dict[str, float]) -> None:
        self.script.append(("report", step))
        self.reported = gauges

    def committed(self, step: int) -> None:
        assert (self.folder / f"step-{step}" / "checkpoint.json").is_file(), "not durable yet"
        self.script.append(("committed", step))


class Publisher:
    """Notes what it is given."""

    def __init__(self, script: Script):
        self.script = script

    def calibrate(self, start_logprobs: Sequence[float]) -> None:
        self.start_logprobs = list(start_logprobs)

    def publish(self, version: int, weights: Any, probe: Any, logprobs: Any) -> None:
        assert len(logprobs) == len(probe) - 1 and dict(weights)
        self.script.append(("publish", version))

    def wait_for_actors(self, deadline_s: float) -> None:
        self.script.append(("joined",))

    def wait_applied(self, version: int, deadline_s: float) -> None:
        self.script.append(("applied", version))

    def check(self) -> None:
        self.script.append(("check",))

    def gauges(self) -> dict[str, float]:
        return {"sync/publish_s": 0.1}


class Written(dict[int, dict[str, float]]):
    """Metrics, in memory."""

    evaluations: tuple[int, ...] = ()
    histograms: tuple[int, ...] = ()
    rollouts_of: tuple[int, ...] = ()

    def write(self, step: int, gauges: dict[str, float]) -> None:
        self[step] = gauges

    def evaluation(self, result: EvalResult) -> None:
        self.evaluations += (result.step,)

    def trained(self, step: int, shares: Sequence[TrainingBatch], gauges: dict[str, float]) -> None:
        self.histograms += (step,)

    def rollouts(self, batch: Batch, tokenizer: Any) -> None:
        self.rollouts_of += (batch.step,)

    def gauges(self) -> dict[str, float]:
        return {"learner/wandb_dropped_count": 0.0}

    def flush(self) -> None: ...


class PlainTrainer:
    """One rank on the plain engine; its checkpoints hold the model alone."""

    def __init__(self, config: Config, engine: Any):
        self.config, self.engine = config, engine
        self.averages = Averages.begin(engine, config.learner)
        self.probe, self.named_weights = engine.probe, engine.named_weights

    def learn(self, shares: tuple[TrainingBatch, ...]) -> dict[str, float]:
        return update(self.engine, self.averages, shares[0], self.config.learner)

    def export(self, folder: Path) -> None:
        self.engine.model.save_pretrained(folder / "model")


@pytest.fixture
def run(config: Config, plain_engine: Any, word_tokenizer: Any, batch: Callable[..., Batch]) -> Run:
    """A run whose actors serve the starting weights."""
    script: Script = []
    return Run(
        config=config,
        trainer=PlainTrainer(config, plain_engine),
        tokenizer=word_tokenizer,
        probe=(3, 4, 5),
        reader=Replay(script, batch, Path(config.run_dir) / "checkpoints"),
        publisher=Publisher(script),
        metrics=Written(),
        evaluations=Evaluations(config.run_dir),
        sentinels=Sentinels(config),
        serving=True,
    )


def resumed(run: Run, step: int, recorded: int) -> Run:
    """The run as a learner takes it up after `step`, with batches recorded since."""
    run.step = run.saved = step
    run.serving, run.reader.recorded = False, recorded
    run.resume()
    return run


def changed(run: Run, sync: WeightSyncConfig | None = None, **learner: object) -> Run:
    run.config = msgspec.structs.replace(
        run.config,
        learner=msgspec.structs.replace(run.config.learner, **learner),
        weight_sync=sync or run.config.weight_sync,
    )
    return run


def test_the_whole_order_of_a_run(run: Run) -> None:
    assert train(changed(run, eval_every=2)) == "completed"
    assert run.reader.script == [
        ("evaluate", 0, True),
        ("publish", 1),
        ("report", 1),
        ("publish", 2),
        ("report", 2),
        ("committed", 2),
        ("evaluate", 2, False),
        ("publish", 3),
        ("report", 3),
        ("committed", 3),
        ("applied", 3),
        ("evaluate", 2, True),  # no batch has brought its result
        ("evaluate", 3, True),
    ]
    assert run.metrics.evaluations == (0, 2, 3)
    saved = Path(run.config.run_dir) / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["best", "step-2", "step-3"]


def test_a_version_may_be_skipped_but_never_the_last(run: Run) -> None:
    train(changed(run, WeightSyncConfig(publish_every=2)))
    assert [entry for entry in run.reader.script if entry[0] in ("publish", "check")] == [
        ("check",),
        ("publish", 2),
        ("publish", 3),
    ]


def test_an_evaluation_that_came_with_a_batch_is_written_once(run: Run) -> None:
    plain = run.reader.batch
    run.reader.batch = lambda step, version: msgspec.structs.replace(
        plain(step, version), evaluations=(result(1),) if step == 3 else ()
    )
    train(changed(run, eval_every=1))
    assert run.metrics.evaluations == (0, 1, 2, 3)
    assert run.evaluations.unfinished == []


def test_each_step_has_histograms_and_each_evaluated_one_rollouts(run: Run) -> None:
    train(changed(run, eval_every=2))
    assert run.metrics.histograms == (1, 2, 3) and run.metrics.rollouts_of == (2,)


def test_every_number_reaches_replay_and_tensorboard(run: Run) -> None:
    train(changed(run, total_steps=1))
    names = {
        *("learner/loss", "learner/behaviour_ratio_mean", "learner/ess", "learner/clip_fraction"),
        *("learner/entropy", "learner/grad_norm", "learner/wait_for_batch_s", "replay/staleness"),
        *("learner/wait_for_oldest_s", "replay/staleness_max", "sync/publish_s", "learner/fill"),
    }
    assert names <= run.metrics[1].keys()
    assert run.metrics[1] == run.reader.reported


def test_stop_ends_training_with_its_cause(run: Run) -> None:
    run.reader.stop_at = 1
    assert train(run) == "no reward left"
    assert run.step == 1 and run.saved == 0
    run.save()
    assert run.saved == 1


def test_a_sentinel_ends_training_with_what_it_says_once_its_step_is_reported(run: Run) -> None:
    sentinels = SentinelsConfig(no_signal="stop")
    run.sentinels = Sentinels(msgspec.structs.replace(run.config, sentinels=sentinels))
    plain = run.reader.batch
    run.reader.batch = lambda step, version: msgspec.structs.replace(
        plain(step, version), gauges={"replay/no_signal_fraction": 1.0}
    )
    said = train(changed(run, total_steps=99, lr=0.0))
    assert said.startswith("sentinel no_signal at step 10: ") and run.step == 10
    assert run.reader.reported["learner/sentinel_no_signal"] == 1.0
    counts = [run.metrics[step]["learner/sentinels_fired"] for step in (9, 10)]
    assert counts[0] == 0.0 < counts[1]
    assert ("committed", 10) in run.reader.script


def test_a_sentinel_that_stops_at_the_last_step_leaves_the_run_completed(run: Run) -> None:
    sentinels = SentinelsConfig(no_signal="stop")
    run.sentinels = Sentinels(msgspec.structs.replace(run.config, sentinels=sentinels))
    plain = run.reader.batch
    run.reader.batch = lambda step, version: msgspec.structs.replace(
        plain(step, version), gauges={"replay/no_signal_fraction": 1.0}
    )
    assert train(changed(run, total_steps=10, lr=0.0)) == "completed"
    assert run.reader.reported["learner/sentinel_no_signal"] == 1.0
    assert run.reader.script[-1] == ("evaluate", 10, True)


def test_no_steps_is_an_evaluation_of_the_start(run: Run) -> None:
    assert train(changed(run, total_steps=0)) == "completed"
    assert run.reader.script == [("evaluate", 0, True), ("applied", 0)]


def test_the_first_start_leases_nothing_before_the_weights_are_verified(run: Run) -> None:
    run.serving = False
    run.start()
    assert run.reader.script == [("joined",), ("publish", 0), ("applied", 0), ("resume", 0)]


def test_recorded_batches_are_trained_again_before_anything_is_published(run: Run) -> None:
    resumed(changed(run, total_steps=5, checkpoint_every=2), step=1, recorded=2)
    assert train(run) == "completed"
    assert run.reader.script[:12] == [
        ("resume", 1),
        ("check",),
        ("report", 2),
        ("committed", 2),
        ("check",),
        ("report", 3),
        ("joined",),
        ("publish", 3),
        ("applied", 3),
        ("publish", 4),
        ("report", 4),
        ("committed", 4),
    ]


def test_a_stop_while_actors_join_again_keeps_the_step_s_numbers(run: Run) -> None:
    resumed(changed(run, total_steps=5), step=1, recorded=2)

    def stopped(_: float) -> None:
        raise StopRequested("SIGINT")

    run.publisher.wait_for_actors = stopped
    with pytest.raises(StopRequested, match="SIGINT"):
        train(run)
    assert run.step == 3 and run.reader.script[-1] == ("report", 3)


def test_without_recorded_batches_a_resumed_run_publishes_at_once(run: Run) -> None:
    resumed(changed(run, total_steps=5), step=3, recorded=0)
    assert run.reader.script == [("resume", 3), ("joined",), ("publish", 3), ("applied", 3)]


def test_a_resumed_run_calibrates_the_probe_by_its_start(run: Run) -> None:
    run.trainer.probe = lambda tokens: [-1.5, -2.0]
    run.start()
    assert run.publisher.start_logprobs == [-1.5, -2.0]
    run.trainer.probe = lambda tokens: [-9.0, -9.0]  # other weights, as training makes them
    resumed(run, step=2, recorded=0)
    assert run.publisher.start_logprobs == [-1.5, -2.0]


@pytest.mark.parametrize("begin", [Run.start, Run.resume])
def test_a_run_that_was_stopped_meanwhile_is_not_begun(
    run: Run, begin: Callable[[Run], None]
) -> None:
    run.reader.recorded = Stop("no reward left")
    with pytest.raises(StopRequested, match="no reward left"):
        begin(run)
    assert run.reader.script[-1] == ("resume", 0)


def test_a_checkpoint_waits_for_its_evaluation(run: Run) -> None:
    changed(run, total_steps=4, checkpoint_every=1, eval_every=2, keep_checkpoints=1)
    train(run)
    folder = run.reader.folder
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step-2", "step-4"]
    assert (folder / "best").resolve().name == "step-2"


def test_numbers_are_flushed_before_the_checkpoint_that_stands_for_them(run: Run) -> None:
    there: list[bool] = []
    run.metrics.flush = lambda: there.append((run.reader.folder / "step-1").exists())
    run.step = 1
    run.save()
    assert there == [False] and (run.reader.folder / "step-1").exists()


def test_a_resumed_run_asks_only_for_evaluations_without_result(run: Run) -> None:
    for step in (0, 1, 2):
        run.evaluations.ask(step)
    run.evaluations.record(result(0))
    run.evaluations = Evaluations(run.config.run_dir, resumed_after=2)
    run.reader.results = {1}
    train(resumed(changed(run, total_steps=3, eval_every=1), step=2, recorded=0))
    asked = [entry[1:] for entry in run.reader.script if entry[0] == "evaluate"]
    assert asked == [(1, False), (2, False), (2, True), (3, True)]
    assert run.metrics.evaluations == (1, 2, 3)


def test_what_was_evaluated_after_the_checkpoint_is_written_again(run: Run) -> None:
    run.evaluations.ask(2)
    run.evaluations.record(result(2))
    run.evaluations = Evaluations(run.config.run_dir, resumed_after=1)
    run.reader.results = {2}
    train(resumed(changed(run, total_steps=3, eval_every=2), step=1, recorded=1))
    assert run.metrics.evaluations == (2, 3)


def test_a_signal_ends_it_before_the_next_wait(run: Run) -> None:
    run.stop("SIGTERM")
    with pytest.raises(StopRequested, match="SIGTERM"):
        train(run)
    assert run.step == 0


def test_a_batch_of_another_step_is_refused(run: Run, batch: Callable[..., Batch]) -> None:
    with pytest.raises(BadBatch, match="batch of step 4 after step 0"):
        run.learn(batch(4))


def test_the_loop_stays_short() -> None:
    assert len(Path(train.__code__.co_filename).read_text().splitlines()) <= 60
