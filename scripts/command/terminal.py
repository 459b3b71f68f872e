"""The view of a terminal of any width, on standard error where it is progress: a spinner, bars,
tables. Without a terminal, progress is a line every so often.

Text of policies, passages, questions, logs and other people's records is not trusted: a terminal
would obey it. Whatever shows some takes it through `clean`, and lets rich read no markup in it.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.cells import cell_len, split_graphemes
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress import Progress
from rich.spinner import Spinner
from rich.table import Column, Table

from configs.runtime.text import clean as clean

FILE_WIDTH = 80  # of lines that every run has, where they go to no terminal
TAB = 8  # cells between two stops
FIRST_S = 5.0  # without a terminal: what is over sooner has no line
EVERY_S = 5.0  # between two lines of one job
PERIOD_S = 3600.0  # what the time that is left is reckoned from: a step may take minutes
T = TypeVar("T")


@contextmanager
def status(text: str | Callable[[], str], file: IO[str] | None = None) -> Iterator[None]:
    """Show that `text`, or what it says each time, is under way, on standard error or `file`."""
    console = Console(stderr=True, file=file)
    said = text if callable(text) else lambda: text
    spinner = Spinner("dots", said())

    def shown() -> Spinner:
        spinner.update(text=said())
        return spinner

    if console.is_terminal:
        # Redirected, `sys.stdout` would be the terminal too, wherever standard output goes; and
        # standard error, where it is not what is shown on.
        with Live(
            get_renderable=shown,
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=file is None,
        ):
            yield
    else:
        with _lines(said, console.file):
            yield


def awaited(items: Iterable[T], text: str) -> Iterator[T]:
    """Yield the items; show that `text` is under way while one is awaited, never beside what is
    printed of those before.
    """
    left = iter(items)
    while True:
        with status(text):
            try:
                item = next(left)
            except StopIteration:
                return
        yield item


def complain(text: str) -> None:
    """Print an error to standard error; in a terminal each line is `broken` at its width."""
    width = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    for line in f"forage: {clean(text)}".split("\n"):
        print(broken(line, width) if width else line, file=sys.stderr)


def broken(line: str, width: int) -> str:
    """The line, broken at words into lines of this width, in the cells that a terminal has; its own
    indent, and two further spaces, stand before the second and those after it. A word that is wider
    is folded. A path or URL (a word with a `/`) never is: it is there to be copied whole, and what
    is too wide of it is left to the terminal.
    """
    line = _without_tabs(line).rstrip()
    if cell_len(line) <= width:
        return line
    width = max(width, 4)  # of two cells, and two before them
    indent = " " * min(cell_len(line[: len(line) - len(line.lstrip())]), width - 4)
    hang = f"{indent}  "
    lines = [indent]
    for blanks, word in re.findall(r"(\s*)(\S+)", line.lstrip()):
        # Measured as they stand together: what a joiner takes depends on what it joins.
        fits = cell_len(lines[-1] + blanks + word) <= width
        if fits or ("/" in word and not lines[-1].strip()):
            lines[-1] += blanks + word
        elif "/" in word or cell_len(hang + word) <= width:
            lines.append(hang + word)
        elif width - cell_len(lines[-1] + blanks) > 1:
            lines += _folded(lines.pop() + blanks, word, hang, width)
        else:
            lines += _folded(hang, word, hang, width)
    return "\n".join(lines)


def _folded(begun: str, word: str, hang: str, width: int) -> list[str]:
    """The line that has begun, filled with the word, and those after it."""
    lines = [begun]
    for start, end, _ in split_graphemes(word)[0]:
        if cell_len(lines[-1] + word[start:end]) > width:
            lines.append(hang)
        lines[-1] += word[start:end]
    return lines


def _without_tabs(line: str) -> str:
    """The line with blanks up to each next stop, every eight cells, for its tabs."""
    first, *rest = line.split("\t")
    parts, filled = [first], cell_len(first)
    for part in rest:
        blanks = TAB - filled % TAB
        parts.append(" " * blanks + part)
        filled += blanks + cell_len(part)
    return "".join(parts)


def above(line: str) -> None:
    """Print a line to standard output, above the bars that a terminal shows meanwhile: a console
    of rich's own would write behind them.
    """
    print(line, flush=True)


class Bars(Progress):
    """rich's progress bars, on standard error or `file`."""

    def __init__(self, *columns: Any, file: IO[str] | None = None) -> None:
        console, ours = Console(stderr=True, file=file), file is None
        super().__init__(
            *columns,
            console=console,
            speed_estimate_period=PERIOD_S,
            disable=not console.is_terminal,
            auto_refresh=console.is_terminal,  # else rich counts in a thread that ends at once
            redirect_stdout=ours and sys.stdout.isatty(),  # above the bars; never out of a file
            redirect_stderr=ours,
        )
        self._running = ExitStack()

    def start(self) -> None:
        """Begin to show them."""
        super().start()
        if self.disable:
            self._running.enter_context(_lines(self._line, self.console.file))

    def stop(self) -> None:
        """Show their end."""
        self._running.close()
        if not self.disable:
            super().stop()

    def _line(self) -> str:
        shown = []
        for task in self.tasks:
            of = f" of {task.total:,.0f}" if task.total else ""
            done = f": {task.completed:,.0f}{of}" if of or task.completed else ""
            if not task.finished:
                shown.append(task.description.strip() + done)
        return ", ".join(shown) or "ending"


@contextmanager
def chatter_to(log: Path) -> Iterator[IO[str]]:
    """Have this process and its children write to a new file what they would write to standard
    output and error; yield what standard error was.
    """
    kept = os.dup(1), os.dup(2)
    with log.open("wb") as file, os.fdopen(os.dup(2), "w", buffering=1) as terminal:
        redirect(file.fileno(), file.fileno())
        try:
            yield terminal
        finally:
            redirect(*kept)
            for each in kept:
                os.close(each)


def logged_cause(log: Path) -> str:
    """`: Cause; see LOG`: the last error that a log names, and where it is."""
    said = log.read_text(errors="replace") if log.exists() else ""
    causes = re.findall(r"\b\w+(?:Error|Exception): .+", said)
    return f"{f': {causes[-1]}' if causes else ''}; see {log}"


def redirect(out: int, error: int) -> None:
    """Have this process write to these descriptors as its standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(error, 2)


class Split:
    """A table; where the terminal is too narrow for it, several, each with its first `keys` columns
    and some of the others. Nothing is cut.
    """

    def __init__(self, table: Table, keys: int = 1) -> None:
        self._table, self._keys = table, keys
        for column in table.columns:
            column.overflow = "fold"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left, title = self._table.columns[self._keys :], self._table.title
        while left:
            counts = range(len(left), 0, -1)
            part = next(
                part for n in counts if self._fits(part := self._of(left[:n]), console, options)
            )
            part.title, title = title, None  # of the first alone
            yield part
            left = left[len(part.columns) - self._keys :]

    def _of(self, columns: Sequence[Column]) -> Table:
        part, shown = copy(self._table), [*self._table.columns[: self._keys], *columns]
        part.columns = [replace(column, _index=n) for n, column in enumerate(shown)]
        return part

    def _fits(self, part: Table, console: Console, options: ConsoleOptions) -> bool:
        if len(part.columns) == self._keys + 1:
            return True
        unlimited = options.update(max_width=sys.maxsize)
        return Measurement.get(console, unlimited, part).maximum <= options.max_width


@contextmanager
def _lines(line: Callable[[], str], file: IO[str]) -> Iterator[None]:
    """Write what `line` returns after FIRST_S, then after every further EVERY_S."""
    ended = threading.Event()

    def write() -> None:
        seconds = 0.0
        while not ended.wait(EVERY_S if seconds else FIRST_S):
            seconds += EVERY_S if seconds else FIRST_S
            print(f"{line()} ({seconds:.0f} s)", file=file, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
