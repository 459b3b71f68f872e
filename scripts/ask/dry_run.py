"""One question played through environment, tools and reward, without training: `forage try`.

The policy is the model, the texts given on the command line, or somebody at the terminal. What is
printed is what training would read: the exact prompt, each turn, each observation, on request the
loss mask token by token, and every part of the reward with its weight.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from actors.environments.base import Retriever
from actors.environments.registry import require_program, searches
from actors.errors import ActorError, ProgramFailed
from actors.gateway.rolling import rolling
from actors.policies.base import Completion, FinishReason, Policy, SamplingParams, Stops
from actors.prompt import Prompter
from actors.retrieval import open_retrieval
from actors.rewards.scorer import Rewards
from configs.environment import PROGRAM
from configs.load import ConfigError, load
from configs.runtime.signals import Interrupt
from configs.schema import Config
from replay.protocol import Lease, ReplayError
from replay.questions import FIELDS, read_questions
from replay.trajectory import Question, Sampling, Trajectory
from scripts.ask.ask import (
    load_policy,
    prepare_environment,
    retrieval_server,
    searchable,
    tokenizer_of,
)
from scripts.ask.view import ACTION, READ
from scripts.command.options import Options, argument, option
from scripts.command.terminal import clean, status
from scripts.setup import preflight
from scripts.setup.hub import with_hub_paths
from scripts.setup.model_checks import has_tokenizer
from scripts.setup.overrides import QuestionsOrOverrides

_HEAD = "bold"
_ID = re.compile(r"(train|eval)-\d+")  # of a row that has none of its own


@dataclass(frozen=True)
class TryOptions(QuestionsOrOverrides, Options):
    config: str = argument("a YAML configuration", metavar="CONFIG")
    words: tuple[str, ...] = argument(
        "a question (its text, or its id in questions.*; the first of questions.train without "
        "one), or fields to override",
        default=(),
        metavar="QUESTION|a.b=c",
    )
    gold: tuple[str, ...] = option("accepted answers of QUESTION", default=(), metavar="TEXT")
    say: tuple[str, ...] = option("what the policy says, a text a turn", default=(), metavar="TEXT")
    typed: bool = option("you are the policy: its turns are read from here", default=False)
    masks: bool = option("each token, and whether it is trained on", default=False)
    temperature: float = option("of the model (default 0: greedy)", default=0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.say and self.typed:
            raise ConfigError("--say and --typed: one of them says the policy's turns")
        if len(self.questions) > 1:
            raise ConfigError(f"{self.questions[1]!r}: one question at a time; quote its words")
        if self.gold and not self.questions:
            raise ConfigError("--gold is for a QUESTION: give its text")

    @property
    def by_model(self) -> bool:
        """True where the model of the configuration is the policy."""
        return not (self.say or self.typed)


def try_question(options: TryOptions) -> None:
    """Check, play, print. Raises ConfigError, ActorError, RetrievalError, ServerFailed."""
    prepare_environment()
    with Interrupt():
        config = with_hub_paths(load(options.config, options.overrides))
        require_program(config)  # else its lack of a corpus is told, which a program may not need
        config = searchable(config)
        if not options.by_model:
            _require_tokenizer(config.model.path)
        asked = chosen(config, options)
        preflight.check_parts(
            config, model=options.by_model, retrieval=searches(config), rewards=True
        )
        asyncio.run(_played(options, config, asked))


def chosen(config: Config, options: TryOptions) -> Question:
    """The question to play, with its accepted answers where a file has it. Raises ConfigError."""
    wanted = options.questions[0] if options.questions else None
    if wanted is not None and options.gold:
        return Question("asked", wanted, options.gold)
    for found in _listed(config):
        if wanted in (None, found.id, found.text):
            return found
    if wanted is None:
        raise ConfigError(
            'no QUESTION is given, and questions.train is empty: forage try CONFIG "…"'
        )
    if len(wanted.split()) == 1 and (_ID.fullmatch(wanted) or Path(wanted).is_file()):
        raise ConfigError(
            f"QUESTION = {wanted!r}: no row of questions.train or questions.eval has this id: give "
            "one that does, for example train-1, or a question's text"
        )
    return Question("asked", wanted, ())


def _require_tokenizer(path: str) -> None:
    if not (path and has_tokenizer(Path(path))):
        raise ConfigError(
            f"model.path = {path!r}: no tokenizer there, which --say and --typed need too: name a "
            "Hugging Face folder, or a model on the Hub"
        )


def _listed(config: Config) -> Iterator[Question]:
    columns = config.questions.columns
    for name in FIELDS:
        if path := getattr(config.questions, name):
            try:
                yield from read_questions(path, columns=columns, need_answers=False).questions
            except (ReplayError, ValueError, OSError) as error:
                raise ConfigError(f"questions.{name} = {path!r}: {error}") from error


async def _played(options: TryOptions, config: Config, question: Question) -> None:
    console = Console(highlight=False, soft_wrap=True)
    async with AsyncExitStack() as stack:
        with status("making ready") if options.by_model else nullcontext():
            server = await retrieval_server(config, stack)
            retriever: Retriever = await stack.enter_async_context(open_retrieval(config))
            rewards = await stack.enter_async_context(Rewards.open(config))
            tokenizer = tokenizer_of(config)
            prompter = Prompter(tokenizer, config.questions, config.actors)
            policy = _policy(options, config, tokenizer, prompter)
            if server:
                await server.ready()
        page = Page(console, prompter, options.masks)
        page.asked(question)
        printed = Printed(policy, page)
        rollouts = await stack.enter_async_context(
            rolling(config, policy=printed, prompter=prompter, rewards=rewards, actor_id="try")
        )
        lease = Lease(1, 0, "train", question, Sampling(options.temperature, config.seed))
        try:
            trajectory = await rollouts.roll(lease, retriever)
        except ActorError as error:
            if printed.fault is None and isinstance(error, ProgramFailed):
                page.complained(error.errors)
            if printed.fault is None:
                raise
        if printed.fault is not None:  # a program was told of it, whatever it has made of that
            raise printed.fault
        page.ended(trajectory, config)


def _policy(options: TryOptions, config: Config, tokenizer: Any, prompter: Prompter) -> Policy:
    if options.by_model:
        return load_policy(config, tokenizer, lambda _, __: None)
    if options.typed:
        return Said(prompter, _from_terminal)
    texts, count = iter(options.say), len(options.say)
    program = config.environment.name == PROGRAM
    wanted = "the program makes another call" if program else "the rollout goes on"

    def given(_: Stops) -> str:
        if (text := next(texts, None)) is None:
            has = f"{count} text{'s' * (count != 1)}"
            raise ConfigError(f"--say: {has}, but {wanted}: give one more text")
        return text

    return Said(prompter, given)


def _from_terminal(stops: Stops) -> str:
    lines: list[str] = []
    print(f"your turn: end it with {' or '.join(stops) or 'an empty line'}", file=sys.stderr)
    while not lines or (lines[-1] and not lines[-1].rstrip().endswith(stops)):
        try:
            lines.append(input("> "))
        except EOFError:
            if not any(lines):
                raise ConfigError("standard input ended before the rollout: type a turn") from None
            break
    return "\n".join(lines).rstrip("\n")


@dataclass
class Said:
    """A policy of somebody's texts: each is cut behind its first stop, else the end token ends it.

    Log-probs are 0. `text` is asked for a turn's text, and told the stops.
    """

    prompter: Prompter
    text: Callable[[Stops], str]

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        """The next text, as the completion of `tokens`. Raises ConfigError where there is none."""
        text = self.text(stops)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        ids = self.prompter.text(text[: min(ends)] if ends else text).tolist()
        if not ends and self.prompter.end_token is not None:
            ids.append(self.prompter.end_token)
        whole = len(ids) <= max_tokens
        ids = ids[:max_tokens]
        logprobs, versions = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
        reason: FinishReason = "stop" if whole else "length"
        return Completion(np.asarray(ids, np.int32), logprobs, versions, reason)


@dataclass
class Printed:
    """A policy whose every prompt, observation and turn goes to a page. `fault`: that it could not
    go on.
    """

    policy: Policy
    page: "Page"
    known: list[int] = field(default_factory=list)  # the context that was printed
    fault: ConfigError | None = None

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete exactly `tokens`."""
        count = len(self.known)
        goes_on = count > 0 and list(tokens[:count]) == self.known
        self.page.read(tokens[count:] if goes_on else tokens, first=not goes_on)
        try:
            completion = await self.policy.complete(tokens, **sampling)
        except ConfigError as error:
            self.fault = error
            raise
        self.known = [*tokens, *completion.tokens.tolist()]
        self.page.said(completion)
        return completion


class Page:
    """The printed rollout: a heading for each piece, then its exact text, or its tokens."""

    def __init__(self, console: Console, prompter: Prompter, masks: bool) -> None:
        self._console, self._prompter, self._masks = console, prompter, masks
        self._turns = 0

    def asked(self, question: Question) -> None:
        """Print the question and its accepted answers."""
        accepted = " | ".join(question.answers) or "none known"
        self._head(f"question {question.id}, accepted answers: {accepted}")
        self._text(question.text, "")

    def read(self, tokens: Sequence[int], first: bool) -> None:
        """Print what the policy reads: the prompt, or an observation."""
        self._piece("prompt" if first else f"observation {self._turns}", tokens, READ, False)

    def said(self, completion: Completion) -> None:
        """Print a turn of the policy."""
        self._turns += 1
        how = "" if completion.finish_reason == "stop" else ", cut off at its budget"
        self._piece(f"turn {self._turns}", completion.tokens, ACTION, True, how)

    def complained(self, errors: str) -> None:
        """Print the end of what a program that failed said on standard error."""
        if errors.strip():
            self._head("the end of the program's standard error")
            self._text(errors.strip(), "")

    def ended(self, trajectory: Trajectory, config: Config) -> None:
        """Print how the rollout ended, and its reward by parts."""
        malformed = sum(turn.malformed for turn in trajectory.turns)
        answer = "no answer" if trajectory.answer is None else f"answer {trajectory.answer!r}"
        self._head(
            f"{trajectory.stop_reason.value}: {answer}; {len(trajectory.turns)} turns, "
            f"{malformed} malformed, {trajectory.search_count} searches"
        )
        if trajectory.reward is None:
            self._head(f"reward: unscorable ({trajectory.reward_cause})")
        else:
            self._head(f"reward {trajectory.reward:g}, mode {config.rewards.mode}")
        weights = msgspec.structs.asdict(config.rewards.weights)
        for name, value in trajectory.reward_parts.items():
            weight = weights.get(name, 0.0) if config.rewards.mode == "strict" else None
            self._text(f"  {name:<14} {value:g}{'' if weight is None else f' x {weight:g}'}", "")

    def _piece(
        self, name: str, tokens: Sequence[int] | Any, style: str, trained: bool, how: str = ""
    ) -> None:
        mask = "trained on" if trained else "not trained on"
        self._head(f"{name}: {len(tokens)} tokens, {mask}{how}")
        if self._masks:
            pieces = (repr(self._prompter.decode([each]))[1:-1] for each in tokens)
            self._text(f"{int(trained)} |{'|'.join(pieces)}|", style)
        else:
            self._text(self._prompter.decode(tokens), style)

    def _head(self, text: str) -> None:
        self._console.print(Text(clean(text), _HEAD))

    def _text(self, text: str, style: str) -> None:
        self._console.print(Text(clean(text), style))
