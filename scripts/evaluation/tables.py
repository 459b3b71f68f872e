"""An evaluation as it is shown: progress bars, a table of methods by sets, and one of details."""

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from scripts.command import terminal
from scripts.command.terminal import Split, clean
from scripts.evaluation.report import Figures
from scripts.evaluation.rows import Row

Report = Callable[[Row], None]
Methods = Mapping[str, Mapping[str, Figures]]  # environment → set → figures


class Bars(terminal.Bars):
    """A progress bar for each environment, after one for the engine that starts."""

    def __init__(self, file: IO[str] | None = None) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        figures = TextColumn("{task.fields[figures]}")
        super().__init__(*columns, figures, TimeRemainingColumn(), file=file)
        self._starting = self.add_task("starting the engine", total=None, figures="")

    def begin(self, name: str, total: int, done: Sequence[Row]) -> Report:
        """Begin a bar of `total` rows, some of them done; call the result with each further row."""
        count, right = len(done), sum(row.em for row in done)
        failed = sum(bool(row.failure) for row in done)
        self.update(self._starting, visible=False, total=1, completed=1)
        bar = self.add_task(name, total=total, completed=count, figures="")

        def report(row: Row) -> None:
            nonlocal count, right, failed
            count, right, failed = count + 1, right + row.em, failed + bool(row.failure)
            figures = f"EM {right / count:.3f}, {failed} failed"
            self.update(bar, completed=count, figures=figures)

        return report


def scores_table(report: Mapping[str, Any], metric: str = "em") -> Group:
    """Methods in rows, sets in columns: the metric ± half of its interval; the best are bold."""
    methods: Methods = report["methods"]
    sets = list(next(iter(methods.values())))
    table = Table("")
    for name in sets:
        questions = next(iter(methods.values()))[name]["questions"]
        table.add_column(Text(clean(f"{name}\n{questions:,}")), justify="right")
    best = {name: max(_mean(each[name], metric) for each in methods.values()) for name in sets}
    for method, figures in methods.items():
        cells = [_score(figures[name], metric, best[name], len(methods) > 1) for name in sets]
        table.add_row(Text(clean(method)), *cells)
    title = f"{_name(metric, report['samples'])} of {clean(report['name'])}, {_sampling(report)}"
    caption = f"± half of the 95 % bootstrap interval over questions{_failed(methods)}"
    return Group(Text(title, style="bold"), Split(table), Text(caption, style="dim"))


def details_table(report: Mapping[str, Any]) -> Group:
    """A row for each method and set: how its rollouts ended, other scores, work and time."""
    methods: Methods = report["methods"]
    sets = next(iter(methods.values()))
    metrics = [metric for metric in next(iter(sets.values()))["scores"] if metric != "em"]
    before = ["method", "set", "rows", "answered", "no answer", "failed", "EM [95 %]"]
    behind = ["searches", "turns", "malformed", "tokens", "p50 s", "p99 s"]
    table = Table(*before, *(_name(metric, 1) for metric in metrics), *behind)
    for column in table.columns[2:]:
        column.justify = "right"
    for method, figures in methods.items():
        for number, (name, each) in enumerate(figures.items()):
            words = ("" if number else method, name)
            table.add_row(*(Text(clean(word)) for word in words), *_details(each, metrics))
        table.add_section()
    endings = Text(clean("\n".join(_endings(methods))), style="dim")
    return Group(Text("Details", style="bold"), Split(table, keys=2), endings)


def paired_table(report: Mapping[str, Any]) -> Group:
    """The comparison with another evaluation: a row for each method and set."""
    other, name = report["against"], clean(report["name"])
    theirs = clean(other["name"])
    table = Table("method", "set", "questions", name, theirs, "difference [95 %]", "", "", "p")
    for column, head in zip(table.columns[6:8], ("better", "worse"), strict=True):
        column.header = head
    for column in table.columns[2:]:
        column.justify = "right"
    for method, sets in other["methods"].items():
        for number, (of, each) in enumerate(sets.items()):
            em = each["em"]
            table.add_row(
                Text(clean("" if number else method)),
                Text(clean(of)),
                f"{each['questions']:,}",
                _three(em["here"]),
                _three(em["there"]),
                f"{em['difference']:+.3f} [{em['low']:+.3f}, {em['high']:+.3f}]",
                f"{each['better']:,}",
                f"{each['worse']:,}",
                f"{each['p']:.2g}",
            )
        table.add_section()
    notes = ["exact match, question by question; p: exact test of the questions they differ on"]
    if left_out := max(list(s.values())[-1]["left_out"] for s in other["methods"].values()):
        notes.append(f"without {left_out:,} questions that only one of them was asked")
    notes += [f"they differ in more than weights: {clean(each)}" for each in other["unlike"]]
    title = Text(f"{name} against {theirs}", style="bold")
    return Group(title, Split(table, keys=2), Text("\n".join(notes), style="dim"))


def _details(figures: Figures, metrics: Sequence[str]) -> list[str]:
    em = figures["scores"]["em"]
    scores = [f"{_three(em['mean'])} [{_three(em['low'])}, {_three(em['high'])}]"]
    scores += [_three(_mean(figures, metric)) for metric in metrics]
    if "rows" not in figures:  # an average of scores
        return ["", "", "", "", *scores]
    counts = [f"{figures[name]:,}" for name in ("rows", "answered", "no_answer", "failed")]
    work = [f"{figures[name]:.2f}" for name in ("searches", "turns", "malformed")]
    work.append(f"{figures['action_tokens']:.0f}")
    seconds = [f"{figures['timing'][name]:.2f}" for name in ("rollout_p50_s", "rollout_p99_s")]
    return counts + scores + work + seconds


def _endings(methods: Methods) -> list[str]:
    lines = ["tokens: sampled in a rollout; p50, p99: of its seconds, with others in flight"]
    for method, sets in methods.items():
        figures = list(sets.values())[-1]  # the last is of all sets
        ends = [f"{name} {count:,}" for name, count in figures["stops"].items()]
        failures = [f"failed by {name} {count:,}" for name, count in figures["failures"].items()]
        hops = [f"EM at {n} hops {_three(em)}" for n, em in figures["em_by_hops"].items()]
        lines.append(f"{method}: {', '.join([*ends, *failures, *hops])}")
    return lines


def _score(figures: Figures, metric: str, best: float, marked: bool) -> Text:
    score = figures["scores"][metric]
    text = f"{_three(score['mean'])} ±{_three((score['high'] - score['low']) / 2)}"
    return Text(text, style="bold" if marked and score["mean"] == best else "")


def _failed(methods: Methods) -> str:
    failed = {method: list(sets.values())[-1]["failed"] for method, sets in methods.items()}
    shown = [f"{method} {count:,}" for method, count in failed.items() if count]
    return f"; counted as wrong, because they failed: {', '.join(shown)}" if shown else ""


def _name(metric: str, samples: int) -> str:
    names = {"em": "Exact match", "f1": "F1", "substring": "sub-EM"}
    mean = f" (Avg@{samples})" if samples > 1 else ""
    return names.get(metric, metric) + mean


def _sampling(report: Mapping[str, Any]) -> str:
    if not report["temperature"]:
        return "greedy"
    samples = report["samples"]
    times = f", {samples} samples of each question" if samples > 1 else ""
    return f"T = {report['temperature']:g}{times}"


def _mean(figures: Figures, metric: str) -> float:
    return float(figures["scores"][metric]["mean"])


def _three(value: float) -> str:
    """.123, as scores are printed; 1.000 keeps its 1."""
    return f"{value:.3f}".removeprefix("0")
