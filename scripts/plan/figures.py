"""A plan: the figures of the simulation and what follows from them."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from scripts.plan import hardware
from scripts.plan.outcome import Outcome
from scripts.plan.scenario import Scenario
from scripts.plan.split import Split
from scripts.runs.forecast import Forecast, forecast
from scripts.setup.memory import Reckoned

BUSY = 0.9  # a server above this share of its time is what there is to wait for
FULL = 0.95


@dataclass(frozen=True)
class Planned:
    """A configuration on a machine. `unheld_per_s`: rollouts/s of its engines where nothing holds
    them up.
    """

    name: str
    gpus: int
    found: Reckoned
    scenario: Scenario
    outcome: Outcome
    unheld_per_s: float
    split: Split | None

    @property
    def fits(self) -> bool:
        """True where every GPU can hold what lies on it."""
        return self.found.fits

    @cached_property
    def learner_per_s(self) -> float:
        """Rollouts/s that the learner could train."""
        scenario = self.scenario
        published_s = scenario.learner.publish_s / scenario.rules.publish_every
        spent_s = scenario.update_s + published_s
        return scenario.batch / spent_s if spent_s else math.inf

    @property
    def ratio(self) -> float:
        """What the engines could roll out over what the learner could train."""
        return self.unheld_per_s * (1 - self.scenario.workload.no_signal) / self.learner_per_s

    @property
    def forecast(self) -> Forecast:
        """The published forecast of staleness at these rollouts in flight."""
        return self._forecast(self.ratio)

    @property
    def held_forecast(self) -> Forecast:
        """The same of engines that are held back, as Forage's are, to what the learner trains."""
        return self._forecast(min(1.0, self.ratio))

    def _forecast(self, ratio: float) -> Forecast:
        batch, bound = self.scenario.batch, self.scenario.rules.max_staleness
        return forecast(
            concurrency=self.outcome.in_flight,
            batch=batch,
            ratio=ratio,
            queue=max(0.0, bound - self.outcome.in_flight / batch),
            tail=self.outcome.tail,
        )

    @property
    def replay_per_s(self) -> float:
        """Trajectories/s of the one replay server."""
        return 1.0 / self.scenario.delivery_s

    @property
    def replay_share(self) -> float:
        """Of its time that it is busy."""
        return self.outcome.rollouts_per_s / self.replay_per_s

    @property
    def replay_ends_at(self) -> int:
        """About the actors of this kind that fill it."""
        per_actor = self.outcome.rollouts_per_s / self.scenario.engines.count
        tokens, actors = self.scenario.workload.tokens, self.scenario.engines.count
        for _ in range(20):  # the server is the slower the more actors it has
            actors = max(1, int(hardware.replay_per_s(actors, tokens) / max(per_actor, 1e-9)))
        return actors

    def tree(self) -> dict[str, Any]:
        """All of it, for JSON."""
        split = self.split
        best = split and {"ranks": split.ranks, "actors": split.actors} | asdict(split.outcome)
        return {
            "machine": self.name,
            "gpus": self.gpus,
            "fits": self.fits,
            "figures": asdict(self.outcome),
            "learner_rollouts_per_s": self.learner_per_s,
            "engine_rollouts_per_s": self.unheld_per_s,
            "ratio": self.ratio,
            "forecast": self.forecast._asdict(),
            "held_forecast": self.held_forecast._asdict(),
            "replay": {
                "rollouts_per_s": self.replay_per_s,
                "share": self.replay_share,
                "ends_at_actors": self.replay_ends_at,
            },
            "gpu_bytes": self.found.gpus,
            "scenario": self._scenario(),
            "split": best,
            "says": list(self.says()),
        }

    def _scenario(self) -> dict[str, Any]:
        """What was simulated, its rollouts by their means."""
        scenario, work = self.scenario, self.scenario.workload
        means = ("sampled_tokens", "tokens", "searches", "turns", "no_signal")
        parts = ("engines", "learner", "rules", "sync")
        return {name: asdict(getattr(scenario, name)) for name in parts} | {
            "update_s": scenario.update_s,
            "delivery_s": scenario.delivery_s,
            "workload": {name: getattr(work, name) for name in means} | asdict(work.latency),
        }

    def says(self) -> Iterator[str]:
        """Yield what bounds the run, and what to do about it."""
        yield self._bound()
        yield from self._idle_actors()
        yield self._replay()
        yield self._searches()

    def _bound(self) -> str:
        found = self.outcome
        if self.replay_share > FULL:
            return "The replay server is what there is to wait for."
        if found.learner_idle < 1 - BUSY:
            return "The learner is what there is to wait for: more actors do not help."
        if found.oldest_s > found.wait_s / 2:
            return (
                "The slowest rollouts are what there is to wait for: max_staleness lets no batch "
                "pass them. Raise replay.max_staleness, or make searches faster."
            )
        if found.engine_idle < 1 - BUSY:
            return "The engines are what there is to wait for: add actors."
        held = self.scenario.engines.count * self.scenario.engines.capacity
        if found.in_flight < held * BUSY:
            return (
                "Admission is what there is to wait for: replay.max_staleness holds engines back "
                "from the next steps' groups. Raise it, or replay.groups_per_step."
            )
        return (
            "Searches are what there is to wait for: engines stand idle while rollouts search. "
            "Raise actors.rollouts_in_flight, or make searches faster."
        )

    def _idle_actors(self) -> Iterator[str]:
        rules, engines = self.scenario.rules, self.scenario.engines
        admitted = (rules.max_staleness + 1) * rules.groups_per_step
        each = max(1, engines.capacity // rules.group_size)
        if engines.count * each > admitted:
            yield (
                f"Admission lets {admitted:,} groups be under way, which {-(-admitted // each):,} "
                f"of {engines.count:,} actors hold: raise replay.groups_per_step."
            )

    def _replay(self) -> str:
        share, ends = self.replay_share, self.replay_ends_at
        tokens = self.scenario.workload.sampled_tokens
        full = hardware.replay_per_s(ends, self.scenario.workload.tokens)
        if share > FULL:
            return (
                f"The one replay server is full at {self.replay_per_s:,.0f} trajectories/s, about "
                f"{ends:,} actors of this kind: more add no tokens. A rollout that has ended waits "
                f"{self.outcome.acknowledged_s:.2g} s for its acknowledgement, and every 1,000 "
                f"more in flight add {1000 / full:.2g} s. Fewer and longer rollouts, or several "
                "runs, go on from there."
            )
        return (
            f"The one replay server is busy for {100 * share:.2g} % of the time, and full with "
            f"about {ends:,} actors of this kind: {full:,.0f} trajectories/s, "
            f"{full * tokens:,.0f} sampled tokens/s; behind that every 1,000 rollouts more in "
            f"flight wait {1000 / full:.2g} s longer for their acknowledgement, and add no tokens."
        )

    def _searches(self) -> str:
        peak = self.outcome.searches_peak_per_s
        if not peak:
            return "No searches."
        count = {name: max(1, math.ceil(peak / rate)) for name, rate in hardware.SERVERS.items()}
        return (
            f"Of retrieval servers on two cores each, the fullest second takes {count['bm25']:,} "
            f"by BM25 or {count['dense']:,} by vectors on a CPU."
        )
