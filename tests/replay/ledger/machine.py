"""The rules of the ledger's state machine: whatever may happen to a run, and what it must come to.

Every kind of event that the ledger knows is here: leasing and re-leasing, late, repeated and
unwanted deliveries, failures up to a question's retirement, deadlines, evaluations, actors that
come back after replay's restart with what they hold, learners that resume from an older checkpoint
or wake up too late, goodbyes, the end of the run and its resumption.
"""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from replay.ledger.state import LedgerState
from replay.protocol import (
    Committed,
    Done,
    EvalProgress,
    Evaluate,
    Finish,
    Refused,
    Report,
    Resume,
    Resumed,
    Sample,
    Shutdown,
)
from tests.replay.ledger.conftest import Scene
from tests.replay.ledger.machine_actors import ActorRules, Watch, names, picks, running
from tests.replay.ledger.world import Rollouts, composition


class Rules(ActorRules):
    """Those of the actors (`machine_actors.py`), of the learner, of replay and of time."""

    @initialize(
        groups=st.integers(1, 2),
        size=st.integers(1, 3),
        staleness=st.integers(0, 2),
        every=st.integers(1, 3),
        failures=st.integers(2, 4),
        drop=st.booleans(),
    )
    def begin(
        self, groups: int, size: int, staleness: int, every: int, failures: int, drop: bool
    ) -> None:
        self.scene = Scene(
            evals=2,
            groups_per_step=groups,
            group_size=size,
            max_staleness=staleness,
            max_question_failures=failures,
            drop_no_signal=drop and size > 1,
        )
        self.image: tuple[int, bytes] | None = None
        self.world = Watch(self.scene, publish_every=min(every, staleness + 1))
        assert self.world.do(self.scene.learner) == Resumed(0)
        self.world.connect("a")

    # ---- learner

    @rule()
    def train(self) -> None:
        self.world.train()

    @rule()
    @running
    def ask_again(self) -> None:
        """The reply to the last Sample was lost."""
        world = self.world
        if world.step in world.history and world.step > self.scene.ledger.state.committed:
            reply = world.do(self.scene.sample, world.step - 1, world.incarnation)
            known = world.history[world.step]
            assert composition(reply) == composition(known)

    @rule()
    def commit(self) -> None:
        message = Committed(self.world.incarnation, self.world.step)
        assert self.world.do(self.scene.send, "learner", message) == Done()

    @rule()
    def report(self) -> None:
        message = Report(self.world.incarnation, self.world.step, {"learner/loss": 0.5})
        assert self.world.do(self.scene.send, "learner", message) == Done()
        assert self.unchanged("learner", message) == Done()

    @rule(pick=picks)
    @running
    def resume(self, pick: int) -> None:
        """The learner is killed and starts again from a durable checkpoint."""
        world, committed = self.world, self.scene.ledger.state.committed
        latest = max(world.step, world.again_until)
        world.step = committed + pick % (world.step - committed + 1)
        world.incarnation += 1
        world.again_until = latest
        reply = world.do(self.scene.learner, world.step, world.incarnation)
        assert reply == Resumed(latest - world.step)
        if world.step == latest:
            world.published = (world.incarnation, world.step)

    @rule()
    def come_too_late(self) -> None:
        """A learner of before wakes up; another starts from a checkpoint behind the newest."""
        old, step = self.world.incarnation - 1, self.world.step
        for message in (
            Sample(old, step),
            Committed(old, step + 1),
            Evaluate(old, step),
            Report(old, step, {}),
            Finish(old, "over"),
            Resume(old + 1, step + 7),
        ):
            assert isinstance(self.unchanged("sleeper", message), Refused), message
        if committed := self.scene.ledger.state.committed:
            assert isinstance(self.unchanged("new", Resume(old + 2, committed - 1)), Refused)

    @rule()
    @running
    def evaluate(self) -> None:
        message = Evaluate(self.world.incarnation, self.world.step)
        reply = self.world.do(self.scene.send, "learner", message)
        assert isinstance(reply, EvalProgress)

    # ---- replay and time

    @rule()
    def save(self) -> None:
        """Replay writes a snapshot."""
        self.image = len(self.scene.log), self.scene.ledger.image

    @rule(back=st.sets(names), snapshot=st.booleans())
    def restart(self, back: set[str], snapshot: bool) -> None:
        """Replay is killed; its log restores exactly what it was, with or without a snapshot on the
        way; actors come back with leases.
        """
        before = state_of(self.scene.ledger.state) | {"facts": len(self.scene.log) + 1}
        self.scene.restart(image=self.image if snapshot else None)
        assert state_of(self.scene.ledger.state) == before
        for actor in self.world.actors.values():
            actor.connected = False
        for name in sorted(back):
            if self.world.actors[name].alive:
                self.world.connect(name)

    @rule(pick=picks, snapshot=st.booleans())
    def kill_everything(self, pick: int, snapshot: bool) -> None:
        """The whole run is killed, or has ended, and goes on."""
        for name, actor in self.world.actors.items():
            self.world.actors[name] = Rollouts(actor.capacity)
        self.scene.restart(resumed=True)
        folded = state_of(self.scene.ledger.state)
        if snapshot and self.image:
            self.scene.log.pop()  # it is written once
            self.scene.restart(resumed=True, image=self.image)
            assert state_of(self.scene.ledger.state) == folded
        self.resume(pick)

    @rule(finish=st.booleans(), sure=st.integers(0, 3))
    @running
    def stop(self, finish: bool, sure: int) -> None:
        """The run ends, by its learner or its launcher: nothing stands that was not sampled."""
        if sure:
            return
        end = Finish(self.world.incarnation, "done") if finish else Shutdown("ctrl-c")
        assert self.world.do(self.scene.send, "learner" if finish else "launcher", end) == Done()
        state = self.scene.ledger.state
        assert self.world.stopped and not (state.opened or state.ready or state.evaluating)

    @rule(seconds=st.sampled_from([1.0, 6.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.world.do(self.scene.tick, seconds)

    @rule()
    def pass_the_deadline(self) -> None:
        """So long that whatever was open is dropped, were anybody at work on it."""
        state, deadline = self.scene.ledger.state, self.scene.config.group_deadline_s
        before = {*state.opened, *state.evaluating}
        self.world.do(self.scene.tick, 0.0)  # a replay that just started begins to count
        self.world.do(self.scene.tick, deadline + 1.0)
        if not (state.catching_up or self.world.stopped):
            assert not before & {*state.opened, *state.evaluating}


def state_of(state: LedgerState) -> dict[str, object]:
    """All that a restart must bring back."""
    fields = {name: value for name, value in vars(state).items() if name != "config"}
    supply = fields.pop("questions")
    return fields | {"supply": (supply.supply, supply.peek())}
