"""Runs side by side: a line for each, the fields in which their configurations differ, and their
curves over each other.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from configs.load import ConfigError, leaves, load
from replay.log.event_log import FILE_NAME, read
from replay.log.records import EvaluationFinished, Record, Reported, Sampled
from replay.log.segments import exists, segments
from replay.protocol import LogError
from scripts.command.options import Options, argument, option
from scripts.command.terminal import Split, awaited, clean, complain
from scripts.runs.log import log_of, reading
from scripts.setup.resolve import run_config

RUNS = Path("runs")
SUMMARY = "summary.json"
LOCKS = Path("/proc/locks")
WIDEST = 30  # of a value in the table
LATEST = 1e11  # seconds since the epoch: no record is of a later time
BEFORE = 8  # characters that are shown of what values have in common
_OF_ONE = ("run_dir", "keys", "retrieval.port")  # every run has others


@dataclass
class Line:
    """What is told of a run."""

    name: str
    state: str
    steps: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)  # greedy exact match by step
    seconds: float = 0.0

    def take(self, record: Record) -> None:
        """Fold in one record of its log."""
        match record:
            case Sampled() | Reported():
                self.steps = max(self.steps, record.step)
            case EvaluationFinished():
                self.evaluations[record.result.step] = record.result.em
            case _:
                pass

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        em = [self.evaluations[step] for step in sorted(self.evaluations)]
        told = [f"{value:.3f}" for value in (em[0], em[-1], max(em))] if em else ["", "", ""]
        lasted = str(timedelta(seconds=round(max(0.0, self.seconds))))
        return clean(self.name), self.state, str(self.steps), *told, lasted


@dataclass(frozen=True)
class RunsOptions(Options):
    runs: tuple[Path, ...] = argument("runs to compare; named none, all in ./runs", default=())
    plot: Path | None = option("draw their curves over each other", metavar="FILE")
    json: Path | None = option("also write what is told", metavar="FILE")


def runs(options: RunsOptions) -> None:
    """Print a line for each run, and of several that are named what differs. Raises ConfigError."""
    chosen = list(options.runs) or list(found(RUNS))
    if not chosen:
        raise ConfigError(
            f"no run with an event log in {str(RUNS.resolve())!r}: name directories of runs"
        )
    lines = [told(run, name) for run, name in zip(chosen, names_of(chosen), strict=True)]
    console = Console(highlight=False)
    console.print(_table(lines))
    differing = differences(chosen) if len(options.runs) > 1 else {}
    if differing:
        console.print(_differences(lines, differing))
    if options.plot:
        print(clean(str(_drawn(lines, options.plot))))
    if options.json:
        rows = [{**vars(line), "run": str(run)} for run, line in zip(chosen, lines, strict=True)]
        text = json.dumps({"runs": rows, "differences": differing}, indent=1, default=str)
        options.json.write_text(text + "\n", encoding="utf-8")


def found(folder: Path) -> Iterator[Path]:
    """The runs in a folder that keep an event log, the newest first, each once."""
    there = (each for each in folder.glob("*") if exists(each / FILE_NAME))
    yield from sorted((each for each in there if not each.is_symlink()), key=_written, reverse=True)


def _written(run: Path) -> float:
    return max(each.path.stat().st_mtime for each in segments(run / FILE_NAME))


def names_of(chosen: Sequence[Path]) -> list[str]:
    """What runs are called: the shortest end of its path that no other of them has."""
    parts = [run.resolve().parts for run in chosen]

    def name(mine: tuple[str, ...]) -> str:
        others = [each for each in parts if each != mine]
        ends = (n for n in range(1, len(mine)) if all(o[-n:] != mine[-n:] for o in others))
        return str(Path(*mine[-next(ends, len(mine)) :]))

    return [name(each) for each in parts]


def told(run: Path, name: str) -> Line:
    """Fold a run's log. Raises ConfigError where it is none."""
    log = log_of(run)
    line = Line(name, state_of(run))
    first = last = 0.0
    try:
        for record in awaited(read(log), reading(log)):
            if not 0 <= record.now <= LATEST:
                raise LogError(f"{log}: {record.now} is no time")
            line.take(record)
            first, last = first or record.now, record.now
    except LogError as error:
        complain(clean(f"{line.name}: told up to here: {error}"))
        line.state = "damaged log"
    line.seconds = last - first
    return line


def state_of(run: Path) -> str:
    """`running` while a process of this machine writes its log; else how its last launch ended,
    or `cut off` where it wrote no summary since.
    """
    log = run / FILE_NAME
    if _is_written(segments(log)[0].path):
        return "running"
    try:
        summary = run / SUMMARY
        if summary.stat().st_mtime >= _written(run) - 1.0:
            return clean(str(json.loads(summary.read_text())["status"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return f"cut off {_ago(time.time() - _written(run))}"


def _is_written(path: Path) -> bool:
    stat = path.stat()
    name = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    try:
        return any(name in line.split() for line in LOCKS.read_text().splitlines())
    except OSError:
        return False


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def differences(chosen: Sequence[Path]) -> dict[str, list[Any]]:
    """By dotted field the values of the runs, of every field that is not the same in all."""
    trees = [dict(leaves(msgspec.to_builtins(load(run_config(run))))) for run in chosen]
    names = sorted(set().union(*trees) - {*_OF_ONE})
    values = {name: [tree.get(name) for tree in trees] for name in names}
    return {name: each for name, each in values.items() if any(v != each[0] for v in each)}


def _table(lines: Sequence[Line]) -> Table:
    table = Table("run", "state", box=None, pad_edge=False, header_style="bold")
    for name in ("steps", "EM first", "last", "best", "lasted"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line.cells())
    return table


def _differences(lines: Sequence[Line], differing: dict[str, list[Any]]) -> Split:
    names = [clean(line.name) for line in lines]
    table = Table("field", *names, box=None, pad_edge=False, header_style="bold")
    for name, values in differing.items():
        table.add_row(name, *shown_apart([_text(value) for value in values]))
    return Split(table)


def shown_apart(texts: Sequence[str]) -> list[str]:
    """Texts without much of what they have in common, cut where those that differ still do."""
    if max(map(len, texts)) <= WIDEST:
        return list(texts)
    same = sum(
        1 for _ in takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))
    )
    first = max(0, same - BEFORE)
    parts = [f"{'…' * (first > 0)}{text[first:]}" for text in texts]
    cut = [part if len(part) <= WIDEST else f"{part[: WIDEST - 1]}…" for part in parts]
    return cut if len({*cut}) == len({*texts}) else list(texts)


def _text(value: Any) -> str:
    return clean(value if isinstance(value, str) and value.isprintable() else repr(value))


def _drawn(lines: Sequence[Line], path: Path) -> Path:
    from matplotlib import pyplot  # a second that a list need not wait for

    from scripts.runs.plot import plain, save

    with_curve = [line for line in lines if line.evaluations]
    if not with_curve:
        raise ConfigError(f"--plot {str(path)!r}: no evaluation has ended in these runs yet")
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for line in with_curve:
        steps = sorted(line.evaluations)
        values = [line.evaluations[step] for step in steps]
        axes.plot(steps, values, "o-", label=plain(line.name))
    axes.set(xlabel="step", ylabel="exact match (greedy)", ylim=(-0.02, 1.02))
    axes.legend(loc="best", frameon=False)
    return save(figure, [axes], path)
