"""Books of a run's event log: of every payload, lease, group, batch and evaluation, with the faults
where they do not add up.

They believe nothing but bytes: what a record claims of a rollout is reckoned again from its tokens,
and the reader (`scripts/runs/record`) shares no code with replay, which wrote it. What stands is
held; what is settled is a number. So memory does not grow with the payloads.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

import msgspec
import yaml

from configs.runtime import strict_yaml
from configs.schema import Config
from scripts.runs import delivery_book
from scripts.runs.delivery_book import Expected
from scripts.runs.evaluation_book import differences
from scripts.runs.group_book import Group, Groups
from scripts.runs.record import facts
from scripts.runs.record.facts import Record
from scripts.runs.record.frames import Gap, LogReader, UnreadableLog
from scripts.runs.step_book import StepBook

MOST_KEPT = 1000  # faults in words; all are counted
_TOKEN_AUDIT = "TokenMismatch"  # the first word of what actors give back as no rollout of theirs


class Audit:
    """Takes the records in order; `faults` names each thing that does not add up."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.fault_count = 0
        self.leases: Counter[str] = Counter()  # by how they ended
        self.deliveries: Counter[str] = Counter()
        self.payloads: Counter[str] = Counter()
        self._rollouts = self._sequences = self._whole = 0
        self.dropped: dict[facts.Kind, Counter[str]] = {"train": Counter(), "eval": Counter()}
        self.torn, self.token_mismatches = "", 0
        self.stop_cause, self.replay_restarts, self.records = "", 0, 0
        self.groups = Groups()
        self.steps = StepBook(self.groups)
        self._config, self._seed = Config(), 0
        self._number = -1
        self._held: set[tuple[str, int, int]] = set()
        self._evaluating: set[int] = set()

    def fold(self, path: Path) -> None:
        """Take a whole log; damage is a fault, after which the rest is read. Raises
        UnreadableLog.
        """
        for _ in self.folding(LogReader(path)):
            pass

    def folding(self, reader: LogReader) -> Iterator[int]:
        """Take a whole log, and yield how many bytes of it are read after each record."""
        for piece in reader:
            if isinstance(piece, Gap):
                self._gap(piece)
                continue
            try:
                record = facts.record_of(piece.payload)
            except ValueError as error:
                self._number = piece.number
                self._fault(f"it cannot be decoded: {error}")
                continue
            self.take(record, piece.number)
            yield reader.bytes_read
        self.close()

    @property
    def committed(self) -> int:
        """The last step whose training is durable."""
        return self.steps.committed

    @property
    def staleness_max(self) -> int | None:
        """The staleness of the oldest group that was trained; None: none was."""
        return self.steps.staleness_max

    def take(self, record: Record, number: int | None = None) -> None:
        """Take in one record; without a number, the next one."""
        self._number = self._number + 1 if number is None else number
        if not self.records and not isinstance(record, facts.RunStarted):
            self._fault("the log does not begin with RunStarted")
        self.records += 1
        self._take(record)

    def _gap(self, gap: Gap) -> None:
        if gap.torn:
            self.torn = str(gap)
        else:
            self._name(str(gap))

    def _fault(self, text: str) -> None:
        self._name(f"record {self._number}: {text}")

    def _all(self, wrong: Iterable[str]) -> None:
        for text in wrong:
            self._fault(text)

    def _name(self, fault: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MOST_KEPT:
            self.faults.append(fault)

    @singledispatchmethod
    def _take(self, fact: Record) -> None:
        """Take in one record; most say nothing about leases, rollouts or batches."""

    @_take.register
    def _(self, fact: facts.RunStarted) -> None:
        self._config, self._seed = _configuration(fact.config), fact.seed

    @_take.register
    def _(self, fact: facts.RunResumed) -> None:
        self._config = _configuration(fact.config)
        self.stop_cause = ""
        self.leases["ended with their processes"] += len(self._held)
        self._held.clear()

    @_take.register
    def _(self, fact: facts.ReplayRestarted) -> None:
        self.replay_restarts += 1  # nothing ends by it: incarnation, leases and batches stand

    @_take.register
    def _(self, fact: facts.GroupOpened) -> None:
        if self.stop_cause:
            self._fault(f"group {fact.group_id} was opened after the run had stopped")
        if fact.kind == "train":
            self._all(self.steps.opened(fact, self._config.replay))
        elif fact.evaluation not in self._evaluating:
            self._fault(
                f"group {fact.group_id} is of the evaluation of step {fact.evaluation}, which is "
                "not under way"
            )
        asked = len(self._config.learner.eval_temperatures)
        size = self._config.replay.group_size if fact.kind == "train" else asked
        self._all(self.groups.open(fact, size))

    @_take.register
    def _(self, fact: facts.Leased) -> None:
        if len(fact.siblings) != len(fact.attempts):
            self._fault(f"{len(fact.siblings)} siblings were leased, {len(fact.attempts)} attempts")
        group = self.groups.live.get(fact.group_id)
        for sibling, attempt in zip(fact.siblings, fact.attempts, strict=False):
            self._lease(fact.actor_id, fact.group_id, sibling)
            if group is not None and (wrong := group.lease(fact.actor_id, sibling, attempt)):
                self._fault(f"sibling {sibling} of group {fact.group_id}: {wrong}")

    @_take.register
    def _(self, fact: facts.Adopted) -> None:
        self._lease(fact.actor_id, fact.group_id, fact.sibling)

    @_take.register
    def _(self, fact: facts.LeaseReturned) -> None:
        self.token_mismatches += fact.cause.startswith(_TOKEN_AUDIT)
        if group := self.groups.live.get(fact.group_id):
            group.returned[fact.sibling] += 1
        if not self._end(fact, "returned"):
            self._fault(f"{_name(fact)} was returned by {fact.actor_id}, who had no lease")

    @_take.register
    def _(self, fact: facts.Delivered) -> None:
        place, group = self._delivered(fact, "accepted"), self.groups.live.get(fact.group_id)
        if group is not None and fact.sibling in group.rollouts:
            self._fault(f"{_name(fact)} was taken twice")
        if place:
            self._fault(f"{_name(fact)} was taken although its group is {place}")
        if group is not None and not 0 <= fact.sibling < group.size:
            self._fault(f"{_name(fact)} does not exist: its group has {group.size}")
        checked = delivery_book.check(fact, group, self._expected(group, fact.sibling))
        self.payloads["compacted away" if fact.compacted else "decoded"] += 1
        self._all(f"{_name(fact)}: {wrong}" for wrong in checked.faults)
        self._rollouts += 1
        self._sequences += checked.summary.sequences
        self._whole += checked.summary.sequences == 1
        if group is not None:
            group.rollouts[fact.sibling] = checked.summary
            if checked.reference is not None and group.reference is None:
                group.reference = checked.reference
            if fact.compacted:
                group.compacted.add(fact.sibling)

    @_take.register
    def _(self, fact: facts.Superseded) -> None:
        place = self._delivered(fact, fact.status)
        group = self.groups.live.get(fact.group_id)
        due = "dropped" if self.groups.is_dropped(fact.group_id) else "superseded"
        if place is not None and fact.status != due:
            self._fault(f"{_name(fact)} was {fact.status}, but it is {due}")
        elif group is not None and not place and fact.sibling not in group.rollouts:
            self._fault(f"{_name(fact)} was superseded, but nobody had delivered it")

    @_take.register
    def _(self, fact: facts.GroupDropped) -> None:
        place = self.groups.place(fact.group_id)
        if place is None:
            self._fault(f"group {fact.group_id} was dropped, but it never opened")
        if place:
            self._fault(f"group {fact.group_id} was dropped although it is {place}")
        group = self.groups.drop(fact.group_id, fact.cause)
        self.dropped[group.kind if group else "train"][fact.cause] += 1

    @_take.register
    def _(self, fact: facts.Sampled) -> None:
        self._all(self.steps.sampled(fact, self._config.replay, bool(self.stop_cause)))

    @_take.register
    def _(self, fact: facts.Resampled) -> None:
        self._all(self.steps.resampled(fact))

    @_take.register
    def _(self, fact: facts.StepsCommitted) -> None:
        self._all(self.steps.made_durable(fact))

    @_take.register
    def _(self, fact: facts.LearnerResumed) -> None:
        self._all(self.steps.resumed(fact))

    @_take.register
    def _(self, fact: facts.EvaluationOpened) -> None:
        if fact.step in self._evaluating:
            self._fault(f"the evaluation of step {fact.step} was opened twice")
        self._evaluating.add(fact.step)

    @_take.register
    def _(self, fact: facts.EvaluationFinished) -> None:
        step = fact.result.step
        if step not in self._evaluating:
            self._fault(f"the evaluation of step {step} is finished, and was not under way")
        self._evaluating.discard(step)
        wrong = differences(fact.result, self.groups.end(step))
        self._all(f"evaluation of step {step}: {each}" for each in wrong)

    @_take.register
    def _(self, fact: facts.EvaluationVoided) -> None:
        self._evaluating.discard(fact.step)
        self.groups.end(fact.step)

    @_take.register
    def _(self, fact: facts.Stopped) -> None:
        self.stop_cause = fact.cause

    def _lease(self, actor_id: str, group_id: int, sibling: int) -> None:
        if self.groups.place(group_id) is None:
            self._fault(f"sibling {sibling} of group {group_id} was leased before it opened")
        if (actor_id, group_id, sibling) in self._held:
            self._fault(f"sibling {sibling} of group {group_id}: {actor_id} holds it twice")
        self._held.add((actor_id, group_id, sibling))
        self.leases["given"] += 1

    def _end(self, fact: facts.OfLease, how: str) -> bool:
        lease = (fact.actor_id, fact.group_id, fact.sibling)
        if lease not in self._held:
            return False
        self._held.remove(lease)
        self.leases[how] += 1
        return True

    def _delivered(self, fact: facts.OfLease, status: str) -> str | None:
        place = self.groups.place(fact.group_id)
        if place is None:
            self._fault(f"{_name(fact)} was delivered, but its group never opened")
        self.deliveries[status] += 1
        if not self._end(fact, "delivered"):
            self.deliveries["without a lease any more"] += 1
        return place

    def _expected(self, group: Group | None, sibling: int) -> Expected:
        temperature: float | None = None
        if group is not None and group.kind == "train":
            temperature = self._config.actors.temperature
        elif 0 <= sibling < len(asked := self._config.learner.eval_temperatures):
            temperature = asked[sibling]
        return Expected(self._seed, temperature, self.steps.reached)

    def close(self) -> None:
        """Find the faults that only the end shows."""
        if self.stop_cause and (left := self.groups.unfinished("train")):
            self._name(f"the run has stopped, but {len(left)} groups still stand: {left[:5]}")
        for group in self.groups.live.values():
            if group.compacted and group.kind == "train":
                self._name(
                    f"group {group.group_id}: payloads of siblings {sorted(group.compacted)} are "
                    "compacted away, though it may still be asked for"
                )
        ended = sum(count for how, count in self.leases.items() if how != "given")
        if ended + len(self._held) != self.leases["given"]:
            self._name(f"{self.leases['given']} leases were given, {ended} ended")

    def summary(self) -> dict[str, Any]:
        """The books as plain numbers."""
        groups, steps = self.groups, self.steps
        left = {kind: len(groups.unfinished(kind)) for kind in ("train", "eval")}
        return {
            "books_close": not self.fault_count,
            "faults": self.fault_count,
            "records": self.records,
            "payloads": dict(self.payloads),
            "merging": {
                "rollouts": self._rollouts,
                "sequences": self._sequences,
                "merged whole": self._whole / self._rollouts if self._rollouts else None,
            },
            "leases": dict(self.leases) | {"held": len(self._held)},
            "deliveries": dict(self.deliveries),
            "train_groups": {
                "opened": groups.opened["train"],
                "committed": steps.trained_durably,
                "sampled": steps.trained - steps.trained_durably,
                "unfinished": left["train"],
            }
            | {f"dropped: {cause}": n for cause, n in self.dropped["train"].items()},
            "eval_groups": {
                "opened": groups.opened["eval"],
                "answered": groups.opened["eval"] - left["eval"] - self.dropped["eval"].total(),
                "unfinished": left["eval"],
            }
            | {f"dropped: {cause}": n for cause, n in self.dropped["eval"].items()},
            "steps": steps.count,
            "steps_committed": steps.committed,
            "staleness_max": steps.staleness_max,
            "token_mismatches": self.token_mismatches,
            "replay_restarts": self.replay_restarts,
            "stop_cause": self.stop_cause,
            "torn": self.torn,
        }


def _name(fact: facts.OfLease) -> str:
    return f"sibling {fact.sibling} of group {fact.group_id}"


def _configuration(text: str) -> Config:
    try:
        return msgspec.convert(strict_yaml.read(text) or {}, Config, strict=False)
    except (yaml.YAMLError, strict_yaml.Refused, msgspec.ValidationError) as error:
        raise UnreadableLog(f"the configuration on record cannot be read: {error}") from error
