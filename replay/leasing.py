"""Who is given what to roll out: evaluation first, then lost siblings, then new groups.

Consumes the books, the roster and the supply of questions; writes `GroupOpened` and `Leased`,
produces the `Leases` to push. Waits for free capacity, for an actor with the current weights and
for admission; any event may unblock it, so it is asked after each one.
"""

from collections.abc import Iterable

from replay import records
from replay.admission import Bounds, can_open
from replay.events import Peer
from replay.groups import Group
from replay.journal import Journal
from replay.protocol import Lease, Leases
from replay.roster import Actor, Roster
from replay.trajectory import Kind, Sampling


class Lessor:
    """Grants leases to actors that serve the current incarnation's weights."""

    def __init__(
        self, journal: Journal, roster: Roster, sampling: Sampling, total_steps: int | None
    ) -> None:
        self._journal = journal
        self._books = journal.books
        self._roster = roster
        self._sampling = sampling
        config = self._books.config
        self._bounds = Bounds(config.groups_per_step, config.max_staleness, total_steps)
        self._granted: dict[Peer, list[Lease]] = {}

    def grant(self) -> list[tuple[Peer, Leases]]:
        """Write and return every lease that can be given now."""
        # A resumed learner first trains again what is recorded, then has its weights verified.
        if self._books.stop_cause or self._books.catching_up:
            return []
        current = [a for a in self._roster if a.incarnation == self._books.incarnation]
        self._lease_evaluations(current)
        self._lease_lost_siblings(current)
        self._open_groups(current)
        granted, self._granted = self._granted, {}
        return [(peer, Leases(tuple(leases))) for peer, leases in granted.items()]

    def free(self, actor: Actor) -> int:
        """How many more rollouts it can hold; what it was given and has not answered for counts."""
        return actor.capacity - len(self._books.held.get(actor.actor_id, ()))

    def _roomiest(self, actors: Iterable[Actor], slots: int) -> Actor | None:
        fitting = [actor for actor in actors if self.free(actor) >= slots]
        return max(fitting, key=lambda a: (self.free(a), a.actor_id), default=None)

    def _lease_evaluations(self, current: list[Actor]) -> None:
        for group in self._short("eval"):
            for sibling in group.missing:
                if actor := self._roomiest(current, 1):
                    self._lease(actor, group, (sibling,))
        for evaluation in self._books.evaluations.values():
            while evaluation.pending and (actor := self._roomiest(current, 1)):
                group = self._open(actor, evaluation.step)
                self._lease(actor, group, (0,))
                if second := self._roomiest(current, 1):
                    self._lease(second, group, (1,))

    def _lease_lost_siblings(self, current: list[Actor]) -> None:
        for group in self._short("train"):
            new_enough = [actor for actor in current if actor.version >= group.version]
            for sibling in group.missing:
                if actor := self._roomiest(new_enough, 1):
                    self._lease(actor, group, (sibling,))

    def _open_groups(self, current: list[Actor]) -> None:
        while actor := self._roomiest(
            (a for a in current if can_open(self._books.standing, a.version, self._bounds)),
            self._books.config.group_size,
        ):
            group = self._open(actor)
            self._lease(actor, group, group.missing)

    def _short(self, kind: str) -> list[Group]:
        found = (self._books.unfinished(group_id) for group_id in sorted(self._books.short))
        return [group for group in found if group and group.kind == kind]

    def _open(self, actor: Actor, evaluation: int = -1) -> Group:
        books = self._books
        kind: Kind = "eval" if evaluation >= 0 else "train"
        group_id, now = books.next_group_id[kind], self._journal.now
        if evaluation >= 0:
            question = books.evaluations[evaluation].pending[0]
        else:
            question = books.questions.first()
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
        return (books.evaluating if evaluation >= 0 else books.opened)[group_id]

    def _lease(self, actor: Actor, group: Group, siblings: tuple[int, ...]) -> None:
        fact = records.Leased(self._journal.now, actor.actor_id, group.group_id, siblings)
        self._journal.write(fact)
        self._granted.setdefault(actor.peer, []).extend(
            Lease(group.group_id, i, group.kind, group.question, self._sampling_of(group, i))
            for i in siblings
        )

    def _sampling_of(self, group: Group, sibling: int) -> Sampling:
        if group.kind == "train":
            return self._sampling
        return Sampling(temperature=float(sibling), seed=self._sampling.seed)
