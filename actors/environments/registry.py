"""The registry of environments: names, construction and checks before any is made.

`search_r1` (tags), `tool_call` (the model's chat template), the baselines `no_search` and `rag`,
and a user's own, `package.module:factory`; of `program`, which acts through the gateway alone, only
the settings are checked here. `factory(lease, retriever=, prompter=, config=)` returns
an Environment, or awaits one. Its optional attribute `stops` holds the texts at which completions
end. What it gives may lack `passages` and `close`.
"""

import asyncio
import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.environments.base import Environment, Outcome, Retriever
from actors.environments.baselines import SingleCompletion
from actors.environments.mcp_keys import require_found
from actors.environments.search_r1 import STOP_TAGS, TagEnvironment, stop_tags
from actors.environments.tool_call import ToolCallEnvironment, calling_of
from actors.environments.tools import load_tools
from actors.errors import ActorError, EnvironmentFailed
from actors.prompt import Prompter
from actors.user_code import FAULTS, load_entry_point, raise_if_cancelled, raised_at
from configs.environment import PROGRAM, EnvironmentConfig
from configs.load import ConfigError
from configs.schema import Config
from configs.section import Section
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage, RetrievalError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Factory = Callable[..., Environment | Awaitable[Environment]]
_BUILT_IN: dict[str, Factory] = {
    "search_r1": TagEnvironment,
    "tool_call": ToolCallEnvironment,
    "no_search": SingleCompletion.no_search,
    "rag": SingleCompletion.rag,
}
_OF_TURNS = ("tools", "mcp", "queries_per_turn", "tell_budget", "force_answer")


@asynccontextmanager
async def acting(
    lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
) -> AsyncIterator[Environment]:
    """Make an environment, and close it at the end, also of a rollout that fails or is cancelled.
    Raises what `make` does.
    """
    environment = await make(lease, retriever=retriever, prompter=prompter, config=config)
    try:
        yield environment
    finally:
        await _close(environment, config.environment)


async def make(
    lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
) -> Environment:
    """Make an environment, for whoever closes it. Raises ConfigError, RetrievalError, or
    EnvironmentFailed (a user's).
    """
    require_turns(config)
    name = config.environment.name
    if (built_in := _BUILT_IN.get(name)) is not None:
        made = built_in(lease, retriever=retriever, prompter=prompter, config=config)
        return await made if inspect.isawaitable(made) else made
    factory, stops = _custom(name), stops_of(config)
    with _NamingFaults(name):
        made = factory(lease, retriever=retriever, prompter=prompter, config=config)
        made = await made if inspect.isawaitable(made) else made
        try:
            return _CustomEnvironment(name, made, stops)
        except FAULTS:
            await _close(_Closing(name, made), config.environment)
            raise


def stops_of(config: Config) -> tuple[str, ...]:
    """Return the `stops` of the configuration's environments. Raises ConfigError."""
    name = config.environment.name
    if name == "search_r1":
        return stop_tags(tool.name for tool in load_tools(config.environment))
    if name == "tool_call":
        return ToolCallEnvironment.stops
    if name in _BUILT_IN:
        return SingleCompletion.stops
    if name == PROGRAM:
        return ()  # each call says its own
    stops = getattr(_custom(name), "stops", STOP_TAGS)
    if not isinstance(stops, (tuple, list)) or not all(isinstance(e, str) and e for e in stops):
        raise ConfigError(
            f"environment.name = {name!r}: its stops = {stops!r}: give a tuple of texts"
        )
    return tuple(stops)


def searches(config: Config) -> bool:
    """True where rollouts ask a retriever: their own server, or what answers in its place."""
    answered = config.starts_retrieval_server or not config.retrieval.has_own_server
    return bool(config.environment.name != "no_search" and config.retrieval.top_k and answered)


def require_turns(config: Config) -> None:
    """Raise ConfigError for an environment that cannot be played turn by turn."""
    if config.environment.name == PROGRAM:
        raise ConfigError(
            "environment.name = 'program': a program is not played turn by turn here: run it in "
            "forage train, sync, evaluate or try, or name another environment"
        )


def needs_chat_template(config: Config) -> bool:
    """True where the tokenizer must have a chat template."""
    return config.environment.name == "tool_call" or bool(config.environment.system)


def check(config: Config, prompter: Prompter | None = None) -> None:
    """Raise ConfigError, naming the field, for an environment that could not be made; without a
    `prompter`, as far as can be told without a tokenizer.
    """
    settings, questions = config.environment, config.questions
    if settings.name in _BUILT_IN:
        require_found(config)
        load_tools(settings)
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
    """Raise ConfigError, naming the field, for a setting that acts on nothing in training.
    (Evaluations compare environments under one configuration.)
    """
    settings, plain = config.environment, EnvironmentConfig()
    if settings.name == PROGRAM:
        _require_acting_beside_a_program(config)
    require_program(config)
    if settings.name in _BUILT_IN and (weight := config.rewards.weights.environment):
        raise ConfigError(
            f"rewards.weights.environment = {weight!r} acts on nothing with environment.name = "
            f"{settings.name!r}, which gives no rewards: set it to 0, or name an environment of "
            "your own"
        )
    if settings.name in _BUILT_IN and (credit := config.learner.turn_credit):
        raise ConfigError(
            f"learner.turn_credit = {credit!r} acts on nothing with environment.name = "
            f"{settings.name!r}, whose turns earn nothing: set it to 0, or name an environment of "
            "your own"
        )
    if settings.name not in ("no_search", "rag"):
        return
    for name in _OF_TURNS:
        if (value := getattr(settings, name)) != getattr(plain, name):
            raise ConfigError(
                f"environment.{name} = {value!r} acts on nothing with environment.name = "
                f"{settings.name!r}, whose policy has one completion: leave it out"
            )


def require_program(config: Config) -> None:
    """Raise ConfigError for a setting of programs where the environment is none."""
    settings = config.environment
    field = _changed(settings.program, EnvironmentConfig().program)
    if field and settings.name != PROGRAM:
        raise ConfigError(
            f"environment.program.{field} = {getattr(settings.program, field)!r} acts on nothing "
            f"with environment.name = {settings.name!r}: set environment.name=program, or leave "
            f"environment.program.{field} out"
        )


def _changed(given: Section, usual: Section) -> str | None:
    """The first field that differs."""
    names = given.__struct_fields__
    return next((name for name in names if getattr(given, name) != getattr(usual, name)), None)


def _require_acting_beside_a_program(config: Config) -> None:
    settings, plain = config.environment, EnvironmentConfig()
    given = {f"environment.{name}": getattr(settings, name) for name in (*_OF_TURNS, "system")}
    usual = {f"environment.{name}": getattr(plain, name) for name in (*_OF_TURNS, "system")}
    given["actors.shuffle_passages"] = config.actors.shuffle_passages
    for field, value in given.items():
        if value != usual.get(field, False):
            raise ConfigError(
                f"{field} = {value!r} acts on nothing with environment.name = 'program', which "
                "makes its own prompts and shows what it finds itself: leave it out, or set it to "
                f"{usual.get(field, False)!r}"
            )


@lru_cache
def _custom(name: str) -> Factory:
    return load_entry_point("environment.name", name)


async def _close(environment: "Environment | _Closing", asked: EnvironmentConfig) -> None:
    """Close an environment. Its rollout stands whatever comes of that, which the log says; who is
    cancelled meanwhile is so once it is closed, or `environment.close_deadline_s` is over.
    """
    closing = asyncio.ensure_future(environment.close())
    ends, cancelled = time.monotonic() + asked.close_deadline_s, None
    while not closing.done() and (left_s := ends - time.monotonic()) > 0.0:
        try:
            await asyncio.wait({closing}, timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if not closing.done():
        closing.cancel()
        limit = f"{asked.close_deadline_s:g} s (environment.close_deadline_s)"
        logger.warning("environment.name = %r: its close took over %s", asked.name, limit)
    elif closing.cancelled():
        logger.warning("environment.name = %r: its close was cancelled", asked.name)
    elif (fault := closing.exception()) is not None:
        logger.warning("its close failed: %s", fault)
    if cancelled is not None:
        raise cancelled


class _NamingFaults:
    """Turns errors of a user's code into EnvironmentFailed; infrastructure's errors pass."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, FAULTS) and not isinstance(error, (ActorError, RetrievalError)):
            raise_if_cancelled(error)
            raise EnvironmentFailed(
                f"environment.name = {self._name!r}: {type(error).__name__}: {error}"
                f"{raised_at(self._name, error)}"
            ) from error


class _Closing:
    """A user's environment as what can be closed, whether or not it says how."""

    def __init__(self, name: str, made: Any) -> None:
        self._name, self._made = name, made

    async def close(self) -> None:
        """Close it, if it can be. Raises EnvironmentFailed."""
        with _NamingFaults(self._name):
            close = getattr(self._made, "close", None)
            closing = close() if close is not None else None
            if inspect.isawaitable(closing):
                await closing


class _CustomEnvironment(_Closing):
    """A user's environment, its faults named and its values checked."""

    def __init__(self, name: str, made: Environment, stops: tuple[str, ...]) -> None:
        super().__init__(name, made)
        self.stops = stops
        self.prompt = _tokens(made.prompt)
        self.passages = _all(Passage, "passages", tuple(getattr(made, "passages", ())))
        if not len(self.prompt):
            raise ValueError("prompt is empty")

    def budget(self, context_tokens: int) -> int:
        """Return the user's budget, not below 0."""
        with _NamingFaults(self._name):
            return max(0, int(self._made.budget(context_tokens)))

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """Step the user's environment."""
        with _NamingFaults(self._name):
            return _checked(await self._made.step(action_tokens, context_tokens))


def _checked(given: Any) -> Outcome:
    """Check a user's outcome. Raises TypeError or ValueError where no trajectory could hold it."""
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
    if not math.isfinite(reward := _number(given.reward)):
        raise ValueError(f"reward = {given.reward!r} is no finite number")
    if not isinstance(given.info, Mapping):
        raise TypeError(f"info = {given.info!r} is no mapping")
    msgspec.json.encode(given.info)  # refuses what JSON cannot hold
    (given.answer or "").encode()  # refuses a lone surrogate
    return replace(given, reward=reward)


def _number(value: Any) -> float:
    """The float of any real number, NumPy's too; NaN for what is none, or beyond all floats."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan


def _all(kind: type[T], name: str, given: Any) -> tuple[T, ...]:
    if not isinstance(given, tuple) or not all(isinstance(each, kind) for each in given):
        raise TypeError(f"{name} = {given!r} is no tuple of {kind.__name__}")
    return given


def _tokens(given: Any) -> NDArray[np.int32]:
    if not isinstance(given, np.ndarray) or given.dtype != np.int32 or given.ndim != 1:
        raise TypeError(f"{given!r} is no int32[n] of token ids")
    return given
