"""An audit of a run: one fold over `<run>/events.log`, with books of its own.

Every lease ends once, every trajectory is delivered once, every train group is trained once or
dropped by a cause, or still stands. The log of a run that goes on can be audited too.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.runtime.files import write_json
from configs.runtime.process import Exit
from replay.protocol import LogError
from scripts.options import Options, argument, option, refusing
from scripts.runs.books import Audit
from scripts.runs.log import log_of, reading
from scripts.terminal import clean, status

MOST_SHOWN = 20


@dataclass(frozen=True)
class AuditOptions(Options):
    run: Path = argument("the run's directory, for example runs/latest")
    json: Path | None = option("write the figures there", metavar="FILE")


def audit(options: AuditOptions) -> int:
    """Audit one run; failed where its books do not close, each fault named."""
    books = Audit()
    log = log_of(options.run)
    with refusing(LogError), status(reading(log)):
        books.fold(log)
    show(books, Console())
    if options.json:
        write_json(options.json, books.summary())
    return Exit.FAILED if books.faults else Exit.DONE


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
    for fault in books.faults[:MOST_SHOWN]:
        console.print(Text(clean(fault), "red"))
    if len(books.faults) > MOST_SHOWN:
        console.print(f"... and {len(books.faults) - MOST_SHOWN} more")
    if books.torn:
        console.print(Text(clean(f"the last record is cut short: {books.torn}"), "yellow"))
    if books.token_mismatches:
        console.print(
            f"[red]{books.token_mismatches} leases were given back by the token audit: the actors' "
            "logs say why (TokenMismatch)"
        )
    verdict = "[red]the books do not close" if books.faults else "[green]the books close"
    age = "" if books.staleness_max is None else f", at most {books.staleness_max} steps old"
    steps = f"{summary['steps']} steps sampled, committed up to {books.committed}"
    console.print(f"{verdict}[/]: {steps}{age}")
