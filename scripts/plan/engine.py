"""A simulated engine: sequences that each get a token a step, as vLLM's continuous batching has it.

Nothing happens a token at a time. `progress` is how many tokens a sequence that ran all along would
have been given; a turn that begins at progress p and samples n tokens ends at p + n, however many
ran beside it. Tokens that are taken in stop everybody for their seconds; of what siblings share
each takes in its part, for one of them takes in all and the others find it. New weights are looked
at only when an engine is looked at: what they cost is reckoned from when they came.
"""

from heapq import heappop, heappush

from scripts.plan.scenario import Scenario
from scripts.plan.workload import Shape

CLOSE = 1e-9  # tokens: rounding


class Group:
    """The siblings of a question: the version they were begun under, and how many are under way."""

    __slots__ = ("answers_s", "closed_at", "left", "number", "rollouts", "version")

    def __init__(self, number: int, version: int, size: int) -> None:
        self.number, self.version, self.left = number, version, size
        self.closed_at = 0  # the learner's step
        self.rollouts: list[Rollout] = []
        self.answers_s: dict[int, float] = {}  # of the queries that its siblings share: latency


class Rollout:
    """A rollout under way. `versions` is the sum of the versions of its sampled tokens."""

    __slots__ = (
        "alone", "begun_s", "context", "engine", "fresh", "group", "load", "oldest", "shape",
        "start", "turn", "versions",
    )  # fmt: skip

    def __init__(self, group: Group, engine: "Engine", shape: Shape, begun_s: float) -> None:
        self.group, self.engine, self.shape, self.begun_s = group, engine, shape, begun_s
        self.turn, self.context, self.fresh = 0, 0, shape.prompt  # fresh: tokens not taken in yet
        self.start = 0.0  # progress at which its turn began
        self.alone = 0.0  # tokens of its context, less what siblings take in for it
        self.load, self.oldest, self.versions = -1, -1, 0.0

    def __lt__(self, other: "Rollout") -> bool:
        return self.group.number < other.group.number  # the oldest comes first


class Engine:
    """One engine; its times are in seconds of work (`Simulation`)."""

    __slots__ = (
        "anew_s", "at", "changed", "contexts", "free", "marks", "progress", "resumed", "running",
        "seen", "stamp", "starts", "version", "waiting",
    )  # fmt: skip

    def __init__(self, capacity: int) -> None:
        self.free, self.version = capacity, 0
        self.running: list[tuple[float, int, Rollout]] = []  # by progress at the turn's end
        self.waiting: list[Rollout] = []
        self.progress, self.contexts, self.starts = 0.0, 0.0, 0.0
        self.stamp, self.anew_s = 0, 0.0
        self.at = self.resumed = 0.0  # looked at; nothing is generated before `resumed`
        self.seen = 0  # updates
        self.marks: list[tuple[float, int]] = []  # progress, and the version from there on
        self.changed = 0.0  # progress at the last of them


class Engines:
    """Acts on engines, all of which serve whatever version has come last."""

    def __init__(self, scenario: Scenario) -> None:
        engines = scenario.engines
        self._seats, self._prefill_s, self._block = engines.seats, engines.prefill_s, engines.block
        self._by_others = 1.0 - 1.0 / scenario.rules.group_size  # of what siblings share
        self._recompute, self._pause_s = scenario.rules.recompute, scenario.sync.pause_s
        most = min(engines.seats, engines.capacity)
        self._step_s = [engines.decode.step_s(n) for n in range(most + 1)]
        self._numbers = self.count = 0
        self._updates: list[tuple[float, int]] = []  # work-time, version

    def update(self, work: float, version: int) -> None:
        """Let a version arrive everywhere."""
        self._updates.append((work, version))
        self.count += 1

    def advance(self, engine: Engine, work: float) -> None:
        """Generate up to `work`, through all updates that came before it."""
        while engine.seen < self.count:
            came, version = self._updates[engine.seen]
            if engine.running:
                self._generate(engine, came)
            engine.seen += 1
            self._take_in(engine, came, version)
        self._generate(engine, work)

    def _generate(self, engine: Engine, work: float) -> None:
        begun = engine.at if engine.at > engine.resumed else engine.resumed
        if work > begun and engine.running:
            engine.progress += (work - begun) / self._step_s[len(engine.running)]
        engine.at = work

    def _take_in(self, engine: Engine, came: float, version: int) -> None:
        """Stand still for new weights, and compute anew what runs."""
        engine.version, engine.changed = version, engine.progress
        resumed = (came if came > engine.resumed else engine.resumed) + self._pause_s
        if not engine.running:
            engine.marks = [(engine.progress, version)]
        else:
            oldest = min(rollout.start for _, _, rollout in engine.running)
            marks = [*engine.marks, (engine.progress, version)]
            first = max((n for n, (at, _) in enumerate(marks) if at <= oldest), default=0)
            engine.marks = marks[first:]
            if self._recompute:
                sampled = len(engine.running) * engine.progress - engine.starts
                anew_s = (engine.contexts + sampled) * self._prefill_s
                engine.anew_s += anew_s
                resumed += anew_s
                for _, _, rollout in engine.running:
                    rollout.load = engine.seen
        engine.resumed = resumed

    def begin(self, engine: Engine, rollout: Rollout) -> None:
        """Have a turn generate, in a seat or queueing for one; the engine has been advanced."""
        if len(engine.running) < self._seats:
            self._seat(engine, rollout)
        else:
            heappush(engine.waiting, rollout)

    def _seat(self, engine: Engine, rollout: Rollout) -> None:
        load = engine.seen if self._recompute else 0
        turn = rollout.shape.turns[rollout.turn]
        own, by_others = rollout.context // self._block * self._block, turn.shared * self._by_others
        known = rollout.load == load  # its earlier turns are in the cache
        if not known and rollout.load >= 0 and own > by_others:
            engine.anew_s += (own - by_others) * self._prefill_s
        found = own if known and own > by_others else by_others
        rollout.context += rollout.fresh
        rollout.fresh = 0
        now = engine.at if engine.at > engine.resumed else engine.resumed
        engine.resumed = now + (rollout.context - found) * self._prefill_s
        rollout.load, rollout.start = load, engine.progress
        rollout.alone = rollout.context - by_others
        if rollout.oldest < 0:
            rollout.oldest = engine.version
        self._numbers += 1
        heappush(engine.running, (engine.progress + turn.action, self._numbers, rollout))
        engine.contexts += rollout.alone
        engine.starts += engine.progress

    def is_over(self, engine: Engine) -> bool:
        """True where the next turn has ended, or will before the clock can tell."""
        if engine.running[0][0] <= engine.progress + CLOSE:
            return True
        return self.next_end(engine) <= engine.at

    def end(self, engine: Engine) -> Rollout:
        """Take the turn that ends first off its seat, and give that to whoever waits."""
        end, _, rollout = heappop(engine.running)
        start = rollout.start
        engine.contexts -= rollout.alone
        engine.starts -= start
        turn = rollout.shape.turns[rollout.turn]
        if engine.changed <= start:
            rollout.versions += turn.action * engine.version
        else:
            rollout.versions += _versions(engine, start, end)
        rollout.context += turn.action
        rollout.fresh = turn.observation
        rollout.turn += 1
        if (
            rollout.turn < len(rollout.shape.turns)
            and (following := rollout.shape.turns[rollout.turn]).prompt
        ):
            rollout.context = following.known
            rollout.fresh = following.prompt - following.known
        if engine.waiting:
            self._seat(engine, heappop(engine.waiting))
        return rollout

    def next_end(self, engine: Engine) -> float:
        """The work-time at which the next turn of a busy engine ends, if nothing comes between."""
        begun = engine.at if engine.at > engine.resumed else engine.resumed
        left = engine.running[0][0] - engine.progress
        return begun + left * self._step_s[len(engine.running)] if left > 0.0 else begun


def _versions(engine: Engine, start: float, end: float) -> float:
    """The sum of the versions of the tokens sampled from `start` to `end`."""
    total, until = 0.0, end
    for at, version in reversed(engine.marks):
        if at <= start:
            return total + (until - start) * version
        if at < until:
            total += (until - at) * version
            until = at
    return total  # before the first mark: version 0
