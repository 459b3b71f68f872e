"""The section `sentinels`: the answer to each sign that a run goes wrong. A leaf module."""

from typing import Annotated, Literal

from msgspec import Meta

from configs.section import CHANGEABLE, FALSE_IS_OFF, Positive, Section

# warn: a line on the console, a gauge in the log; stop: the run ends too, in order; rollback: the
# learner takes up its last good checkpoint, at a lower rate, and the run goes on
Action = Annotated[Literal["off", "warn", "stop", "rollback"], CHANGEABLE, FALSE_IS_OFF]

NO_GROUPS = ("none", "critic")  # values of learner.baseline that learn from equal rewards too


class SentinelsConfig(Section, frozen=True):
    """The rules of docs/sentinels.md (learner/health/rules.py), by name."""

    ess: Action = "warn"  # the policy has left the one that sampled
    mismatch: Action = "warn"  # engine and learner disagree under the same weights
    entropy: Action = "warn"  # the policy tries nothing new any more
    grad_norm: Action = "warn"  # gradients are far larger than they were
    likelihood: Action = "warn"  # rewarded actions become unlikely
    no_signal: Action = "warn"  # rewards are alike in nearly all groups
    repeated_queries: Action = "warn"  # rollouts ask again what they have asked
    empty_searches: Action = "warn"  # searches find nothing
    searches: Action = "warn"  # the policy stops to search
    malformed: Action = "warn"  # turns are neither a search nor an answer
    repetition: Action = "warn"  # completions say the same again and again
    truncation: Action = "warn"  # rollouts end at a limit
    # each rollback multiplies learner.lr and learner.critic.lr by this
    rollback_rate: Annotated[float, Meta(gt=0.0, le=1.0), CHANGEABLE] = 0.5
    rollbacks: Annotated[Positive, CHANGEABLE] = 3  # of a run at most; then it is stopped

    @property
    def roll_back(self) -> tuple[str, ...]:
        """The rules that have the learner go back."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) == "rollback")
