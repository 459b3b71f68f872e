"""Books of a run's event log, independent of replay's own: of every lease, trajectory, group and
batch, with the faults where they do not add up.
"""

from collections import Counter
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

import msgspec
import yaml

from actors.errors import TokenMismatch
from configs.schema import Config
from replay.log import records
from replay.log.event_log import read_past_damage
from replay.log.format import Damage, TornRecord
from replay.log.records import Record
from replay.protocol import LogError
from replay.trajectory import Kind

Sibling = tuple[int, int]  # group, sibling


class Audit:
    """Takes the records in order; `faults` names each thing that does not add up."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.leases: Counter[str] = Counter()  # by how they ended
        self.deliveries: Counter[str] = Counter()
        self.dropped: dict[Kind, Counter[str]] = {"train": Counter(), "eval": Counter()}
        self.torn, self.committed, self.token_mismatches = "", 0, 0
        self.staleness_max: int | None = None
        self.stop_cause, self.replay_restarts = "", 0
        self._config, self._incarnation = Config(), 0
        self._kinds: dict[int, Kind] = {}
        self._oldest: dict[Sibling, int] = {}  # delivered: the oldest version among its tokens
        self._held: set[tuple[str, int, int]] = set()
        self._sampled: dict[int, tuple[int, ...]] = {}
        self._trained_in: dict[int, int] = {}
        self._gone: dict[int, str] = {}

    def fold(self, path: Path) -> None:
        """Take a whole log; damage is a fault, after which the rest is read. Raises LogError."""
        try:
            for place, record in enumerate(read_past_damage(path)):
                if isinstance(record, Damage):
                    lost = record.end - record.start
                    what = f"{lost} bytes cannot be read: " if lost else ""
                    self.faults.append(
                        f"{record.path}: offset {record.start}: {what}{record.cause}"
                    )
                    continue
                if place == 0 and not isinstance(record, records.RunStarted):
                    self.faults.append("the log does not begin with RunStarted")
                self.take(record)
        except TornRecord as torn:
            self.torn = str(torn)
        self.close()

    @singledispatchmethod
    def take(self, fact: Record) -> None:
        """Take in one record; most say nothing about leases, trajectories or batches."""

    @take.register
    def _(self, fact: records.RunStarted) -> None:
        self._config = _configuration(fact.config)

    @take.register
    def _(self, fact: records.RunResumed) -> None:
        self._config = _configuration(fact.config)
        self.stop_cause = ""
        self.leases["ended with their processes"] += len(self._held)
        self._held.clear()

    @take.register
    def _(self, fact: records.ReplayRestarted) -> None:
        self.replay_restarts += 1  # nothing ends by it: incarnation, leases and batches stand

    @take.register
    def _(self, fact: records.GroupOpened) -> None:
        if fact.group_id in self._kinds:
            self.faults.append(f"group {fact.group_id} was opened twice")
        if self.stop_cause:
            self.faults.append(f"group {fact.group_id} was opened after the run had stopped")
        self._kinds[fact.group_id] = fact.kind

    @take.register
    def _(self, fact: records.Leased) -> None:
        for sibling in fact.siblings:
            self._lease(fact.actor_id, fact.group_id, sibling)

    @take.register
    def _(self, fact: records.Adopted) -> None:
        self._lease(fact.actor_id, fact.group_id, fact.sibling)

    @take.register
    def _(self, fact: records.LeaseReturned) -> None:
        self.token_mismatches += fact.cause.startswith(TokenMismatch.__name__)
        if not self._end(fact.actor_id, fact.group_id, fact.sibling, "returned"):
            self.faults.append(f"{_name(fact)} was returned by {fact.actor_id}, who had no lease")

    @take.register
    def _(self, fact: records.Delivered) -> None:
        self._delivered(fact, "accepted")
        key = (fact.group_id, fact.sibling)
        if key in self._oldest:
            self.faults.append(f"{_name(fact)} was taken twice")
        if place := self._place(fact.group_id):
            self.faults.append(f"{_name(fact)} was taken although its group is {place}")
        if not 0 <= fact.sibling < self._size(fact.group_id):
            self.faults.append(f"{_name(fact)} does not exist: its group is smaller")
        self._oldest[key] = fact.summary.oldest_version

    @take.register
    def _(self, fact: records.Superseded) -> None:
        self._delivered(fact, fact.status)

    @take.register
    def _(self, fact: records.GroupDropped) -> None:
        if place := self._place(fact.group_id):
            self.faults.append(f"group {fact.group_id} was dropped although it is {place}")
        self._gone[fact.group_id] = fact.cause
        self.dropped[self._kinds.get(fact.group_id, "train")][fact.cause] += 1

    @take.register
    def _(self, fact: records.Sampled) -> None:
        if fact.step in self._sampled:
            self.faults.append(f"step {fact.step} was put together twice")
        if self.stop_cause:
            self.faults.append(f"step {fact.step} was put together after the run had stopped")
        if fact.incarnation != self._incarnation:
            self.faults.append(
                f"step {fact.step} was given to incarnation {fact.incarnation}, not to "
                f"{self._incarnation}"
            )
        for group_id in fact.group_ids:
            self._train(group_id, fact.step)
        self._sampled[fact.step] = fact.group_ids

    @take.register
    def _(self, fact: records.Resampled) -> None:
        if fact.step not in self._sampled:
            self.faults.append(f"step {fact.step} was served again, but never put together")
        if fact.step <= self.committed:
            self.faults.append(f"step {fact.step} was trained again although it is committed")

    @take.register
    def _(self, fact: records.StepsCommitted) -> None:
        if fact.step < self.committed:
            self.faults.append(f"step {fact.step} was committed after step {self.committed}")
        self.committed = max(self.committed, fact.step)

    @take.register
    def _(self, fact: records.LearnerResumed) -> None:
        if fact.incarnation <= self._incarnation:
            self.faults.append(f"incarnation {fact.incarnation} resumed after {self._incarnation}")
        if fact.step < self.committed:
            self.faults.append(f"a learner went back to step {fact.step}, behind what is committed")
        self._incarnation = fact.incarnation

    @take.register
    def _(self, fact: records.Stopped) -> None:
        self.stop_cause = fact.cause

    def _lease(self, actor_id: str, group_id: int, sibling: int) -> None:
        if group_id not in self._kinds:
            self.faults.append(f"sibling {sibling} of group {group_id} was leased before it opened")
        if (actor_id, group_id, sibling) in self._held:
            self.faults.append(f"sibling {sibling} of group {group_id}: {actor_id} holds it twice")
        self._held.add((actor_id, group_id, sibling))
        self.leases["given"] += 1

    def _end(self, actor_id: str, group_id: int, sibling: int, how: str) -> bool:
        lease = (actor_id, group_id, sibling)
        if lease not in self._held:
            return False
        self._held.remove(lease)
        self.leases[how] += 1
        return True

    def _delivered(self, fact: records.Delivered | records.Superseded, status: str) -> None:
        if fact.group_id not in self._kinds:
            self.faults.append(f"{_name(fact)} was delivered, but its group never opened")
        self.deliveries[status] += 1
        if not self._end(fact.actor_id, fact.group_id, fact.sibling, "delivered"):
            self.deliveries["without a lease any more"] += 1

    def _train(self, group_id: int, step: int) -> None:
        if self._kinds.get(group_id) != "train":
            self.faults.append(f"group {group_id} was trained at step {step}; it is none to train")
        elif place := self._place(group_id):
            self.faults.append(f"group {group_id} was trained at step {step}, but it is {place}")
        versions = {i: self._oldest.get((group_id, i)) for i in range(self._size(group_id))}
        known = [version for version in versions.values() if version is not None]
        if len(known) < len(versions):
            missing = [sibling for sibling, version in versions.items() if version is None]
            self.faults.append(f"group {group_id} was trained at step {step} without {missing}")
        else:
            self._judge_age(group_id, step, step - 1 - min(known))
        self._trained_in[group_id] = step

    def _judge_age(self, group_id: int, step: int, staleness: int) -> None:
        self.staleness_max = max(staleness, self.staleness_max or 0)
        bound = self._config.replay.max_staleness
        if staleness > bound:
            self.faults.append(
                f"group {group_id} was {staleness} steps old at step {step}: more than {bound}"
            )

    def close(self) -> None:
        """Find the faults that only the end shows."""
        steps = sorted(self._sampled)
        if steps != list(range(steps[0], steps[-1] + 1) if steps else []):
            self.faults.append("steps are missing between the first and the last batch")
        if self.stop_cause and (left := self._unfinished("train")):
            self.faults.append(
                f"the run has stopped, but {len(left)} groups still stand: {left[:5]}"
            )
        ended = sum(count for how, count in self.leases.items() if how != "given")
        if ended + len(self._held) != self.leases["given"]:
            self.faults.append(f"{self.leases['given']} leases were given, {ended} ended")

    def _unfinished(self, kind: Kind) -> list[int]:
        found = (group_id for group_id, its in self._kinds.items() if its == kind)
        return [group_id for group_id in found if not self._settled(group_id)]

    def _settled(self, group_id: int) -> bool:
        answered = all((group_id, i) in self._oldest for i in range(self._size(group_id)))
        return bool(self._place(group_id)) or (self._kinds[group_id] == "eval" and answered)

    def _place(self, group_id: int) -> str:
        """Return what became of a group; empty where it is open or ready."""
        if step := self._trained_in.get(group_id):
            return f"trained at step {step}"
        return f"dropped ({self._gone[group_id]})" if group_id in self._gone else ""

    def _size(self, group_id: int) -> int:
        trained = self._kinds.get(group_id, "train") == "train"
        asked = len(self._config.learner.eval_temperatures)
        return self._config.replay.group_size if trained else asked

    def summary(self) -> dict[str, Any]:
        """The books as plain numbers."""
        opened = Counter(self._kinds.values())
        left = {kind: len(self._unfinished(kind)) for kind in ("train", "eval")}
        committed = sum(step <= self.committed for step in self._trained_in.values())
        return {
            "books_close": not self.faults,
            "faults": len(self.faults),
            "leases": dict(self.leases) | {"held": len(self._held)},
            "deliveries": dict(self.deliveries),
            "train_groups": {
                "opened": opened["train"],
                "committed": committed,
                "sampled": len(self._trained_in) - committed,
                "unfinished": left["train"],
            }
            | {f"dropped: {cause}": n for cause, n in self.dropped["train"].items()},
            "eval_groups": {
                "opened": opened["eval"],
                "answered": opened["eval"] - left["eval"] - self.dropped["eval"].total(),
                "unfinished": left["eval"],
            }
            | {f"dropped: {cause}": n for cause, n in self.dropped["eval"].items()},
            "steps": len(self._sampled),
            "steps_committed": self.committed,
            "staleness_max": self.staleness_max,
            "token_mismatches": self.token_mismatches,
            "replay_restarts": self.replay_restarts,
            "stop_cause": self.stop_cause,
            "torn": self.torn,
        }


def _name(fact: records.Delivered | records.Superseded | records.LeaseReturned) -> str:
    return f"sibling {fact.sibling} of group {fact.group_id}"


def _configuration(text: str) -> Config:
    try:
        return msgspec.convert(yaml.safe_load(text) or {}, Config, strict=False)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise LogError(f"the configuration on record cannot be read: {error}") from error
