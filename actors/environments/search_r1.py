"""The environment `search_r1` (its score: `actors/rewards/search_r1.py`): in one running text, the
policy searches, uses tools and answers between tags.

N turns, each a search, a use of a tool or a malformed action, then one completion without search,
whose `<answer>` the environment opens if `environment.force_answer` says so. Actions are parsed
from the tokens that the policy sampled in one turn alone, so tag text in the prompt or in a passage
is inert.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from actors.environments.base import (
    NOTHING,
    Outcome,
    Retriever,
    Searching,
    budget_told,
    completion_budget,
    instructed,
)
from actors.environments.schema import WrongArguments
from actors.environments.toolbox import Toolbox
from actors.environments.tools import Tool, load_tools
from actors.prompt import Prompter, Tokens
from configs.environment import EnvironmentConfig
from configs.prompts import SEARCH_R1_PROMPT, SEVERAL_QUERIES, TOOL, WRONG_FOR_TOOL
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage

SEARCH_END, ANSWER_END = "</search>", "</answer>"
STOP_TAGS = (SEARCH_END, ANSWER_END)


@dataclass(frozen=True, slots=True)
class SearchAction:
    """A request for passages; `query` is stripped and not empty."""

    query: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A use of the tool `name`; its argument `text` is stripped and not empty."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer, stripped; an empty one is simply wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """No closed tag pair, or nothing in it: the policy's own fault."""


Observed = tuple[Tokens, tuple[Search, ...], tuple[Passage, ...], bool]  # True: malformed
Action = SearchAction | ToolUse | Answer | Malformed


class TagEnvironment:
    """Executes one rollout's actions. Use once."""

    def __init__(
        self, lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
    ) -> None:
        self._config, self._settings, self._prompter = config, config.environment, prompter
        self._searching = Searching(lease, retriever, config)
        tools = load_tools(self._settings)
        self._tools = {tool.name: tool for tool in tools}
        self._box = Toolbox(lease, tools, self._settings)
        self._names = tuple(self._tools)
        self.stops = stop_tags(self._names)
        self._turn, self._opened = 0, False
        self.passages: tuple[Passage, ...] = ()
        self.prompt = prompter.question(
            lease.question,
            instructed(SEARCH_R1_PROMPT, self._settings, _extra(self._settings, tools)),
            system=self._settings.system,
            searches=config.actors.max_turns,
            question_mark=True,
        )

    def budget(self, context_tokens: int) -> int:
        """Return the most tokens of the next completion; 0 where the model has no room for one."""
        return completion_budget(self._config, context_tokens)

    async def close(self) -> None:
        """Close the state of tools."""
        await self._box.close()

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """Act on the tokens just sampled; `context_tokens` counts everything up to their end."""
        text = self._prompter.decode(action_tokens)
        action = parse_opened_answer(text) if self._opened else parse_action(text, self._names)
        turn, self._turn = self._turn, self._turn + 1
        if isinstance(action, Answer):
            stop = StopReason.ANSWERED
            return Outcome(NOTHING, stop=stop, answer=action.text, opened=self._opened)
        if turn >= self._config.actors.max_turns:
            malformed = isinstance(action, Malformed)
            return Outcome(NOTHING, malformed=malformed, stop=StopReason.TURN_LIMIT)
        observation, searches, passages, malformed = await self._observe(action, turn)
        info = self._box.noted()
        observation, opened = self._told(observation, turn)
        if not self.budget(context_tokens + len(observation)):
            # The policy will never read it, so it is no part of what went through the engine.
            return Outcome(NOTHING, searches, malformed, StopReason.CONTEXT_LIMIT, info=info)
        self._opened = opened
        return Outcome(observation, searches, malformed, passages=passages, info=info)

    async def _observe(self, action: Action, turn: int) -> Observed:
        match action:
            case SearchAction(content):
                queries = queries_of(content, self._settings.queries_per_turn)
                searches, groups = await self._searching.search(queries, turn)
                passages = tuple(each for group in groups for each in group)
                return self._prompter.observation(*groups), searches, passages, False
            case ToolUse(name, text):
                tool, malformed = self._tools[name], False
                try:
                    said = await self._box.use(tool, tool.arguments.read_text(text))
                except WrongArguments as error:
                    said, malformed = WRONG_FOR_TOOL.format(name=name, error=error), True
                return self._prompter.result(said), (), (), malformed
            case _:
                return self._prompter.correction(), (), (), True

    def _told(self, observation: Tokens, turn: int) -> tuple[Tokens, bool]:
        """Return the observation with the words on the budget; True where it opens the answer."""
        left = self._config.actors.max_turns - turn - 1
        told = [observation]
        if self._settings.tell_budget:
            told.append(self._prompter.text(budget_told(self._settings, left)))
        opens = self._settings.force_answer and not left
        if opens:
            told.append(self._prompter.text(self._settings.force_template))
        return (np.concatenate(told) if len(told) > 1 else observation), opens


def stop_tags(tools: Iterable[str]) -> tuple[str, ...]:
    """Return the closing tags of all actions; `tools` are tags too."""
    return (*STOP_TAGS, *(f"</{name}>" for name in tools))


def parse_action(text: str, tools: Sequence[str] = ()) -> Action:
    """Parse a turn's first closed tag pair, as Search-R1 does; names of `tools` are tags too."""
    match = _pattern(tuple(tools)).search(text)
    if match is None:
        return Malformed()
    kind, content = match[1], match[2].strip()
    if kind == "answer":
        return Answer(content)
    if not content:
        return Malformed()
    return SearchAction(content) if kind == "search" else ToolUse(kind, content)


def parse_opened_answer(text: str) -> Answer | Malformed:
    """Parse the answer of a turn whose `<answer>` the environment has written: the text before the
    first `</answer>`, or between it and an `<answer>` of the policy's own.
    """
    inside, closed, _ = text.partition(ANSWER_END)
    return Answer(inside.rpartition("<answer>")[2].strip()) if closed else Malformed()


def queries_of(content: str, most: int) -> list[str]:
    """Split a search into at most `most` queries, one a line; 1 leaves it whole."""
    if most == 1:
        return [content]
    lines = (line.strip() for line in content.splitlines())
    return [line for line in lines if line][:most]


@cache
def _pattern(tools: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in ("search", "answer", *tools))
    return re.compile(rf"<({names})>(.*?)</\1>", re.DOTALL)


def _extra(settings: EnvironmentConfig, tools: Sequence[Tool]) -> str:
    """Return the instructions on several queries and on tools, which Search-R1's prompt lacks."""
    told = ""
    if settings.queries_per_turn > 1:
        told += SEVERAL_QUERIES.format(queries=settings.queries_per_turn)
    for tool in tools:
        told += TOOL.format(name=tool.name, parameter=_inside(tool), says=tool.description)
    return told


def _inside(tool: Tool) -> str:
    """What stands between a tool's tags: its one text, or a JSON object of these properties."""
    properties = tool.arguments.schema.get("properties", {})
    return tool.arguments.one_text or json.dumps(properties, ensure_ascii=False)
