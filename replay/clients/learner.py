"""The learner's connection to replay: `BatchReader`, blocking.

It outlives a replay that is killed and started again on its log: it asks again. Every wait has a
name and ends with ReplayTimeout when replay is silent for `restart_deadline_s`, or only says Wait
until the learner's own deadline.
"""

import time
import uuid
from collections.abc import Mapping

import msgspec

import replay.protocol as wire
from configs.keys import Keys
from replay.clients.base import RESTART_DEADLINE_S, Caller
from replay.parts import joined

EVALUATION_POLL_S = 0.05


class BatchReader(Caller):
    """The learner's connection; blocking. `deadline_s` bounds `sample` as a whole, and `resume`.

    `wait_for_batch_s` and `wait_for_oldest_s`: how long the last `sample` waited for
    trajectories, and for an older unfinished group although a batch was ready otherwise.
    """

    def __init__(
        self,
        endpoint: str,
        incarnation: int,
        deadline_s: float,
        reply_deadline_s: float = 10.0,
        keys: Keys | None = None,
        restart_deadline_s: float = RESTART_DEADLINE_S,
    ) -> None:
        super().__init__(endpoint, reply_deadline_s, keys, restart_deadline_s)
        self._incarnation, self._deadline_s = incarnation, deadline_s
        self._instance = uuid.uuid4().hex
        self.wait_for_batch_s = self.wait_for_oldest_s = 0.0

    def resume(self, step: int) -> int | wire.Stop:
        """Say which step is completed; return how many recorded batches come again."""
        what = f"resuming after step {step}"  # replay may fold a long log before it answers
        request = wire.Resume(self._incarnation, step, self._instance)
        raw, _ = self._wait(request, what, self._deadline_s, silence_s=self._deadline_s)
        reply = self._checked(raw, wire.Resumed, what)
        return reply if isinstance(reply, wire.Stop) else reply.recorded_batches

    def sample(self, step: int) -> wire.Batch | wire.Stop:
        """At learner step `step`, wait for the batch that trains step + 1."""
        what = f"the batch of step {step + 1}"
        request = wire.Sample(self._incarnation, step)
        reply, waited_s = self._wait(request, what, self._deadline_s)
        self.wait_for_batch_s, self.wait_for_oldest_s = waited_s[False], waited_s[True]
        batch = self._checked(reply, wire.Batch, what)
        if isinstance(batch, wire.Stop) or not batch.parts:
            return batch
        return self._whole(batch, self._deadline_s - self._spent_s)

    def _whole(self, batch: wire.Batch, left_s: float) -> wire.Batch | wire.Stop:
        """Within what is left of the deadline, ask for the parts of a batch that did not fit one
        message.
        """
        payloads: list[bytes] = []
        for part in range(batch.parts):
            request = wire.SamplePart(self._incarnation, batch.step, part)
            what = f"part {part + 1} of {batch.parts} of the batch of step {batch.step}"
            if left_s <= 0.0:
                raise self._timeout(what, self._deadline_s - left_s, "the parts come slowly")
            reply, _ = self._wait(request, what, left_s)
            left_s -= self._spent_s
            found = self._checked(reply, wire.BatchPart, what)
            if isinstance(found, wire.Stop):
                return found
            payloads += found.payloads
        groups = joined(payloads, batch.sizes)
        return msgspec.structs.replace(batch, groups=groups, parts=0, sizes=())

    def evaluate(
        self, step: int, wait: bool, deadline_s: float | None = None
    ) -> wire.EvalResult | None:
        """Ask for the evaluation at `step`; return its result, or None when unfinished or stopped.

        With `wait`, None means stopped; `deadline_s` (default: the reader's) bounds the whole wait.
        """
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        end_s = time.monotonic() + limit_s
        what = f"the evaluation at step {step}"
        while True:
            request = wire.Evaluate(self._incarnation, step)
            raw, _ = self._wait(request, what, max(0.0, end_s - time.monotonic()))
            reply = self._checked(raw, wire.EvalProgress, what)
            if isinstance(reply, wire.Stop):
                return None
            if reply.result is not None or not wait:
                return reply.result
            progress = f"{reply.done} of {reply.total} rollouts are done"
            if time.monotonic() >= end_s:
                raise self._timeout(what, limit_s, progress)
            self._log(what, progress)
            time.sleep(EVALUATION_POLL_S)

    def report(self, step: int, gauges: Mapping[str, float]) -> None:
        """Hand over the learner's numbers after `step`."""
        request = wire.Report(self._incarnation, step, dict(gauges))
        self._call(request, wire.Done, f"the report of step {step}")

    def committed(self, step: int) -> None:
        """Say that a checkpoint of `step` is durable."""
        request = wire.Committed(self._incarnation, step)
        self._call(request, wire.Done, f"the commitment of step {step}")

    def finish(self, cause: str = "completed") -> None:
        """End the run."""
        self._call(wire.Finish(self._incarnation, cause), wire.Done, "the end of the run")
