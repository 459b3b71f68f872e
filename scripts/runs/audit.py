"""An audit of a run: one fold over `<run>/events.log`, by a reader that shares no code with replay.

Every payload is decoded, and what its record claims of it reckoned again. Every lease ends once,
every trajectory is delivered once, every train group is trained once or dropped by a cause, or
still stands. The log of a run that goes on can be audited too.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from configs.runtime.files import write_json
from configs.runtime.process import Exit
from scripts.command.options import Options, argument, option, refusing
from scripts.command.terminal import Bars, clean
from scripts.runs.books import Audit
from scripts.runs.log import log_of
from scripts.runs.record.frames import LogReader, UnreadableLog

MOST_SHOWN = 20
RECORDS_SHOWN = 1000  # as often the bar moves


@dataclass(frozen=True)
class AuditOptions(Options):
    run: Path = argument("the run's directory, for example runs/latest")
    json: Path | None = option("write the figures there", metavar="FILE")


def audit(options: AuditOptions) -> int:
    """Audit one run; failed where its books do not close, each fault named."""
    books = Audit()
    log = log_of(options.run)
    with refusing(UnreadableLog, OSError):
        _fold(books, log)
    show(books, Console())
    if options.json:
        write_json(options.json, books.summary())
    return Exit.FAILED if books.fault_count else Exit.DONE


def _fold(books: Audit, log: Path) -> None:
    reader = LogReader(log)
    size = sum(file.stat().st_size for file in reader.files)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bars(*columns) as bars:
        task = bars.add_task(f"reading {size / 1e6:,.1f} MB of {log.name}", total=size)
        for done in books.folding(reader):
            if books.records % RECORDS_SHOWN == 0:
                bars.update(task, completed=done)


def show(books: Audit, console: Console) -> None:
    """The books as tables, then the verdict."""
    summary = books.summary()
    for name in ("train_groups", "eval_groups", "leases", "deliveries"):
        if not summary[name]:
            continue
        table = Table(title=name.replace("_", " "), title_justify="left")
        for column in summary[name]:
            table.add_column(Text(clean(column)), justify="right")
        table.add_row(*map(str, summary[name].values()))
        console.print(table)
    shown = books.faults[:MOST_SHOWN]
    for fault in shown:
        console.print(Text(clean(fault), "red"))
    if left := books.fault_count - len(shown):
        console.print(f"... and {left:,} more")
    if books.torn:
        console.print(Text(clean(f"the last record is cut short: {books.torn}"), "yellow"))
    if books.token_mismatches:
        console.print(
            f"[red]{books.token_mismatches} leases were given back by the token audit: the actors' "
            "logs say why (TokenMismatch)"
        )
    decoded, gone = (books.payloads[each] for each in ("decoded", "compacted away"))
    without = f"; {gone:,} were compacted away, and are believed" if gone else ""
    console.print(f"{books.records:,} records, {decoded:,} payloads decoded{without}")
    rollouts, sequences, whole = summary["merging"].values()
    if sequences > rollouts:
        share = f"{100 * whole:.1f} % have one"
        console.print(f"{rollouts:,} rollouts have {sequences:,} sequences; {share}")
    verdict = "[red]the books do not close" if books.fault_count else "[green]the books close"
    age = "" if books.staleness_max is None else f", at most {books.staleness_max} steps old"
    steps = f"{summary['steps']} steps sampled, committed up to {books.committed}"
    console.print(f"{verdict}[/]: {steps}{age}")
