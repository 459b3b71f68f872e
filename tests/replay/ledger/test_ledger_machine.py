"""The ledger against a world that kills, stalls, loses and repeats, checked after every event.

The rules are what may happen; the world (in conftest) checks each batch, lease and opening from
outside: staleness within its bound, exactly once in the surviving history, no evaluation trained,
nothing leased twice. From wherever the rules lead, a batch comes in bounded time.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replay.books import Books
from replay.protocol import Committed, Done, EvalProgress, Evaluate, Resumed, Shutdown

names = st.sampled_from(("a", "b", "c"))
picks = st.integers(0, 99)
running = precondition(lambda machine: not machine.world.stopped)


class LedgerMachine(RuleBasedStateMachine):
    """Rules are what may happen; the test sets `tools`."""

    tools: Any

    @initialize(
        groups=st.integers(1, 2),
        size=st.integers(1, 3),
        staleness=st.integers(0, 2),
        every=st.integers(1, 3),
        drop=st.booleans(),
    )
    def begin(self, groups: int, size: int, staleness: int, every: int, drop: bool) -> None:
        self.scene = self.tools.Scene(
            evals=2,
            groups_per_step=groups,
            group_size=size,
            max_staleness=staleness,
            max_question_failures=4,
            drop_no_signal=drop and size > 1,
        )
        self.world = self.tools.World(self.scene, publish_every=min(every, staleness + 1))
        assert self.world.do(self.scene.learner) == Resumed(0)
        self.world.connect("a")

    # ---- actors

    @rule(name=names)
    def connect(self, name: str) -> None:
        if not self.world.actors[name].connected:
            self.world.connect(name)

    @rule(name=names)
    def kill(self, name: str) -> None:
        self.world.actors[name] = self.tools.Rollouts(self.world.actors[name].capacity)
        self.world.do(self.scene.lose, name)

    @rule(name=names)
    def stall(self, name: str) -> None:
        """Replay gives the actor up, but it lives and keeps what it has in flight."""
        self.world.actors[name].connected = False
        self.world.do(self.scene.lose, name)

    @rule(name=names)
    def apply_published(self, name: str) -> None:
        if self.world.actors[name].alive:
            self.world.actors[name].applied = self.world.published
            self.world.state(name)

    @rule(name=names, pick=picks, signal=st.booleans())
    def deliver(self, name: str, pick: int, signal: bool) -> None:
        if flight := sorted(self.world.actors[name].flight):
            self.world.deliver(name, flight[pick % len(flight)], signal)

    @rule(pick=picks)
    def deliver_again(self, pick: int) -> None:
        if delivered := self.world.delivered:
            name, lease, version = delivered[pick % len(delivered)]
            status = self.world.do(self.scene.deliver, name, lease, 5.0, version)
            assert status in ("superseded", "dropped")

    @rule(name=names, pick=picks)
    def fail(self, name: str, pick: int) -> None:
        flight = self.world.actors[name].flight
        if flight:
            lease, _ = flight.pop(sorted(flight)[pick % len(flight)])
            self.world.do(self.scene.fail, name, lease)

    @rule(name=names, pick=picks)
    def lose_a_message(self, name: str, pick: int) -> None:
        """A lease never reached the actor, or what came of it never reached replay."""
        flight = self.world.actors[name].flight
        if flight:
            flight.pop(sorted(flight)[pick % len(flight)])

    @rule(name=names)
    def beat(self, name: str) -> None:
        self.world.beat(name)

    @rule(name=names, rounds=st.integers(1, 5))
    def straggle(self, name: str, rounds: int) -> None:
        """One actor is slow while the others and the learner go on."""
        for _ in range(rounds):
            for other in sorted(self.world.actors.keys() - {name}):
                self.world.be_diligent(other)
            self.world.train()

    # ---- learner

    @rule()
    def train(self) -> None:
        self.world.train()

    @rule()
    @running
    def ask_again(self) -> None:
        """The reply to the last Sample was lost."""
        world = self.world
        if world.step in world.history and world.step > self.scene.ledger.books.committed:
            reply = world.do(self.scene.sample, world.step - 1, world.incarnation)
            known = world.history[world.step]
            assert self.tools.composition(reply) == self.tools.composition(known)

    @rule()
    def commit(self) -> None:
        message = Committed(self.world.incarnation, self.world.step)
        assert self.world.do(self.scene.send, "learner", message) == Done()

    @rule(pick=picks)
    @running
    def resume(self, pick: int) -> None:
        """The learner is killed and starts again from a durable checkpoint."""
        world, committed = self.world, self.scene.ledger.books.committed
        latest = max(world.step, world.again_until)
        world.step = committed + pick % (world.step - committed + 1)
        world.incarnation += 1
        world.again_until = latest
        reply = world.do(self.scene.learner, world.step, world.incarnation)
        assert reply == Resumed(latest - world.step)
        if world.step == latest:
            world.published = (world.incarnation, world.step)

    @rule()
    @running
    def evaluate(self) -> None:
        message = Evaluate(self.world.incarnation, self.world.step)
        reply = self.world.do(self.scene.send, "learner", message)
        assert isinstance(reply, EvalProgress)

    # ---- replay and time

    @rule()
    def restart(self) -> None:
        """Replay is killed; its log restores exactly what it was."""
        before = _state(self.scene.ledger.books)
        self.scene.restart()
        assert _state(self.scene.ledger.books) == before
        for actor in self.world.actors.values():
            actor.connected = False

    @rule(pick=picks)
    def kill_everything(self, pick: int) -> None:
        """The whole run is killed, or has ended, and goes on."""
        for name, actor in self.world.actors.items():
            self.world.actors[name] = self.tools.Rollouts(actor.capacity)
        self.scene.restart(resumed=True)
        self.resume(pick)

    @rule(seconds=st.sampled_from([1.0, 6.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.world.do(self.scene.tick, seconds)

    # ---- what must hold

    @invariant()
    def books_are_closed(self) -> None:
        if hasattr(self, "scene"):
            books = self.scene.ledger.books
            places = [*books.opened, *books.ready, *books.sampled]
            assert len(places) == len(set(places))
            ended = books.tally.committed + books.tally.dropped.total()
            assert books.tally.opened == len(places) + ended

    @invariant()
    def no_actor_is_given_more_than_it_holds(self) -> None:
        if hasattr(self, "world"):
            for actor in self.world.actors.values():
                assert not actor.connected or len(actor.flight) <= actor.capacity

    def teardown(self) -> None:
        """From wherever this went, batches and the evaluation come; then the books close."""
        if not hasattr(self, "world"):
            return
        target = max(self.world.step, self.world.again_until) + 2
        self._everybody_works_until(lambda: self.world.step >= target)
        self._everybody_works_until(self._evaluated)
        self.commit()
        self.world.do(self.scene.send, "launcher", Shutdown("test"))
        tally = self.scene.ledger.books.tally
        assert tally.opened == tally.committed + tally.dropped.total()

    def _everybody_works_until(self, done: Any) -> None:
        for _ in range(60):
            if self.world.stopped or done():
                return
            for name in self.world.actors:
                self.world.be_diligent(name)
            self.world.train()
            self.wait(1.0)
        raise AssertionError("deadlock")

    def _evaluated(self) -> bool:
        message = Evaluate(self.world.incarnation, 1)
        return self.world.do(self.scene.send, "learner", message).result is not None


def _state(books: Books) -> dict[str, object]:
    state = {name: value for name, value in vars(books).items() if name != "config"}
    supply = state.pop("questions")
    return state | {"supply": (supply.cursor, supply.peek(), supply.retired)}


def _run(tools: Any, **how: Any) -> None:
    class Machine(LedgerMachine):
        pass

    Machine.tools = tools
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(Machine, settings=settings(**quiet | how))


def test_the_ledger_keeps_its_promises(tools: Any) -> None:
    """Failures are not shrunk here, which takes minutes: the long run does that."""
    phases = (Phase.explicit, Phase.generate)
    _run(tools, max_examples=60, stateful_step_count=40, derandomize=True, phases=phases)


@pytest.mark.slow
def test_the_ledger_keeps_its_promises_for_long(tools: Any) -> None:
    _run(tools, max_examples=300, stateful_step_count=100)
