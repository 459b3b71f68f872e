"""The evaluations of a run as a table: of each score the first, the best and the last."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from learner.evaluations import Score
from scripts.command.terminal import clean


def scores_table(scores: Mapping[int, Score | None], best: str) -> Table | None:
    """A row for each score, greedy, the one that decides the best checkpoint in bold; None where
    no data set was told apart.
    """
    told = {step: score.greedy for step, score in sorted(scores.items()) if score}
    names = list(dict.fromkeys(name for greedy in told.values() for name in greedy))
    if not any("/" in name for name in names):
        return None
    table = Table("greedy", "first", "best", "last")
    for name in names:
        of = {step: greedy[name] for step, greedy in told.items() if name in greedy}
        top = max(of, key=lambda step: (of[step], -step))
        cells = [f"{of[step]:.3f} at {step}" for step in (min(of), top, max(of))]
        table.add_row(Text(clean(name)), *cells, style="bold" if name == best else "")
    return table
