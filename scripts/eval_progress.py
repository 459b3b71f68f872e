"""The bars of an evaluation: one for each environment, on the standard error stream.

Consumes rows as they come; shows how many are right, and how many failed, of all that there are.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scripts.eval_rows import Row

Report = Callable[[Row], None]


class Bars:
    """Use as a context manager."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("EM {task.fields[em]:.3f}, {task.fields[failed]} failed"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, total: int, done: Sequence[Row]) -> Report:
        """A bar of so many rows, of which some are there; what it returns is told of each other."""
        count, right = len(done), sum(row.em for row in done)
        failed = sum(bool(row.failure) for row in done)
        em = right / max(count, 1)
        bar = self._progress.add_task(name, total=total, completed=count, em=em, failed=failed)

        def report(row: Row) -> None:
            nonlocal count, right, failed
            count, right, failed = count + 1, right + row.em, failed + bool(row.failure)
            self._progress.update(bar, completed=count, em=right / count, failed=failed)

        return report
