"""What a simulation came to: the meter that runs with it, and the figures of its counted steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.plan.engine import Group
from scripts.plan.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """Figures of the counted steps; a step's seconds are `update_s` + `wait_s` + `rest_s`.

    Staleness is the learner's step less the version: of all trained tokens on average, and of the
    oldest one. Of a rollout, `before_queue` counts the steps from its first token to the end of its
    group, `in_queue` those from there to its batch; both on average over rollouts.
    """

    steps: int
    step_s: float
    update_s: float
    wait_s: float
    oldest_s: float  # of wait_s, while a batch lay ready and an older group had to come first
    rest_s: float
    pause_s: float  # of a step, while weights are written
    trained_per_s: float
    sampled_per_s: float
    rollouts_per_s: float  # delivered
    searches_per_s: float
    searches_peak_per_s: float  # within the fullest second
    learner_idle: float
    engine_idle: float
    anew_share: float  # of the engines' time, for contexts that an update had computed anew
    staleness: float
    staleness_max: int
    before_queue: float
    in_queue: float
    in_flight: float  # rollouts
    rollout_s: float
    tail: float  # of rollouts' seconds: the mean square over the square of the mean
    acknowledged_s: float  # from a rollout's end until it is on record
    timeline: tuple[tuple[float, float], ...] = field(default=(), repr=False)  # seconds, staleness


class _Sums:
    """What is counted from the first counted step on."""

    def __init__(self) -> None:
        self.update_s = self.wait_s = self.oldest_s = self.pause_s = 0.0
        self.trained = self.sampled = self.rollouts = self.searches = self.deliveries = 0
        self.stale = self.acknowledged_s = 0.0
        self.before = self.inside = self.batched = self.oldest = 0
        self.rollout_s = self.squares_s = 0.0
        self.seconds: Counter[int] = Counter()  # searches by second


class Meter:
    """Counts along with a simulation."""

    def __init__(self, scenario: Scenario) -> None:
        self._of, self.busy = scenario, 0
        self._sums = _Sums()
        self._begun_s = self._anew_s = 0.0
        self._in_flight, self._flight_area, self._flight_at_s = 0, 0.0, 0.0
        self._busy_area, self._busy_at_s = 0.0, 0.0
        self._steps: list[tuple[float, float]] = []
        self._newest = (0.0, 0.0)  # of the batch under way: tokens, and their staleness in all

    def begin(self, now_s: float, anew_s: float) -> None:
        """Count from here on."""
        self._sums, self._begun_s, self._anew_s = _Sums(), now_s, anew_s
        self.engines_busy(now_s, 0)
        self._flight(now_s, 0)
        self._busy_area = self._flight_area = 0.0
        self._steps = []

    def engines_busy(self, now_s: float, by: int) -> None:
        """So many engines more have something to run."""
        self._busy_area += self.busy * (now_s - self._busy_at_s)
        self._busy_at_s, self.busy = now_s, self.busy + by

    def _flight(self, now_s: float, by: int) -> None:
        self._flight_area += self._in_flight * (now_s - self._flight_at_s)
        self._flight_at_s, self._in_flight = now_s, self._in_flight + by

    def begun(self, now_s: float, rollouts: int) -> None:
        """Rollouts begin."""
        self._flight(now_s, rollouts)

    def delivered(self, now_s: float, seconds: float) -> None:
        """A rollout is on record."""
        self._flight(now_s, -1)
        self._sums.rollouts += 1
        self._sums.rollout_s += seconds
        self._sums.squares_s += seconds * seconds

    def sampled(self, tokens: int) -> None:
        """A turn's tokens."""
        self._sums.sampled += tokens

    def searched(self, now_s: float) -> None:
        """A search is asked."""
        self._sums.searches += 1
        self._sums.seconds[int(now_s - self._begun_s)] += 1

    def acknowledged(self, seconds: float) -> None:
        """A delivery takes this long."""
        self._sums.deliveries += 1
        self._sums.acknowledged_s += seconds

    def waited(self, seconds: float, oldest_s: float) -> None:
        """The learner waited for its batch."""
        self._sums.wait_s += seconds
        self._sums.oldest_s += oldest_s

    def batch(self, step: int, groups: Sequence[Group]) -> None:
        """The learner takes these, having completed `step`."""
        sums, tokens, stale = self._sums, 0, 0.0
        for group in groups:
            for rollout in group.rollouts:
                sampled = rollout.shape.sampled
                tokens += sampled
                stale += step * sampled - rollout.versions
                sums.before += group.closed_at - rollout.oldest
                sums.inside += step - group.closed_at
                sums.oldest = max(sums.oldest, step - rollout.oldest)
            sums.batched += len(group.rollouts)
        self._newest = tokens, stale

    def updated(self, seconds: float) -> None:
        """The learner has trained on the batch."""
        self._sums.update_s += seconds
        self._sums.trained += int(self._newest[0])
        self._sums.stale += self._newest[1]

    def paused(self, seconds: float) -> None:
        """New weights come in."""
        self._sums.pause_s += seconds

    def step(self, now_s: float) -> None:
        """A step is done."""
        tokens, stale = self._newest
        self._steps.append((now_s, stale / max(1.0, tokens)))

    def outcome(self, now_s: float, anew_s: float) -> Outcome:
        """The figures of everything since the first counted step."""
        self.engines_busy(now_s, 0)
        self._flight(now_s, 0)
        sums, engines = self._sums, self._of.engines.count
        seconds, steps = now_s - self._begun_s, len(self._steps)
        means = {"update_s": sums.update_s, "wait_s": sums.wait_s, "oldest_s": sums.oldest_s}
        of_step = {name: value / steps for name, value in means.items()}
        rollouts, batched = max(1, sums.rollouts), max(1, sums.batched)
        rollout_s = sums.rollout_s / rollouts
        return Outcome(
            steps=steps,
            step_s=seconds / steps,
            **of_step,
            rest_s=seconds / steps - of_step["update_s"] - of_step["wait_s"],
            pause_s=sums.pause_s / steps,
            trained_per_s=sums.trained / seconds,
            sampled_per_s=sums.sampled / seconds,
            rollouts_per_s=sums.rollouts / seconds,
            searches_per_s=sums.searches / seconds,
            searches_peak_per_s=float(max(sums.seconds.values(), default=0)),
            learner_idle=1.0 - sums.update_s / seconds,
            engine_idle=1.0 - self._busy_area / (seconds * engines),
            anew_share=(anew_s - self._anew_s) / (seconds * engines),
            staleness=sums.stale / max(1, sums.trained),
            staleness_max=sums.oldest,
            before_queue=sums.before / batched,
            in_queue=sums.inside / batched,
            in_flight=self._flight_area / seconds,
            rollout_s=rollout_s,
            tail=sums.squares_s / rollouts / rollout_s**2 if rollout_s else 1.0,
            acknowledged_s=sums.acknowledged_s / max(1, sums.deliveries),
            timeline=tuple((at_s - self._begun_s, stale) for at_s, stale in self._steps),
        )
