"""Leasing: evaluation comes first, then lost siblings, then new groups.

A lease needs free capacity, an actor with the current weights and admission. Any event may bring
one of them, so leases are granted after each. Each grant gives all that can be given, so an event
that changes one actor's capacity or weights alone needs no look at the others: with a thousand of
them that is most of the work.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial

from replay.ledger.admission import Bounds, can_open
from replay.ledger.events import Peer
from replay.ledger.groups import Group
from replay.ledger.roster import Actor, Roster
from replay.ledger.state import Journal, LedgerState
from replay.log import records
from replay.protocol import Lease, Leases
from replay.trajectory import Kind, Sampling


class _Capacity:
    """Free capacity of each actor, as leases are given out; the largest last."""

    def __init__(self, state: LedgerState, actors: Iterable[Actor]) -> None:
        free = [(a.capacity - len(state.held.get(a.actor_id, ())), a.actor_id, a) for a in actors]
        self._free = sorted(free)  # names differ: actors are not compared

    @property
    def most(self) -> int:
        """The largest free capacity."""
        return self._free[-1][0] if self._free else 0

    def take(self, slots: int, fits: Callable[[Actor], bool] = lambda _: True) -> Actor | None:
        """Take `slots` of the actor with the most free capacity that fits; None where none has."""
        for i in range(len(self._free) - 1, -1, -1):
            free, name, actor = self._free[i]
            if free < slots:
                return None
            if fits(actor):
                del self._free[i]
                insort(self._free, (free - slots, name, actor))
                return actor
        return None


class Lessor:
    """Grants leases to actors that serve the current incarnation's weights."""

    def __init__(
        self, journal: Journal, roster: Roster, sampling: Sampling, total_steps: int | None
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._roster = roster
        self._sampling = sampling
        config = self._state.config
        self._bounds = Bounds(config.groups_per_step, config.max_staleness, total_steps)
        self._granted: dict[Peer, list[Lease]] = {}

    def grant(self, among: Iterable[Actor] | None = None) -> list[tuple[Peer, Leases]]:
        """Write and return every lease that can be given now.

        `among`: the only actors that may have more capacity or newer weights than at the last
        call, if nothing else has changed since; None: look at all.
        """
        # A resumed learner first trains again what is recorded, then has its weights verified.
        if self._state.stop_cause or self._state.catching_up:
            return []
        actors = self._roster if among is None else among
        current = [a for a in actors if a.incarnation == self._state.incarnation]
        capacity = _Capacity(self._state, current)
        if capacity.most < 1 or (
            capacity.most < self._state.config.group_size and self._only_new_groups()
        ):
            return []
        self._lease_evaluations(capacity)
        self._lease_lost_siblings(capacity)
        self._open_groups(capacity)
        granted, self._granted = self._granted, {}
        return [(peer, Leases(tuple(leases))) for peer, leases in granted.items()]

    def _only_new_groups(self) -> bool:
        under_way = self._state.under_way.values()
        return not self._state.short and not any(each.pending for each in under_way)

    def _lease_evaluations(self, capacity: _Capacity) -> None:
        for group in self._short("eval"):
            for sibling in group.missing:
                if actor := capacity.take(1):
                    self._lease(actor, group, (sibling,))
        for evaluation in self._state.under_way.values():
            while evaluation.pending and (actor := capacity.take(1)):
                group = self._open(actor, evaluation.step)
                self._lease(actor, group, (0,))
                for sibling in group.missing:
                    if another := capacity.take(1):
                        self._lease(another, group, (sibling,))

    def _lease_lost_siblings(self, capacity: _Capacity) -> None:
        for group in self._short("train"):
            for sibling in group.missing:
                if actor := capacity.take(1, partial(_new_enough, group)):
                    self._lease(actor, group, (sibling,))

    def _open_groups(self, capacity: _Capacity) -> None:
        size = self._state.config.group_size
        while actor := capacity.take(size, self._may_open):
            group = self._open(actor)
            self._lease(actor, group, group.missing)

    def _may_open(self, actor: Actor) -> bool:
        return can_open(self._state.admitted, actor.version, self._bounds)

    def _short(self, kind: str) -> list[Group]:
        found = (self._state.unfinished(group_id) for group_id in sorted(self._state.short))
        return [group for group in found if group and group.kind == kind]

    def _open(self, actor: Actor, evaluation: int = -1) -> Group:
        state = self._state
        kind: Kind = "eval" if evaluation >= 0 else "train"
        group_id, now = state.next_group_id[kind], self._journal.now
        if evaluation >= 0:
            question = state.evaluations[evaluation].pending[0]
        else:
            question = state.questions.first()
        fact = records.GroupOpened(
            now,
            group_id,
            kind,
            question,
            actor.incarnation,
            actor.version,
            evaluation,
        )
        self._journal.write(fact)
        return (state.evaluating if evaluation >= 0 else state.opened)[group_id]

    def _lease(self, actor: Actor, group: Group, siblings: tuple[int, ...]) -> None:
        attempts = tuple([group.attempts.get(i, 0) for i in siblings])
        now, actor_id, group_id = self._journal.now, actor.actor_id, group.group_id
        fact = records.Leased(now, actor_id, group_id, siblings, attempts, actor.node)
        self._journal.write(fact)
        self._granted.setdefault(actor.peer, []).extend(
            Lease(
                group_id,
                sibling,
                group.kind,
                group.question,
                self._sampling_of(group, sibling),
                attempt,
            )
            for sibling, attempt in zip(siblings, attempts, strict=True)
        )

    def _sampling_of(self, group: Group, sibling: int) -> Sampling:
        if group.kind == "train":
            return self._sampling
        return Sampling(self._state.eval_temperatures[sibling], self._sampling.seed)


def _new_enough(group: Group, actor: Actor) -> bool:
    return actor.version >= group.version
