"""Who is given what to roll out: evaluation first, then lost siblings, then new groups.

Consumes the books, the roster and the supply of questions; writes `GroupOpened` and `Leased`,
produces the `Leases` to push. Waits for free capacity, for an actor with the current weights and
for admission; any event may unblock it, so it is asked after each one. Each grant gives all that
can be given, so an event that changes one actor's room or weights alone needs no look at the
others: with a thousand of them that is most of the work.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial

from replay import records
from replay.admission import Bounds, can_open
from replay.books import Books
from replay.events import Peer
from replay.groups import Group
from replay.journal import Journal
from replay.protocol import Lease, Leases
from replay.roster import Actor, Roster
from replay.trajectory import Kind, Sampling


class _Room:
    """How many more rollouts each actor can hold, as leases are given out; roomiest last."""

    def __init__(self, books: Books, actors: Iterable[Actor]) -> None:
        free = [(a.capacity - len(books.held.get(a.actor_id, ())), a.actor_id, a) for a in actors]
        self._places = sorted(free)  # names differ: actors are not compared

    @property
    def most(self) -> int:
        """How many more rollouts the roomiest can hold."""
        return self._places[-1][0] if self._places else 0

    def take(self, slots: int, fits: Callable[[Actor], bool] = lambda _: True) -> Actor | None:
        """The roomiest actor that fits and has `slots` free, which are then taken."""
        for i in range(len(self._places) - 1, -1, -1):
            free, name, actor = self._places[i]
            if free < slots:
                return None
            if fits(actor):
                del self._places[i]
                insort(self._places, (free - slots, name, actor))
                return actor
        return None


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

    def grant(self, among: Iterable[Actor] | None = None) -> list[tuple[Peer, Leases]]:
        """Write and return every lease that can be given now.

        `among`: the only actors that may have more room or newer weights than at the last call, if
        nothing else has changed since; None: look at all.
        """
        # A resumed learner first trains again what is recorded, then has its weights verified.
        if self._books.stop_cause or self._books.catching_up:
            return []
        actors = self._roster if among is None else among
        current = [a for a in actors if a.incarnation == self._books.incarnation]
        room = _Room(self._books, current)
        if room.most < 1 or (room.most < self._books.config.group_size and self._whole()):
            return []
        self._lease_evaluations(room)
        self._lease_lost_siblings(room)
        self._open_groups(room)
        granted, self._granted = self._granted, {}
        return [(peer, Leases(tuple(leases))) for peer, leases in granted.items()]

    def _whole(self) -> bool:
        """Whether only new groups are to be leased: no sibling, and no evaluation."""
        evaluations = self._books.evaluations.values()
        return not self._books.short and not any(each.pending for each in evaluations)

    def _lease_evaluations(self, room: _Room) -> None:
        for group in self._short("eval"):
            for sibling in group.missing:
                if actor := room.take(1):
                    self._lease(actor, group, (sibling,))
        for evaluation in self._books.evaluations.values():
            while evaluation.pending and (actor := room.take(1)):
                group = self._open(actor, evaluation.step)
                self._lease(actor, group, (0,))
                if second := room.take(1):
                    self._lease(second, group, (1,))

    def _lease_lost_siblings(self, room: _Room) -> None:
        for group in self._short("train"):
            for sibling in group.missing:
                if actor := room.take(1, partial(_new_enough, group)):
                    self._lease(actor, group, (sibling,))

    def _open_groups(self, room: _Room) -> None:
        size = self._books.config.group_size
        while actor := room.take(size, self._may_open):
            group = self._open(actor)
            self._lease(actor, group, group.missing)

    def _may_open(self, actor: Actor) -> bool:
        return can_open(self._books.standing, actor.version, self._bounds)

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


def _new_enough(group: Group, actor: Actor) -> bool:
    return actor.version >= group.version
