"""Demonstrations, from JSONL files or a run's event log, as the token ids of an actor.

The segments that the policy writes are kept apart from those that it reads. A row of a file is
`{"question": text, "turns": [{"action": text, "passages": [{"id", "title", "text"}, …]}, …]}`; a
passage may also be `{"id", "contents"}`, as in a corpus; instead of passages a turn may have an
`observation`, the very text that is read. The last turn has neither, and answers, unless
`actors.max_turns` leaves no other. Rows are acted out in the configuration's own environment.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from actors.environments import registry
from actors.environments.base import Environment, Outcome
from actors.environments.registry import acting, stops_of
from actors.prompt import Prompter, Tokens
from configs.load import ConfigError
from configs.runtime.files import vocabulary_of
from configs.schema import Config
from replay.codec import decode_trajectory
from replay.log.event_log import FILE_NAME, read_whole
from replay.log.records import ActorJoined, Delivered
from replay.protocol import CodecError, Lease, LogError
from replay.trajectory import Question, Sampling, StopReason, TokenSequence, Trajectory
from retrieval_server.protocol import Passage

if TYPE_CHECKING:  # it imports torch
    from learner.imitation import Segment

MOST_SHOWN = 20  # causes in one message
_NAMED = 8  # rows of one cause, behind the first
_NO_TURNS = "missing required field `turns`"
_OF_A_ROW = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+""")  # texts and numbers
_ACTED = ("search_r1", "tool_call", "no_search")
_SHAPE = 'write {"question": text, "turns": [{"action": text, "passages": [...]}, …]}'


class BadDemonstrations(ConfigError):
    """Demonstrations that cannot be used; names each bad row, or why there are none."""


class Faults:
    """The rows that cannot be used, by cause: those that differ in quoted texts and numbers alone
    are of one cause.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._by_cause: dict[str, list[tuple[Path, int, str]]] = {}

    def add(self, path: Path, number: int, wrong: str) -> None:
        """Note what is wrong with a row."""
        self.rows += 1
        self._by_cause.setdefault(_OF_A_ROW.sub("…", wrong), []).append((path, number, wrong))

    @property
    def are_questions(self) -> bool:
        """True where all of them are the rows of a question file."""
        return len(self._by_cause) == 1 and _NO_TURNS in next(iter(self._by_cause))

    def told(self, of: int) -> list[str]:
        """Each cause, with its first row and the number of the others; `of`: all rows read."""
        return [self._told(rows, of) for rows in self._by_cause.values()]

    def message(self, of: int) -> str:
        """The first causes, a line each, and how many rows the others have."""
        told = self.told(of)
        rest = sum(len(rows) for rows in list(self._by_cause.values())[MOST_SHOWN:])
        more = f"\n... and {rest} more bad rows" if rest else ""
        return "\n".join(told[:MOST_SHOWN]) + more

    def _told(self, rows: list[tuple[Path, int, str]], of: int) -> str:
        (path, number, wrong), *others = rows
        if not others:
            return f"{path}:{number}: {wrong}"
        named = [str(n) if file == path else f"{file}:{n}" for file, n, _ in others[:_NAMED]]
        lines = ("lines " if len(others) > 1 else "line ") + ", ".join(named)
        more = ", …" if len(others) > _NAMED else ""
        return f"{path}:{number}: {wrong} (and {len(others)} more of {of} rows: {lines}{more})"


class _Passage(msgspec.Struct):
    id: str | int = ""
    title: str = ""
    text: str | None = None
    contents: str | None = None


class _Turn(msgspec.Struct):
    action: str
    passages: list[_Passage] | None = None
    observation: str | None = None


class _Row(msgspec.Struct):
    question: str
    turns: list[_Turn]


@dataclass(frozen=True, eq=False)
class Demonstration:
    """The segments read and written for a question; `question` is its text or id."""

    question: str
    segments: tuple["Segment", ...]

    def __len__(self) -> int:
        return sum(len(tokens) for tokens, _ in self.segments)


def read_files(
    paths: Sequence[Path], prompter: Prompter, config: Config, skip_bad: bool = False
) -> tuple[list[Demonstration], list[str]]:
    """Read the rows, and why others are left out. Raises BadDemonstrations, ConfigError."""
    found, bad = list[Demonstration](), Faults()
    acted = _as_shown(config, prompter)
    with asyncio.Runner() as runner:
        for file, number, line in (each for path in paths for each in _lines(path)):
            try:
                row = msgspec.json.decode(line, type=_Row)
                segments = runner.run(_acted(row, prompter, acted))
                found.append(Demonstration(row.question.strip(), segments))
            except msgspec.DecodeError as error:
                bad.add(file, number, f"{error}, got {line.strip()[:80]!r}; {_SHAPE}")
            except ValueError as error:
                bad.add(file, number, str(error))
    names, of = ", ".join(map(str, paths)), len(found) + bad.rows
    if not found and bad.are_questions:
        raise BadDemonstrations(
            f"{names}: {of} of {of} rows have no `turns`: these are questions, not demonstrations "
            "(docs/warm_start.md)"
        )
    if bad.rows and (not skip_bad or not found):
        raise BadDemonstrations(bad.message(of))
    if not found:
        raise BadDemonstrations(f"{names}: no demonstrations: {_SHAPE}")
    return found, bad.told(of)


def read_run(
    run_dir: Path, least: float, tokenizer_digest: str, config: Config
) -> tuple[list[Demonstration], Counter[str]]:
    """A run's trajectories of that reward; counts left out. Raises LogError, BadDemonstrations."""
    path, left_out = run_dir / FILE_NAME, Counter[str]()
    found: list[Demonstration] = []
    vocabulary = vocabulary_of(config.model.path)
    for trajectory in _delivered(path, tokenizer_digest, left_out):
        if trajectory.reward is None:
            left_out["unscorable"] += 1
        elif trajectory.reward < least:
            left_out[f"rewarded below {least:g}"] += 1
        elif max(len(each.tokens) for each in trajectory.sequences) > config.model.max_model_len:
            left_out["longer than model.max_model_len"] += 1
        else:
            _require_embedded(path, trajectory, vocabulary)
            found += [
                Demonstration(trajectory.question_id, _as_segments(sequence))
                for sequence in trajectory.sequences
            ]
    if not found:
        causes = ", ".join(f"{count} {cause}" for cause, count in left_out.items())
        raise BadDemonstrations(
            f"{path}: no trajectory can be learnt from ({causes or 'none was delivered'}): lower "
            "--reward or name another run"
        )
    return found, left_out


def _lines(path: Path) -> Iterator[tuple[Path, int, str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadDemonstrations(f"{path}: cannot be read as UTF-8 text ({error})") from error
    return ((path, n, line) for n, line in enumerate(lines, start=1) if line.strip())


async def _acted(row: _Row, prompter: Prompter, config: Config) -> tuple["Segment", ...]:
    if not row.question.strip():
        raise ValueError("question is empty: write its text")
    most = config.actors.max_turns + 1
    if not 0 < len(row.turns) <= most:
        raise ValueError(
            f"turns number {len(row.turns)}: 1 to {most} (actors.max_turns searches, then one more)"
        )
    shown, lease = _Shown(), Lease(0, 0, "train", Question("", row.question, ()), Sampling())
    made = acting(lease, retriever=shown, prompter=prompter, config=config)
    async with made as environment:
        return await _played(row, environment, shown, prompter, config)


async def _played(
    row: _Row, environment: Environment, shown: "_Shown", prompter: Prompter, config: Config
) -> tuple["Segment", ...]:
    segments: list[Segment] = [(environment.prompt, False)]
    length, limit = len(environment.prompt), config.model.max_model_len
    for place, turn in enumerate(row.turns):
        last = place == len(row.turns) - 1
        try:
            written = _action(turn.action, prompter, config)
            shown.passages = _passages(turn, last)
            outcome = await environment.step(written, length + len(written))
            _require_sound(turn.action, outcome, last, limit)
        except ValueError as error:
            raise ValueError(f"turns[{place}].{error}") from error
        read = outcome.observation_tokens
        if turn.observation is not None:
            tagged = config.environment.name != "tool_call"  # a chat template writes special tokens
            read = (prompter.observed if tagged else prompter.text)(turn.observation)
        segments += [(written, True), (read, False)]
        length += len(written) + len(read)
    if length > limit:
        raise ValueError(f"it takes {length} tokens: model.max_model_len = {limit!r}")
    return tuple(segments[:-1])  # nobody reads what comes after the last action


def _action(text: str, prompter: Prompter, config: Config) -> Tokens:
    """The ids of an action, ended by a closing tag or, where there are none, the end token."""
    text, stops = text.rstrip(), stops_of(config)
    ends = [text.find(tag) + len(tag) for tag in stops if tag in text]
    if min(ends, default=len(text)) < len(text):
        raise ValueError(
            f"action = …{text[-60:]!r} goes on behind its first closing tag: end there"
        )
    tokens, limit = prompter.text(text), config.actors.max_action_tokens
    end = prompter.end_token
    if not stops and end is not None and tokens[-1:] != [end]:
        tokens = np.append(tokens, np.int32(end))
    if len(tokens) > limit:
        raise ValueError(f"action takes {len(tokens)} tokens: actors.max_action_tokens = {limit!r}")
    if not len(tokens):
        raise ValueError("action is empty: write its text")
    return tokens


def _require_sound(text: str, outcome: Outcome, last: bool, limit: int) -> None:
    shown = repr(text.rstrip()[-60:])
    if outcome.malformed:
        raise ValueError(
            f"action = …{shown} is malformed: an actor would be corrected, or end without an answer"
        )
    if last and outcome.stop is None:
        raise ValueError(
            f"action = …{shown} does not end it, but nothing follows: end with an answer, unless "
            "actors.max_turns leaves no other turn"
        )
    if last or outcome.stop is None:
        return
    if outcome.stop == StopReason.CONTEXT_LIMIT:
        raise ValueError(f"action: no room for another: model.max_model_len = {limit!r}")
    raise ValueError(f"action = …{shown} ends it ({outcome.stop}), but another turn follows")


def _passages(turn: _Turn, last: bool) -> list[Passage]:
    given = [name for name in ("passages", "observation") if getattr(turn, name) is not None]
    if last and given:
        raise ValueError(f"{given[0]}: no action follows, so nothing is learnt from it")
    if not last and len(given) != 1:
        both = "both are" if given else "neither is"
        raise ValueError(f"passages or observation: {both} given; another turn follows, give one")
    return [_passage(each) for each in turn.passages or ()]


class _Shown:
    """A retriever that brings the demonstration's passages to the first of a turn's queries."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [[] if number else self.passages for number in range(len(queries))]


def _passage(given: _Passage) -> Passage:
    if (given.text is None) == (given.contents is None):
        raise ValueError("passages: each has a text (and a title), or contents")
    contents = f"{given.title}\n{given.text}" if given.contents is None else given.contents
    return Passage(str(given.id), contents, 0.0)


def _as_shown(config: Config, prompter: Prompter) -> Config:
    """The configuration that shows passages in their order. Raises ConfigError."""
    settings = config.environment
    if settings.name not in _ACTED:
        raise ConfigError(
            f"environment.name = {settings.name!r}: --demonstrations are acted out in one of "
            f"{', '.join(_ACTED)} only: learn with --from-run what its actors did"
        )
    for name in ("tools", "mcp"):
        if value := getattr(settings, name):
            raise ConfigError(
                f"environment.{name} = {value!r}: --demonstrations use no tools: leave them out, "
                "or learn with --from-run what actors did with them"
            )
    registry.check(config, prompter)
    return msgspec.structs.replace(
        config,
        actors=msgspec.structs.replace(config.actors, shuffle_passages=False),
        retrieval=msgspec.structs.replace(config.retrieval, top_k=max(config.retrieval.top_k, 1)),
    )


def _delivered(path: Path, digest: str, left_out: Counter[str]) -> Iterator[Trajectory]:
    for record in read_whole(path):
        match record:
            case ActorJoined() if record.tokenizer_digest != digest:
                raise BadDemonstrations(
                    f"{path}: {record.actor_id} has tokenizer {record.tokenizer_digest}, that of "
                    f"model.path is {digest}: its ids mean other words; give the run's own model"
                )
            case Delivered() if record.summary.kind != "train":
                left_out["evaluations"] += 1
            case Delivered() if record.compacted:
                left_out["compacted away"] += 1
            case Delivered():
                try:
                    yield decode_trajectory(record.payload)
                except CodecError as error:
                    raise LogError(f"{path}: group {record.group_id}: {error}") from error
            case _:
                pass


def _require_embedded(path: Path, trajectory: Trajectory, vocabulary: int) -> None:
    ids = np.concatenate([sequence.tokens for sequence in trajectory.sequences])
    strange = ids[(ids < 0) | (ids >= vocabulary)]
    if strange.size:
        raise BadDemonstrations(
            f"{path}: group {trajectory.group_id}: sibling {trajectory.sibling}: token id "
            f"{strange[0]}: the model's vocabulary has {vocabulary}, from 0: give the run's own "
            "model"
        )


def _as_segments(sequence: TokenSequence) -> tuple["Segment", ...]:
    segments: list[Segment] = [(sequence.prompt_tokens, False)]
    for turn in sequence.turns:
        segments += [(turn.action_tokens, True), (turn.observation_tokens, False)]
    return tuple(segments)
