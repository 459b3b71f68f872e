"""A run's rollouts in colour: the policy's tokens green, passages cyan, corrections yellow. Before
them, what each data set came to, the sentinels that fired and what they went back to.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from configs.load import ConfigError, load
from learner.errors import BadCheckpoint
from learner.evaluations import Evaluations
from learner.health.rules import RULES, rollback_said
from learner.health.sentinels import Noted, Span, read_notes, spans
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.history import GroupHistory
from replay.log.records import Delivered, Sampled
from replay.trajectory import Question, TokenSequence, Trajectory
from scripts.command.options import Options, argument, option
from scripts.command.terminal import awaited, clean
from scripts.runs.log import log_of, reading
from scripts.runs.scores import scores_table
from scripts.setup.resolve import run_config

Shown = tuple[Question, Trajectory, int | None]  # the step it trained; None: not (yet) trained


class Gone:
    """Rollouts that were asked for, but whose payloads were compacted away."""

    def __init__(self) -> None:
        self.evaluated = 0
        self.trained: Counter[int | None] = Counter()  # by step; None: not trained

    def __str__(self) -> str:
        steps = sorted(step for step in self.trained if step is not None)
        trained = f", of steps {steps[0]} to {steps[-1]}" if steps else ""
        return (
            f"{self.trained.total()} train rollouts{trained}, and {self.evaluated} evaluation "
            "rollouts were compacted away (replay.keep, forage compact) and cannot be shown: look "
            "at a copy of the log from before"
        )

    def __bool__(self) -> bool:
        return bool(self.evaluated or self.trained)


def rollouts(
    run_dir: Path,
    step: int | None = None,
    question: str | None = None,
    gone: Gone | None = None,
) -> Iterator[Shown]:
    """Yield rollouts in the log's order, or of `step`; the compacted are counted in `gone`."""
    groups = GroupHistory()
    gone = gone if gone is not None else Gone()
    for record in read(run_dir / "events.log"):
        groups.take(record)
        match record:
            case Delivered() if record.summary.kind == "eval" and step is None:
                asked = groups.opened[record.group_id].question
                if question in (None, asked.id) and record.compacted:
                    gone.evaluated += 1
                elif question in (None, asked.id):
                    yield asked, decode_trajectory(record.payload), None
            case Sampled():
                for opened, delivered in groups.train(record):
                    if step in (None, record.step) and question in (None, opened.question.id):
                        gone.trained.update(record.step for f in delivered if not f.payload)
                        yield from _decoded(opened.question, delivered, record.step)
            case _:
                pass
    for group_id, delivered in groups.waiting.items():
        asked = groups.opened[group_id].question
        if step is None and question in (None, asked.id):
            yield from _decoded(asked, delivered, None)


def _decoded(question: Question, delivered: list[Delivered], step: int | None) -> Iterator[Shown]:
    for fact in delivered:
        if fact.payload:
            yield question, decode_trajectory(fact.payload), step


def none_matches(run_dir: Path, step: int | None, question: str | None) -> str:
    """Why no rollout is of this step and question, with those that are in the log."""
    groups, trained = GroupHistory(), dict[int, set[str]]()
    for record in read(run_dir / "events.log"):
        groups.take(record)
        if isinstance(record, Sampled):
            trained[record.step] = {opened.question.id for opened, _ in groups.train(record)}
    asked = {opened.question.id for opened in groups.opened.values()}.union(*trained.values())
    causes = []
    if step is not None and not trained:
        causes.append("no step was trained yet")
    elif step is not None and step not in trained:
        causes.append(f"the run has steps {min(trained)} to {max(trained)}")
    if question is not None and question not in asked:
        others = f", but {len(asked)} others, such as {min(asked)!r}" if asked else ""
        causes.append(f"it asked no question {question!r}{others}")
    elif question is not None and step in trained:
        steps = ", ".join(str(each) for each, ids in trained.items() if question in ids)
        but = f", but {steps}" if steps else ""
        causes.append(f"question {question!r} did not train step {step}{but}")
    return "; ".join(causes) or "none has arrived yet"


def render(shown: Shown, tokenizer: Tokenizer) -> Text:
    """One rollout as coloured text."""
    question, trajectory, step = shown

    def words(tokens: object) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)  # type: ignore[call-overload]
        return clean(text)

    trained = f"trained step {step}" if step is not None else trajectory.kind
    several = len(trajectory.sequences)
    who = trajectory.actor_id + (f", {several} sequences" if several > 1 else "")
    head = (
        f"question {question.id} (group {trajectory.group_id}, sibling {trajectory.sibling}, "
        f"{trained}, "
        f"{_versions(trajectory)}, {who}): {trajectory.stop_reason.value}, {_earned(trajectory)}, "
        f"expected {' | '.join(question.answers)}\n"
    )
    text = Text(clean(head), style="bold")
    for place, sequence in enumerate(trajectory.sequences, 1):
        if several > 1:
            text.append(clean(_title(sequence, place, several)), style="bold")
        text.append(words(sequence.prompt_tokens))
        for turn in sequence.turns:
            text.append(" " + words(turn.action_tokens), style="green")
            if len(turn.observation_tokens):
                style = "yellow" if turn.malformed else "cyan"
                text.append(" " + words(turn.observation_tokens), style=style)
        text.append("\n")
    return text


def _versions(of: Trajectory | TokenSequence) -> str:
    oldest, newest = of.version_span
    return f"version {oldest}" + (f"-{newest}" if newest != oldest else "")


def _title(sequence: TokenSequence, place: int, several: int) -> str:
    turns = len(sequence.turns)
    name = f", {sequence.name}" if sequence.name not in ("", str(place)) else ""
    told = f"{turns} turn{'s' * (turns != 1)}, {_versions(sequence)}"
    return f"[sequence {place} of {several}{name}: {told}]\n"


def _earned(trajectory: Trajectory) -> str:
    if trajectory.reward is None:
        return f"unscorable ({trajectory.reward_cause})"
    of = ", ".join(f"{name} {value:.3g}" for name, value in trajectory.reward_parts.items())
    return f"reward {trajectory.reward:g}" + (f" ({of})" if of else "")


def alarm(span: Span) -> str:
    """A sentinel that fired, as a line."""
    steps = f"step {span.first}" if span.first == span.last else f"steps {span.first}-{span.last}"
    rule = RULES.get(span.name)
    return f"sentinel {span.name}, {steps}" + (f": {rule.means}; {rule.remedy}" if rule else "")


def _alarms(notes: Sequence[Noted], step: int | None) -> Iterator[str]:
    """The sentinels that fired, and the rollbacks: all, or those of a step."""
    for span in spans(notes):
        if step is None or span.first <= step <= span.last:
            yield alarm(span)
    for number, made in enumerate(filter(None, (noted.rollback for noted in notes)), 1):
        if step in (None, made.step):
            yield rollback_said(number, made.step, made.to, made.scale)


def load_tokenizer(model_path: str) -> Tokenizer:
    """The model folder's own `tokenizer.json`. Raises ConfigError when there is none."""
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path = {model_path!r}: no tokenizer.json there to show text with")
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class ShowOptions(Options):
    run: Path = argument("a run directory, for example runs/latest")
    step: int | None = option("only rollouts that trained this step")
    question: str | None = option("only rollouts of this question", metavar="ID")
    limit: int = option("at most this many", default=16, metavar="N", least=1)


def show(options: ShowOptions) -> None:
    """Print which sentinels fired, the rollbacks, and rollouts; say how many were compacted away.
    Raises ConfigError, ReplayError.
    """
    console = Console(highlight=False, soft_wrap=True)
    log = log_of(options.run)
    config = load(run_config(options.run))
    tokenizer = load_tokenizer(config.model.path)
    if options.step is None:
        _print_scores(console, options.run, config.learner.best)
    for line in _alarms(list(read_notes(options.run)), options.step):
        console.print(Text(clean(line), "bold yellow"))
    gone, count = Gone(), 0
    found = rollouts(options.run, options.step, options.question, gone)
    for shown in awaited(islice(found, options.limit), reading(log)):
        console.print(render(shown, tokenizer))
        count += 1
    more = count == options.limit and next(found, None) is not None
    if more and options.step is None:
        print(f"show: the first {count}; others by --limit N, --step N or --question ID")
    if gone:
        print(f"show: {gone}", file=sys.stderr)
    elif not count:
        why = none_matches(options.run, options.step, options.question)
        print(f"show: no rollout matches: {clean(why)}", file=sys.stderr)


def _print_scores(console: Console, run: Path, best: str) -> None:
    try:
        scores = Evaluations(run, resumed_after=sys.maxsize).scores
    except BadCheckpoint as error:  # of another release: the rollouts can be shown all the same
        print(f"show: without scores: {clean(str(error))}", file=sys.stderr)
        return
    if table := scores_table(scores, best):
        console.print(table)
