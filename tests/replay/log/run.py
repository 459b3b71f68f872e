"""A ledger that writes a log in small segments, with one actor and one learner."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from configs.schema import Config, ReplayConfig
from replay.codec import encode_trajectory
from replay.ledger.events import Event
from replay.ledger.ledger import Ledger
from replay.log.event_log import EventLog, read
from replay.protocol import (
    Batch,
    Deliver,
    Hello,
    Lease,
    Leases,
    Ready,
    Resume,
    Resumed,
    Sample,
)
from replay.trajectory import TokenSequence, Trajectory

SETTINGS = Config(replay=ReplayConfig(groups_per_step=1, group_size=2, max_staleness=0))


class Run:
    """A ledger that writes a log in small segments; one actor, one learner."""

    def __init__(self, path: Path, new_ledger: Callable, rollout: Callable) -> None:
        self.path, self.rollout, self.new_ledger = path, rollout, new_ledger
        self.ledger: Ledger = new_ledger(SETTINGS)
        self.log = EventLog.create(path, segment_bytes=1500)
        self.leases: list[Lease] = []
        self.send(Resume(1, 0))
        self.send(Hello("actor-0", "digest"))

    def send(self, message: object) -> object:
        outcome = self.ledger.apply(Event("peer", message), 1.0)  # type: ignore[arg-type]
        self.log.append(outcome.records)
        self.log.sync()
        for _, reply in outcome.replies:
            self.leases += reply.leases if isinstance(reply, Leases) else ()
        return next((r for _, r in outcome.replies if not isinstance(r, Leases)), None)

    def deliver(self, lease: Lease, version: int = 0) -> None:
        found: Trajectory = self.rollout(lease, reward=float(lease.sibling))
        turn = msgspec.structs.replace(
            found.turns[0], policy_versions=found.turns[0].policy_versions + version
        )
        only = TokenSequence(found.prompt_tokens, (turn,))
        payload = encode_trajectory(msgspec.structs.replace(found, sequences=(only,)))
        self.send(Deliver("actor-0", lease.group_id, lease.sibling, payload))

    def train(self, *steps: int) -> None:
        for step in steps:
            self.send(Ready("actor-0", 8, 1, step - 1))
            leases, self.leases = self.leases, []
            for lease in leases:
                self.deliver(lease, step - 1)
            assert isinstance(self.send(Sample(1, step - 1)), Batch)

    def resumed(self, step: int) -> Ledger:
        """Replay folds the log again, and a learner goes on from `step`."""
        self.log.close()
        ledger: Ledger = self.new_ledger(SETTINGS)
        ledger.restore(read(self.path))
        outcome = ledger.apply(Event("peer", Resume(2, step)), 2.0)
        assert isinstance(outcome.replies[0][1], Resumed)
        return ledger
