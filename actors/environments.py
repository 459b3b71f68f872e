"""The environments by their names, who makes them, and what must be true before any is made.

`search_r1` (tags), `tool_call` (the model's own chat template), the baselines `no_search` and
`rag`, and a user's own, `package.module:factory`: what `factory(lease, retriever=, prompter=,
config=)` gives is an Environment, or awaits one. Its attribute `stops`, where it has one, names the
texts at which completions end.
"""

import inspect
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.actions import ANSWER_END, STOP_TAGS
from actors.entry_points import load_entry_point
from actors.environment import Environment, Outcome, Retriever
from actors.policy import ActorError, EnvironmentFailed
from actors.prompt import Prompter
from actors.single import SingleCompletion
from actors.tags import TagEnvironment
from actors.tool_call import ToolCallEnvironment, calling_of
from actors.tools import load_tools
from actors.users_code import FAULTS, raise_if_cancelled
from configs.environment import EnvironmentConfig
from configs.load import ConfigError
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage, RetrievalError

T = TypeVar("T")
Factory = Callable[..., Environment | Awaitable[Environment]]
_BUILT_IN: dict[str, Factory] = {
    "search_r1": TagEnvironment,
    "tool_call": ToolCallEnvironment,
    "no_search": SingleCompletion.no_search,
    "rag": SingleCompletion.rag,
}


async def make(
    lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
) -> Environment:
    """The environment of one lease. Raises ConfigError for one that cannot be, RetrievalError, and
    EnvironmentFailed for a user's own that fails.
    """
    name = config.environment.name
    parts = {"retriever": retriever, "prompter": prompter, "config": config}
    if (factory := _BUILT_IN.get(name)) is not None:
        return await _made(factory, lease, parts)
    own = _own(name)
    with _Blaming(name):
        return _OwnEnvironment(name, await _made(own, lease, parts))


def stops_of(config: Config) -> tuple[str, ...]:
    """The texts at which completions end, beside the end token. Raises ConfigError."""
    name = config.environment.name
    if name == "search_r1":
        tools = load_tools(config.environment.tools)
        return (*STOP_TAGS, *(f"</{tool.name}>" for tool in tools))
    if name == "tool_call":
        return ()
    if name in _BUILT_IN:
        return (ANSWER_END,)
    stops = getattr(_own(name), "stops", STOP_TAGS)
    if not isinstance(stops, (tuple, list)) or not all(isinstance(e, str) and e for e in stops):
        raise ConfigError(
            f"environment.name = {name!r}: its stops = {stops!r}: give a tuple of texts"
        )
    return tuple(stops)


def searches(config: Config) -> bool:
    """Whether rollouts ask a retriever."""
    return config.environment.name != "no_search" and bool(config.retrieval.top_k)


def needs_chat_template(config: Config) -> bool:
    """Whether a tokenizer without a chat template is of no use here."""
    return config.environment.name == "tool_call" or bool(config.environment.system)


def check(config: Config, prompter: Prompter | None = None) -> None:
    """Raise ConfigError, naming the field, for an environment that could not be made; without a
    `prompter`, as far as that can be told without a tokenizer.
    """
    settings, questions = config.environment, config.questions
    if settings.name in _BUILT_IN:
        load_tools(settings.tools)
    else:
        stops_of(config)
    if settings.force_answer and not config.actors.max_turns:
        raise ConfigError(
            f"actors.max_turns = {config.actors.max_turns!r} with environment.force_answer: there "
            "is no observation to open the answer in: choose environment.name = 'no_search'"
        )
    if needs_chat_template(config):
        field = "name" if settings.name == "tool_call" else "system"
        why = f"environment.{field} = {getattr(settings, field)!r}"
        if not questions.chat_template:
            raise ConfigError(
                f"questions.chat_template = {questions.chat_template!r}: {why} needs it: set it to "
                "true"
            )
        if prompter is not None and not prompter.has_chat_template:
            raise ConfigError(
                f"model.path = {config.model.path!r}: its tokenizer has no chat template, which "
                f"{why} needs: name an instruct model, or change that"
            )
    if settings.name == "tool_call" and prompter is not None:
        calling_of(prompter, settings, config.model.path)


def require_acting(config: Config) -> None:
    """Raise ConfigError, naming the field, for a setting that acts on nothing where the policy is
    trained. (Evaluations put environments beside one another under one configuration.)
    """
    settings, plain = config.environment, EnvironmentConfig()
    if settings.name not in ("no_search", "rag"):
        return
    for name in ("tools", "queries_per_turn", "tell_budget", "force_answer"):
        if (value := getattr(settings, name)) != getattr(plain, name):
            raise ConfigError(
                f"environment.{name} = {value!r} acts on nothing with environment.name = "
                f"{settings.name!r}, whose policy has one completion: leave it out"
            )


async def _made(factory: Factory, lease: Lease, parts: dict[str, Any]) -> Environment:
    made = factory(lease, **parts)
    return await made if inspect.isawaitable(made) else made


@lru_cache
def _own(name: str) -> Factory:
    return load_entry_point("environment.name", name)


class _Blaming:
    """What a user's code raises inside becomes EnvironmentFailed; infrastructure's errors pass."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, FAULTS) and not isinstance(error, (ActorError, RetrievalError)):
            raise_if_cancelled(error)
            raise EnvironmentFailed(
                f"environment.name = {self._name!r}: {type(error).__name__}: {error}"
            ) from error


class _OwnEnvironment:
    """A user's environment, whose faults are named."""

    def __init__(self, name: str, made: Environment) -> None:
        self._name, self._made = name, made
        self.prompt = _tokens(made.prompt)
        self.passages = _all(Passage, "passages", tuple(getattr(made, "passages", ())))
        if not len(self.prompt):
            raise ValueError("prompt is empty")

    def budget(self, context_tokens: int) -> int:
        """What the user's says."""
        with _Blaming(self._name):
            return max(0, int(self._made.budget(context_tokens)))

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """What the user's says."""
        with _Blaming(self._name):
            return _checked(await self._made.step(action_tokens, context_tokens))


def _checked(given: Any) -> Outcome:
    """What a user's step gave. Raises TypeError or ValueError for what no trajectory could hold."""
    if not isinstance(given, Outcome):
        raise TypeError(f"step gave {given!r}, which is no Outcome")
    _tokens(given.observation_tokens)
    for name, kind in (("stop", StopReason), ("answer", str)):
        if not isinstance(value := getattr(given, name), kind | None):
            raise TypeError(f"{name} = {value!r} is neither {kind.__name__} nor None")
    if not isinstance(given.malformed, bool):
        raise TypeError(f"malformed = {given.malformed!r} is no bool")
    _all(Passage, "passages", given.passages)
    _all(Search, "searches", given.searches)
    (given.answer or "").encode()  # refuses a lone surrogate
    return given


def _all(kind: type[T], name: str, given: Any) -> tuple[T, ...]:
    if not isinstance(given, tuple) or not all(isinstance(each, kind) for each in given):
        raise TypeError(f"{name} = {given!r} is no tuple of {kind.__name__}")
    return given


def _tokens(given: Any) -> NDArray[np.int32]:
    if not isinstance(given, np.ndarray) or given.dtype != np.int32 or given.ndim != 1:
        raise TypeError(f"{given!r} is no int32[n] of token ids")
    return given
