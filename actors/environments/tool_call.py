"""`tool_call`: the policy searches and uses tools by the calls that its own chat template teaches.

A turn ends by the model's end token. Its closed calls outside of thoughts are executed, at most
`environment.queries_per_turn` queries and uses of tools altogether, and each is answered by a tool
message; one that cannot be parsed, names no tool or gives other arguments is answered by a
correction and costs the turn too. A turn without a call ends the rollout, and its last `<answer>`
pair is the answer, as in verl; so does the turn after the last one that may call.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.answers import extract_answer
from actors.environments.base import (
    NOTHING,
    Outcome,
    Retriever,
    Searching,
    budget_told,
    completion_budget,
    instructed,
)
from actors.environments.chat import (
    OWN,
    Call,
    Chat,
    ToolMessage,
    begins_call,
    call_mark,
    format_of,
    opens_thought,
    parse_calls,
    texts_of,
    without_thoughts,
)
from actors.environments.schema import WrongArguments
from actors.environments.search_r1 import Answer, Malformed, parse_opened_answer
from actors.environments.toolbox import Toolbox, together
from actors.environments.tools import Tool, load_tools
from actors.environments.vllm_formats import VllmFormat
from actors.prompt import Prompter, Tokens, end_tokens
from configs import prompts
from configs.environment import EnvironmentConfig
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage


class Quoting(str):
    """A correction that quotes the policy: plain text, no special token in it."""


# A correction, queries, or a tool and its arguments.
Reply = str | list[str] | tuple[Tool, dict[str, Any]]


class Calling:
    """The chat template, format and tools that all rollouts of a process share."""

    def __init__(self, prompter: Prompter, settings: EnvironmentConfig, model_path: str) -> None:
        """Raises ConfigError for a chat template or a tool that cannot be used."""
        tools = load_tools(settings)
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = [prompts.SEARCH_TOOL, *(tool.schema for tool in self.tools.values())]
        self._most = settings.queries_per_turn + 1  # one more, to be told that it is too many
        self.system = settings.system or prompts.TOOL_CALL_SYSTEM
        self.chat = Chat(prompter, self.schemas, self.system, model_path)
        format = format_of(prompter, self.schemas, settings.tool_format, model_path)
        self._own = next((own for own in OWN if own == format), None)
        if self._own is None:
            self._vllm = VllmFormat(format, prompter.tokenizer, self.schemas)
            self._mark = call_mark(prompter, self.schemas)
        self._ends = [prompter.decode([end]) for end in end_tokens(prompter, model_path)]

    def read(self, text: str) -> list[Reply]:
        """Parse the calls of a turn's own text; so many that an observation stays short."""
        if self._own is not None:
            calls = parse_calls(text, self._own)
        else:
            calls = self._vllm.calls(self._without_end(text))
        return [self._read(call) for call in calls[: self._most]]

    def begins(self, text: str) -> bool:
        """True where a call begins in the text, closed or not."""
        if self._own is not None:
            return begins_call(text, self._own)
        return bool(self._mark) and self._mark in text

    @property
    def broken(self) -> str:
        """The correction of a call that cannot be read."""
        return prompts.BROKEN_CALL if self._own is not None else prompts.BROKEN_FOREIGN_CALL

    def _without_end(self, text: str) -> str:
        end = next((end for end in self._ends if end and text.endswith(end)), "")
        return text.removesuffix(end)

    def _read(self, call: Call | Malformed) -> Reply:
        if isinstance(call, Malformed):
            return self.broken
        if call.name == "search":
            queries = texts_of(call.arguments.get("query_list"))
            if queries and len(call.arguments) == 1:
                return queries
            return _wrong_arguments("search", "query_list, a list of texts")
        if (tool := self.tools.get(call.name)) is None:
            return prompts.UNKNOWN_TOOL.format(names=", ".join(("search", *self.tools)))
        try:
            return tool, tool.arguments.read(call.arguments)
        except WrongArguments as error:
            return Quoting(prompts.WRONG_FOR_TOOL.format(name=tool.name, error=error))


def calling_of(prompter: Prompter, settings: EnvironmentConfig, model_path: str) -> Calling:
    """Return the process's one Calling. Raises ConfigError."""
    return _calling(prompter, msgspec.json.encode(settings), model_path)


@lru_cache(8)
def _calling(prompter: Prompter, settings: bytes, model_path: str) -> Calling:
    return Calling(prompter, msgspec.json.decode(settings, type=EnvironmentConfig), model_path)


class ToolCallEnvironment:
    """Executes one rollout's calls. Use once."""

    stops: tuple[str, ...] = ()

    def __init__(
        self, lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
    ) -> None:
        self._config, self._settings, self._prompter = config, config.environment, prompter
        self._calling = calling_of(prompter, self._settings, config.model.path)
        self._searching = Searching(lease, retriever, config)
        self._box = Toolbox(lease, self._calling.tools.values(), self._settings)
        self._turn, self._opened = 0, False
        self.passages: tuple[Passage, ...] = ()
        self.prompt = prompter.question(
            lease.question,
            instructed(prompts.TOOL_CALL_PROMPT, self._settings),
            system=self._calling.system,
            tools=self._calling.schemas,
            searches=config.actors.max_turns,
        )
        self._thinking = opens_thought(prompter, self.prompt)

    def budget(self, context_tokens: int) -> int:
        """Return the most tokens of the next completion; 0 where the model has no room for one."""
        return completion_budget(self._config, context_tokens)

    async def close(self) -> None:
        """Close the state of tools."""
        await self._box.close()

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """Act on the tokens just sampled; `context_tokens` counts everything up to their end."""
        text = self._prompter.decode(action_tokens)
        turn, self._turn = self._turn, self._turn + 1
        last = turn >= self._config.actors.max_turns
        said = without_thoughts(text, self._thinking)
        replies = [] if self._opened else self._calling.read(said)
        if not replies and (outcome := self._ended(text, said, last)) is not None:
            return outcome
        replies = replies or [self._calling.broken]
        malformed = any(isinstance(each, str) for each in replies)
        if last:
            return Outcome(NOTHING, malformed=malformed, stop=StopReason.TURN_LIMIT)
        messages, searches, passages = await self._replied(replies, turn)
        info = self._box.noted()
        left = self._config.actors.max_turns - turn - 1
        opened = self._settings.force_answer and not left
        after = self._prompter.text(self._settings.force_template) if opened else NOTHING
        if self._settings.tell_budget:
            messages[-1][1].append(self._own(f"\n{budget_told(self._settings, left).rstrip()}"))
        observation = self._calling.chat.observation(action_tokens, messages, after)
        if not self.budget(context_tokens + len(observation)):
            return Outcome(NOTHING, searches, malformed, StopReason.CONTEXT_LIMIT, info=info)
        self._opened, self._thinking = opened, opens_thought(self._prompter, observation)
        return Outcome(observation, searches, malformed, passages=passages, info=info)

    def _ended(self, text: str, said: str, last: bool) -> Outcome | None:
        """Return the end by a turn without a closed call; None where a call was begun. `said`: the
        text without its thoughts.
        """
        if self._opened:
            action = parse_opened_answer(text)
            answer = action.text if isinstance(action, Answer) else None
        else:
            answer = extract_answer(text)
        if answer is not None:
            stop = StopReason.ANSWERED
            return Outcome(NOTHING, stop=stop, answer=answer, opened=self._opened)
        if not last and self._calling.begins(said):
            return None
        stop = StopReason.TURN_LIMIT if last else StopReason.UNANSWERED
        return Outcome(NOTHING, malformed=True, stop=stop)

    async def _replied(
        self, replies: Sequence[Reply], turn: int
    ) -> tuple[list[ToolMessage], tuple[Search, ...], tuple[Passage, ...]]:
        """Return the tool messages, the searches, and the passages shown. All are done at once."""
        allowed = _limited(replies, self._settings.queries_per_turn)
        queries = [query for each in allowed if isinstance(each, list) for query in each]
        uses = [each for each in allowed if isinstance(each, tuple)]
        (searches, groups), results = await together(
            self._searching.search(queries, turn),
            together(*(self._box.use(*each) for each in uses)),
        )
        following, used, said = iter(groups), iter(results), list[ToolMessage]()
        for asked, each in zip(replies, allowed, strict=True):
            if isinstance(each, str):  # some templates want every message named
                said.append(("search", [self._correction(each)]))
                continue
            if isinstance(each, tuple):
                said.append((each[0].name, [self._foreign(next(used).strip())]))
                continue
            found: list[list[Passage]] = [next(following, []) for _ in each]
            pieces = self._prompter.shown(*found, change=self._calling.chat.change)
            if asked != each:
                pieces.append(self._own(prompts.NOT_ALL_SEARCHED.format(queries=len(each))))
            said.append(("search", pieces))
        return said, searches, tuple(passage for group in groups for passage in group)

    def _correction(self, text: str) -> Tokens:
        return self._foreign(text) if isinstance(text, Quoting) else self._own(text)

    def _foreign(self, text: str) -> Tokens:
        return self._prompter.foreign(self._calling.chat.change(text))

    def _own(self, text: str) -> Tokens:
        return self._prompter.text(self._calling.chat.change(text))


def _limited(replies: Sequence[Reply], most: int) -> list[Reply]:
    """Replace all beyond `most` queries and uses of tools by a correction."""
    kept, left = list[Reply](), most
    for each in replies:
        if isinstance(each, str):
            kept.append(each)
        elif not left:
            kept.append(prompts.OVER_THE_LIMIT.format(queries=most))
        elif isinstance(each, list):
            kept.append(each[:left])
            left -= len(each[:left])
        else:
            kept.append(each)
            left -= 1
    return kept


def _wrong_arguments(name: str, arguments: Any) -> str:
    return prompts.WRONG_ARGUMENTS.format(name=name, arguments=arguments)
