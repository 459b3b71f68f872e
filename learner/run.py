"""One run: its collaborators, and what the loop asks of them, each at its cadence."""

import logging
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from transformers import PreTrainedTokenizerBase

from configs.runtime.files import MOST_IDS, weights_bytes, write_json
from configs.runtime.signals import StopRequested, StopSwitch
from configs.runtime.watchdog import phase
from configs.schema import Config
from learner import checkpoint
from learner.batch import REMEDY, build_shares
from learner.errors import BadBatch, BadCheckpoint, BadModel
from learner.evaluations import Evaluations
from learner.health.rules import rolled_back
from learner.health.sentinels import Sentinels
from learner.metrics.metrics import Metrics, aggregate
from replay.clients.learner import BatchReader
from replay.protocol import Batch, EvalResult, Stop
from weight_sync.buckets import InTurn
from weight_sync.publisher import Publisher

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.trainer import Trainer

log = logging.getLogger(__name__)
# One version may be under way when the awaited one is published; each has seven phases with the
# deadline (connecting, readers of relays, forming, receiving, applying by way of a relay, checksum)
# and may be sent anew.
PHASES_TO_APPLY = 21
START_PROBE = "start_probe.json"  # in the run's directory: a restarted learner calibrates by it


@dataclass
class Run:
    """The state of one run. `step` counts completed steps: the version of the trainer's weights.

    Up to `again_until` the batches are recorded ones, trained again; nothing is published before.
    `saved` is the newest step with a durable checkpoint; the starting weights are one.
    """

    config: Config
    trainer: "Trainer"
    tokenizer: PreTrainedTokenizerBase
    probe: tuple[int, ...]
    reader: BatchReader
    publisher: Publisher
    metrics: Metrics
    evaluations: Evaluations
    sentinels: Sentinels
    incarnation: int = 1
    stop: StopSwitch = field(default_factory=StopSwitch)
    step: int = 0
    saved: int = 0
    again_until: int = 0
    vocabulary: int = MOST_IDS  # ids that the model embeds
    serving: bool = False  # every actor has, or had, verified weights of this learner

    def start(self) -> None:
        """Begin a run: every actor serves the starting weights before replay leases.

        Raises StopRequested, like `resume`, when replay has been told to stop meanwhile.
        """
        start = self.trainer.probe(self.probe)
        write_json(Path(self.config.run_dir) / START_PROBE, start)
        self.publisher.calibrate(start)
        self._serve()
        self._resume_replay()
        self._save_start()

    def resume(self) -> None:
        """Go on with a run: replay serves again what it has recorded since this step."""
        self.publisher.calibrate(_start_probe(self.config.run_dir, len(self.probe)))
        recorded = self._resume_replay()
        self.again_until = self.step + recorded
        log.info("resumed after step %d; %d batches are trained again", self.step, recorded)
        if not recorded:
            self._serve()
        self._save_start()

    def sample(self) -> Batch | Stop:
        """Wait for the next step's batch."""
        with self.stop.interruptible():
            return self.reader.sample(self.step)

    def learn(self, batch: Batch) -> dict[str, float]:
        """Take the step of this batch; return its gauges."""
        if batch.step != self.step + 1:
            raise BadBatch(f"batch of step {batch.step} after step {self.step}: {REMEDY}")
        begun = time.perf_counter()
        with phase(f"update of step {batch.step}", self.config.learner.step_deadline_s):
            turn_weight = self.config.rewards.weights.environment
            shares = build_shares(batch, self.config.learner, self.vocabulary, turn_weight)
            gauges = self.trainer.learn(shares)
        self.step = batch.step
        seconds = time.perf_counter() - begun
        rate = gauges["learner/tokens"] / seconds
        self.metrics.trained(self.step, shares, gauges)
        return gauges | {"learner/update_s": seconds, "learner/tokens_per_s": rate}

    def judge(self, batch: Batch, gauges: dict[str, float]) -> tuple[dict[str, float], str]:
        """Hold the step against the sentinels, and go back where one says so; return its gauges
        with theirs, and why the run is to stop: empty where it goes on.
        """
        known = {**aggregate(batch.fleet), **batch.gauges, **gauges}
        saved = checkpoint.steps(self.config.run_dir)
        verdict = self.sentinels.judge(self.step, known, saved, self._is_whole)
        if made := verdict.rollback:
            with checkpoint.saving(self.config, f"going back to the checkpoint of step {made.to}"):
                self.trainer.restore(checkpoint.folder_of(self.config.run_dir, made.to))
                self.trainer.scale_rates(made.scale)
            log.warning("%s", rolled_back(self.step, verdict.told))
        return gauges | verdict.told, verdict.stop

    def _is_whole(self, step: int) -> bool:
        """True where a rollback can take up this step's checkpoint; else say why it cannot."""
        try:
            checkpoint.check_whole(checkpoint.folder_of(self.config.run_dir, step), self.config)
        except BadCheckpoint as error:
            log.warning("there is no going back to step %d: %s", step, error)
            return False
        return True

    @property
    def rolled_back(self) -> bool:
        """True where this version's weights are those of an older checkpoint."""
        made = self.sentinels.rollbacks
        return bool(made) and made[-1].step == self.step

    def publish(self) -> None:
        """Publish this version if due (`publish_every`, first, last, rolled back), unless training
        it again.
        """
        due = self.step % self.config.weight_sync.publish_every == 0 or self.rolled_back
        if self.serving and (due or self.step == self.config.learner.total_steps):
            self._publish()
        else:
            self.publisher.check()

    def serve_again(self) -> None:
        """Once the recorded batches are trained again, have all actors verify the weights."""
        if not self.serving and self.step >= self.again_until:
            self._serve()

    def wait_applied(self) -> None:
        """Wait until every actor serves this version, verified."""
        with self.stop.interruptible():
            # Engines are still starting when the first version goes out; they may hold fp32.
            size = 2 * weights_bytes(self.config.model.path)
            phase_s = self.config.weight_sync.deadline_s(size, first=not self.serving)
            self.publisher.wait_applied(self.step, PHASES_TO_APPLY * phase_s)

    def checkpoint(self) -> None:
        """Save and commit this version if due: every `checkpoint_every` steps, the last, and what
        was rolled back, so that a restart goes on from it.
        """
        learner = self.config.learner
        due = self.step % learner.checkpoint_every == 0 or self.rolled_back
        if due or self.step == learner.total_steps:
            self.save()
            self.reader.committed(self.step)

    def save(self) -> None:
        """Write a durable checkpoint of this version, unless there is one."""
        if self.saved != self.step:
            self._save()
            self._retain()

    def log(self, batch: Batch, gauges: dict[str, float]) -> None:
        """Report the step: to replay (console, event log), to TensorBoard, and in one line."""
        gauges = {
            **aggregate(batch.fleet),
            **batch.gauges,
            **self.publisher.gauges(),
            "learner/wait_for_batch_s": self.reader.wait_for_batch_s,
            "learner/wait_for_oldest_s": self.reader.wait_for_oldest_s,
            **self.metrics.gauges(),
            **gauges,
        }
        self.reader.report(self.step, gauges)
        self.metrics.write(self.step, gauges)
        if self.step % self.config.learner.eval_every == 0:
            self.metrics.rollouts(batch, self.tokenizer)
        for result in batch.evaluations:
            self._evaluated(result)
        log.info(
            "step %d: loss %.4f, reward %.3f, gradient %.3f, staleness %.2f, ess %.3f, %.2f s",
            self.step,
            gauges["learner/loss"],
            gauges["learner/reward"],
            gauges["learner/grad_norm"],
            gauges["replay/staleness"],
            gauges.get("learner/ess", float("nan")),
            gauges["learner/update_s"],
        )

    def evaluate_due(self) -> None:
        """Ask for the evaluations that a resumed run lacks: those without result, and this step's.

        Step 0's is waited for; nothing is trained meanwhile.
        """
        if self.step % self.config.learner.eval_every == 0:
            self.evaluations.ask(self.step)
        for step in self.evaluations.unfinished:
            self._ask(step, wait=self.step == self.again_until == 0)

    def evaluate(self, wait: bool) -> bool:
        """Ask for this version's evaluation; return whether its result is in (never after Stop).

        A wait also collects the earlier evaluations whose results no batch has brought.
        """
        for step in [*self.evaluations.unfinished, self.step] if wait else [self.step]:
            if not self.evaluations.finished(step):
                self._ask(step, wait)
        return self.evaluations.finished(self.step)

    def _ask(self, step: int, wait: bool) -> None:
        self.evaluations.ask(step)
        with self.stop.interruptible():
            result = self.reader.evaluate(step, wait, self.config.learner.eval_deadline_s)
        if result is not None:
            self._evaluated(result)

    def _evaluated(self, result: EvalResult) -> None:
        if self.evaluations.finished(result.step):
            return
        self.metrics.evaluation(result)
        self.evaluations.record(result)
        self._retain()
        log.info(
            "evaluation at step %d: exact match %.3f greedy%s, over %d questions",
            result.step,
            result.em,
            "" if result.sampled_em is None else f", {result.sampled_em:.3f} sampled",
            result.questions,
        )

    def _retain(self) -> None:
        saved = checkpoint.steps(self.config.run_dir)
        checkpoint.retain(
            self.config.run_dir,
            self.config.learner.keep_checkpoints,
            self.evaluations.best,
            {*self.evaluations.unfinished, *self.sentinels.needed(self.step, saved)},
        )

    def _save_start(self) -> None:
        """Save the weights that a run begins with where a rollback may ask for them: while actors
        serve them.
        """
        begins = self.step == 0 < self.config.learner.total_steps
        if begins and self.sentinels.rolls_back and 0 not in checkpoint.steps(self.config.run_dir):
            self._save()

    def _save(self) -> None:
        with checkpoint.saving(self.config, f"checkpoint of step {self.step}"):
            self.metrics.flush()  # the steps up to this checkpoint are not written again
            self.sentinels.sync()
            checkpoint.save(
                self.config,
                self.step,
                self.trainer,
                self.tokenizer,
                self.incarnation,
                self.sentinels.rollbacks,
            )
        self.saved = self.step

    def _resume_replay(self) -> int:
        reply = self.reader.resume(self.step)
        if isinstance(reply, Stop):
            raise StopRequested(reply.cause)
        return reply

    def _serve(self) -> None:
        """Wait for every actor, publish this version and wait until all have verified it."""
        with self.stop.interruptible():
            self.publisher.wait_for_actors(self.config.weight_sync.join_deadline_s)
        self._publish()
        self.wait_applied()
        self.serving = True

    def _publish(self) -> None:
        with phase(f"publishing version {self.step}", self.config.learner.step_deadline_s):
            logprobs = self.trainer.probe(self.probe)
            weights = self.trainer.named_weights
            # At stage 3 each weight is whole, and with an adapter merged, only in its turn.
            learner = self.config.learner
            in_turn = learner.zero_stage == 3 or learner.lora.rank
            named = InTurn(weights) if in_turn else weights()
            self.publisher.publish(self.step, named, self.probe, logprobs)


def _start_probe(run_dir: str, tokens: int) -> list[float]:
    """The learner's log-probs of the probe under `model.path`, as the run's start wrote them; empty
    where it had not come so far, or with another `probe_tokens`.
    """
    try:
        found = msgspec.json.decode((Path(run_dir) / START_PROBE).read_bytes(), type=list[float])
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("the probe is not calibrated: %s", error)
        return []
    return found if len(found) == tokens - 1 else []


def draw_probe(tokenizer: PreTrainedTokenizerBase, seed: int, count: int) -> tuple[int, ...]:
    """The tokens whose log-probs, under every version, check the weights where they serve.

    `count` ids, drawn by the run's seed from the non-special vocabulary, with replacement. Raises
    BadModel when the vocabulary has nothing but special tokens.
    """
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    if not vocabulary:
        raise BadModel(f"tokenizer {tokenizer.name_or_path!r} has no token that is not special")
    return tuple(random.Random(f"probe {seed}").choices(vocabulary, k=count))
