"""Close a run's books: `scripts/audit.py RUN [--json FILE]`.

One fold over `<run>/events.log`, with books of its own: every lease ends once, every trajectory is
delivered once, every train group is trained once or dropped by a cause, or still stands. Exit code
0: the books close; 1: they do not, and each fault is named; 2: there is no log to read. The log of
a run that goes on can be audited too: what is under way stands.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from replay.log import FILE_NAME
from replay.protocol import LogError
from scripts.audit_books import Audit

MOST_SHOWN = 20


def show(audit: Audit, console: Console) -> None:
    """The books as tables, then the verdict."""
    summary = audit.summary()
    for name in ("train_groups", "eval_groups", "leases", "deliveries"):
        if not summary[name]:
            continue
        table = Table(title=name.replace("_", " "), title_justify="left")
        for column in summary[name]:
            table.add_column(column, justify="right")
        table.add_row(*map(str, summary[name].values()))
        console.print(table)
    for fault in audit.faults[:MOST_SHOWN]:
        console.print(f"[red]{fault}[/]")
    if len(audit.faults) > MOST_SHOWN:
        console.print(f"... and {len(audit.faults) - MOST_SHOWN} more")
    if audit.torn:
        console.print(f"[yellow]the last record is cut short: {audit.torn}[/]")
    if audit.token_mismatches:
        console.print(
            f"[red]{audit.token_mismatches} leases were given back by the token audit: the actors' "
            "logs say why (TokenMismatch)"
        )
    verdict = "[red]the books do not close" if audit.faults else "[green]the books close"
    age = "" if audit.staleness_max is None else f", at most {audit.staleness_max} steps old"
    steps = f"{summary['steps']} steps sampled, committed up to {audit.committed}"
    console.print(f"{verdict}[/]: {steps}{age}")


def main(words: Sequence[str] | None = None) -> int:
    """Audit one run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(words)
    audit = Audit()
    try:
        audit.fold(arguments.run / FILE_NAME)
    except LogError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    show(audit, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(audit.summary(), indent=2) + "\n")
    return 1 if audit.faults else 0


if __name__ == "__main__":
    sys.exit(main())
