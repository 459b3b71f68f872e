"""The rules of the sentinels: each a gauge, a bound on its median over a window, a warm-up.

A rule is a pure function of the values that its gauge has had. Nothing here imports torch: the
console reads the rules too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

WINDOW = 10
REWARD = ("actor/reward", "learner/reward")


@dataclass(frozen=True)
class Rule:
    """One sign that a run goes wrong: the median of the newest `window` values lies `side` of the
    bound, which is `limit`, or with a `warm_up` that many times the median of the first so many
    values that are not 0: there is none where that is not above 0. `means` and `remedy` are said.
    """

    gauge: str
    side: Literal["above", "below"]
    limit: float
    means: str
    remedy: str
    window: int = WINDOW
    warm_up: int = 0
    rewarded: float | None = None  # silent while the reward's median is above this, of at most 1

    @property
    def watched(self) -> tuple[str, ...]:
        """All gauges that it looks at."""
        return (self.gauge,) if self.rewarded is None else (self.gauge, *REWARD)

    def bound(self, values: Sequence[float]) -> float | None:
        """What the median is held against; None while the warm-up lasts, or where it tells none."""
        if not self.warm_up:
            return self.limit
        first = values[: self.warm_up]
        usual = median(first) if len(first) == self.warm_up else 0.0
        return self.limit * usual if usual > 0.0 else None

    def fires(self, values: Sequence[float], rewards: Sequence[float] = ()) -> bool:
        """Judge all values so far, oldest first, and the rewards of those steps; there are no
        zeros in the warm-up.
        """
        bound = self.bound(values)
        if bound is None or len(values) < self.warm_up + self.window:
            return False
        earned = median(rewards[-self.window :]) if rewards else 0.0
        if self.rewarded is not None and earned > self.rewarded:
            return False
        now = median(values[-self.window :])
        return now > bound if self.side == "above" else now < bound

    @property
    def condition(self) -> str:
        """The rule in words."""
        of = f" times its first {self.warm_up}" if self.warm_up else ""
        also = "" if self.rewarded is None else f", reward at most {self.rewarded:g}"
        return f"{self.side} {self.limit:g}{of} over {self.window} steps{also}"


def reward_of(gauges: Mapping[str, float]) -> float | None:
    """The mean reward of a step's rollouts: of all, else of those trained; None without either."""
    return next((gauges[name] for name in REWARD if name in gauges), None)


OLD_DATA = "lower replay.max_staleness or learner.lr"
RULES = {
    "ess": Rule(
        gauge="learner/current_ess",
        side="below",
        limit=0.8,
        means="a fifth of the batch no longer counts: the policy has left the one that sampled",
        remedy=f"{OLD_DATA}, or correct more (learner.behaviour_weight)",
    ),
    "mismatch": Rule(
        gauge="learner/mismatch",
        side="above",
        limit=0.1,
        means="engine and learner disagree about fresh tokens, under the same weights",
        remedy="give both one dtype (actors.dtype, model.head_dtype), or use float32",
    ),
    "entropy": Rule(
        gauge="learner/entropy",
        side="below",
        limit=0.05,
        warm_up=10,
        means="the policy tries nothing new any more",
        remedy="lower learner.lr, raise learner.entropy_coef or learner.clip_high",
        rewarded=0.8,
    ),
    "grad_norm": Rule(
        gauge="learner/grad_norm",
        side="above",
        limit=10.0,
        warm_up=10,
        window=5,
        means="gradients are ten times what they were",
        remedy="lower learner.lr, or raise learner.warmup_steps",
    ),
    "likelihood": Rule(
        gauge="learner/likelihood_change_positive",
        side="below",
        limit=-0.05,
        means="rewarded actions become unlikely",
        remedy=f"{OLD_DATA}, or guard them (learner.guard)",
    ),
    "no_signal": Rule(
        gauge="replay/no_signal_fraction",
        side="above",
        limit=0.95,
        means="rewards are alike in nearly all groups: nothing can be learnt",
        remedy="begin with a warm start where rewards are low, else take harder questions",
        rewarded=0.95,
    ),
    "repeated_queries": Rule(
        gauge="learner/repeated_queries",
        side="above",
        limit=0.3,
        means="rollouts search again for what they have searched for",
        remedy="lower actors.max_turns, or reward what searches find",
    ),
    "empty_searches": Rule(
        gauge="learner/empty_searches",
        side="above",
        limit=0.5,
        means="half of the searches find nothing",
        remedy="ask the retrieval server yourself, and look at retrieval.corpus",
    ),
    "searches": Rule(
        gauge="learner/searches_per_rollout",
        side="below",
        limit=0.2,
        warm_up=10,
        means="the policy has nearly stopped to search",
        remedy="read some rollouts: is a guess rewarded as well? else lower learner.lr",
    ),
    "malformed": Rule(
        gauge="learner/malformed_fraction",
        side="above",
        limit=0.5,
        means="half of the turns are neither a search nor an answer",
        remedy="begin with a warm start; if it was better before, lower learner.lr",
    ),
    "repetition": Rule(
        gauge="learner/repetition",
        side="above",
        limit=0.3,
        means="completions say the same again and again",
        remedy="read some rollouts: is length rewarded? else lower learner.lr",
    ),
    "truncation": Rule(
        gauge="learner/limit_fraction",
        side="above",
        limit=0.5,
        means="half of the rollouts end at a limit, without an answer",
        remedy="raise actors.max_turns or model.max_model_len",
    ),
}


def gauge_of(name: str) -> str:
    """The gauge of a rule's own: 1 where it fires, else 0."""
    return f"learner/sentinel_{name}"


def median_of(name: str) -> str:
    """The gauge of what a rule that fires has judged: the median over its window."""
    return f"learner/sentinel_{name}_median"


ROLLBACKS = "learner/rollbacks"  # how many have been made
ROLLED_BACK_TO = "learner/rolled_back_to"  # in the step of one: whose weights were taken up
RATE_SCALE = "learner/rate_scale"  # of the configured rates, from the next step on


def rolled_back(step: int, gauges: Mapping[str, float]) -> str:
    """What a step's gauges say of a rollback; empty where there was none."""
    if (to := gauges.get(ROLLED_BACK_TO)) is None:
        return ""
    return rollback_said(int(gauges[ROLLBACKS]), step, int(to), gauges[RATE_SCALE])


def rollback_said(number: int, step: int, to: int, scale: float) -> str:
    """What is said of a rollback, wherever it is told."""
    return (
        f"rollback {number} at step {step}: weights of step {to} restored; learning rate "
        f"{scale:.3g} times the configured one from step {step + 1}"
    )


def said(name: str, step: int, judged: float | None) -> str:
    """What a rule says at a step, given the median that it judged, the remedy included."""
    rule = RULES[name]
    now = "" if judged is None else f"{rule.gauge} at {judged:.3g}, "
    return (
        f"sentinel {name} at step {step}: {rule.means} ({now}{rule.condition}): {rule.remedy} "
        "(docs/sentinels.md)"
    )


class Announcer:
    """Finds the sentinels that begin to fire, in the gauges of one step after the other."""

    def __init__(self) -> None:
        self._fired: set[str] = set()

    def lines(self, step: int, gauges: Mapping[str, float]) -> list[str]:
        """What those say that do not fire since the step before, and that the learner goes back."""
        fired = {name for name in RULES if gauges.get(gauge_of(name))}
        begun, self._fired = sorted(fired - self._fired), fired
        lines = [said(name, step, gauges.get(median_of(name))) for name in begun]
        back = rolled_back(step, gauges)
        return [*lines, back] if back else lines
