"""The table of what each data set came to."""

import io

from rich.console import Console

from learner.evaluations import Score
from scripts.runs.scores import scores_table


def test_each_score_has_its_first_best_and_last() -> None:
    scores = {
        0: Score({"em": 0.1, "nq/em": 0.2}, {}),
        5: Score({"em": 0.4, "nq/em": 0.1}, {}),
        10: None,
        15: Score({"em": 0.3, "nq/em": 0.2, "nq/judge": 1.0}, {}),
    }
    table = scores_table(scores, "nq/em")
    console = Console(width=80, record=True, file=io.StringIO())
    assert table is not None
    console.print(table)
    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "at" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["em", "0.100 at 0", "0.400 at 5", "0.300 at 15"],
        ["nq/em", "0.200 at 0", "0.200 at 0", "0.200 at 15"],
        ["nq/judge", "1.000 at 15", "1.000 at 15", "1.000 at 15"],
    ]
    assert scores_table({0: Score({"em": 0.1, "f1": 0.2}, {})}, "em") is None
