"""One run's collaborators, and what the loop does with them at their cadence.

Consumes configuration and live collaborators; produces versions, checkpoints, reports and
TensorBoard numbers.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from learner import checkpoint
from learner.batch import build
from learner.ema import Ema
from learner.errors import BadBatch
from learner.metrics import Metrics, aggregate
from learner.stopping import StopSwitch
from learner.update import update
from learner.watchdog import phase
from replay.client import BatchReader
from replay.protocol import Batch, EvalResult, Stop
from weight_sync.publisher import Publisher

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.engine import Engine

log = logging.getLogger(__name__)

# One version may be under way when the awaited one is published, and each has three phases with the
# deadline.
PHASES_TO_APPLY = 6


@dataclass
class Run:
    """`step` is how many steps are completed, and so the version of the engine's weights."""

    config: Config
    engine: "Engine"
    ema: Ema
    tokenizer: PreTrainedTokenizerBase
    probe: tuple[int, ...]
    reader: BatchReader
    publisher: Publisher
    metrics: Metrics
    stop: StopSwitch = field(default_factory=StopSwitch)
    step: int = 0
    unfinished: set[int] = field(default_factory=set)  # evaluations asked for, without result
    saved: int = 0  # the newest step with a durable checkpoint; the starting weights are one

    def sample(self) -> Batch | Stop:
        """Wait for the next step's batch."""
        with self.stop.interruptible():
            return self.reader.sample(self.step)

    def learn(self, batch: Batch) -> dict[str, float]:
        """Take the step that this batch is for; return its gauges."""
        if batch.step != self.step + 1:
            raise BadBatch(f"batch of step {batch.step} after step {self.step}")
        begun = time.perf_counter()
        with phase(f"update of step {batch.step}", self.config.learner.step_deadline_s):
            training = build(batch, self.config.learner)
            gauges = update(self.engine, self.ema, training, self.config.learner)
        self.step = batch.step
        seconds = time.perf_counter() - begun
        rate = gauges["learner/tokens"] / seconds
        return gauges | {"learner/update_s": seconds, "learner/tokens_per_s": rate}

    def publish(self) -> None:
        """Publish this version if due: every `publish_every` steps, the first and the last."""
        due = self.step % self.config.weight_sync.publish_every == 0
        if due or self.step == self.config.learner.total_steps:
            logprobs = self.engine.probe(self.probe)
            self.publisher.publish(self.step, self.engine.named_weights(), self.probe, logprobs)
        else:
            self.publisher.check()

    def wait_applied(self) -> None:
        """Wait until every actor serves this version, verified."""
        with self.stop.interruptible():
            sync = self.config.weight_sync
            # Engines are still starting when the first version goes out.
            phase_s = sync.publish_deadline_s if self.step else sync.join_deadline_s
            deadline_s = PHASES_TO_APPLY * phase_s
            self.publisher.wait_applied(self.step, deadline_s)

    def checkpoint(self) -> None:
        """Save and commit this version if due: every `checkpoint_every` steps, and the last."""
        learner = self.config.learner
        if self.step % learner.checkpoint_every == 0 or self.step == learner.total_steps:
            self.save()
            self.reader.committed(self.step)

    def save(self) -> None:
        """Write a durable checkpoint of this version, unless there is one."""
        if self.saved == self.step:
            return
        learner = self.config.learner
        with phase(f"checkpoint of step {self.step}", learner.step_deadline_s):
            checkpoint.save(
                self.config.run_dir,
                self.step,
                self.engine,
                self.ema,
                self.tokenizer,
                learner.keep_checkpoints,
            )
        self.saved = self.step

    def log(self, batch: Batch, gauges: dict[str, float]) -> None:
        """Report the step: to replay (console, event log), to TensorBoard, and in one line."""
        gauges = {
            **aggregate(batch.fleet),
            **batch.gauges,
            **self.publisher.gauges(),
            "learner/wait_for_batch_s": self.reader.wait_for_batch_s,
            "learner/wait_for_oldest_s": self.reader.wait_for_oldest_s,
            **gauges,
        }
        self.reader.report(self.step, gauges)
        self.metrics.write(self.step, gauges)
        for result in batch.evaluations:
            if result.step in self.unfinished:
                self._evaluated(result)
        log.info(
            "step %d: loss %.4f, reward %.3f, gradient %.3f, staleness %.2f, ess %.3f, %.2f s",
            *(self.step, gauges["learner/loss"], gauges["learner/reward"]),
            *(gauges["learner/grad_norm"], gauges["replay/staleness"]),
            *(gauges.get("learner/ess", float("nan")), gauges["learner/update_s"]),
        )

    def evaluate(self, wait: bool) -> EvalResult | None:
        """Ask for this version's evaluation; with `wait`, return its result, or None after Stop.

        A wait also collects the earlier evaluations whose results no batch has brought.
        """
        steps = [*sorted(self.unfinished), self.step] if wait else [self.step]
        self.unfinished.add(self.step)
        result = None
        for step in steps:
            with self.stop.interruptible():
                result = self.reader.evaluate(step, wait, self.config.learner.eval_deadline_s)
            if result is not None:
                self._evaluated(result)
        return result

    def _evaluated(self, result: EvalResult) -> None:
        self.unfinished.discard(result.step)
        self.metrics.evaluation(result)
        log.info(
            "evaluation at step %d: exact match %.3f greedy, %.3f sampled, over %d questions",
            *(result.step, result.em, result.sampled_em, result.questions),
        )
