"""Errors of this package. Each ends a rollout as a failed lease: none is the policy's own fault, so
none becomes a reward or text in a trajectory.
"""

_CAUSE_CHARS = 1000


class ActorError(Exception):
    """Root of this package's errors.

    ActorError
    ├── PromptTooLong         the question leaves no room for a completion
    ├── UnverifiedWeights     a rollout holds tokens of weights that did not pass their probe
    ├── TokenMismatch         a rollout's record is not what went through the policy
    ├── TooManyCalls          a program's calls are more than a record holds
    ├── Unscorable            a part of the reward cannot be told; it never leaves `rewards`
    ├── ToolFailed            a user's tool raised or took too long (tool_errors = fail)
    ├── EnvironmentFailed     a user's environment raised, or gave no Outcome
    ├── ProgramFailed         a program ended with an error, late, or without a call of the policy
    └── PolicyError
        ├── EngineUnusable    the engine cannot start in this installation; names the remedy
        ├── EngineDead        the engine's process is gone
        ├── GenerationFailed  the engine gave a completion up
        └── BadCompletion     the engine's reply contradicts itself
    """


class PromptTooLong(ActorError):
    """The question alone leaves no room for a completion."""


class UnverifiedWeights(ActorError):
    """A finished rollout holds tokens of weights that did not pass their probe."""


class TokenMismatch(ActorError):
    """A rollout's record is not, id for id, what went through the policy."""


class TooManyCalls(ActorError):
    """A program's calls, or what else it did, are more than a record holds."""


class Unscorable(ActorError):
    """A part of a finished rollout's reward cannot be told, through no fault of the policy's.

    `whose`: what failed, in a word, as it is counted: question, judge, similarity, custom, sum.
    """

    def __init__(self, whose: str, cause: str) -> None:
        super().__init__(cause)
        self.whose = whose


class ToolFailed(ActorError):
    """A user's tool raised or took too long, and `environment.tool_errors` fails the lease."""


class EnvironmentFailed(ActorError):
    """A user's environment raised, or gave no Outcome: its owner's fault."""


class ProgramFailed(ActorError):
    """A program could not be run, ended with an error, was late, or never asked the policy.

    `errors`: the end of what it said on standard error.
    """

    def __init__(self, cause: str, errors: str = "") -> None:
        super().__init__(cause)
        self.errors = errors


class PolicyError(ActorError):
    """The policy could not complete; infrastructure's fault."""


class EngineUnusable(PolicyError):
    """The engine cannot start in this installation; the message names the remedy."""


class EngineDead(PolicyError):
    """The engine's process is gone: nothing can be completed any more."""


class GenerationFailed(PolicyError):
    """The engine gave a completion up."""


class BadCompletion(PolicyError):
    """The engine's reply contradicts itself: lengths, ids or versions."""


def recordable(cause: str) -> str:
    """Return a cause as it goes on record: cut, and valid Unicode, whatever words are in it."""
    return cause[:_CAUSE_CHARS].encode(errors="replace").decode()
