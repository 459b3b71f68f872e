"""Compaction of a run's event log: payloads of what is settled leave its closed segments.

`relearn`, `sync --recorded` and `show` need what it takes: keep a copy of the log for those. It may
be ended at any time, and run again.
"""

from dataclasses import dataclass
from pathlib import Path

from replay.log.compaction import compact as compacted
from replay.protocol import LogError
from scripts.command.options import argument, refusing
from scripts.command.terminal import awaited, clean
from scripts.runs.log import log_of, reading


@dataclass(frozen=True)
class CompactOptions:
    run: Path = argument("the run's directory")


def compact(options: CompactOptions) -> None:
    """Compact one run's log. Raises ConfigError where there is none, or a process writes it."""
    before = after = closed = 0
    with refusing(LogError):
        log = log_of(options.run)
        for change in awaited(compacted(log), reading(log)):
            done = change.kept or f"{change.payloads} payloads taken away"
            print(
                clean(
                    f"{change.path}: {change.bytes_before} -> {change.bytes_after} bytes: {done}"
                ),
                flush=True,
            )
            before, after = before + change.bytes_before, after + change.bytes_after
            closed += 1
    if not closed:
        print("no segment is closed yet (replay.segment_bytes): there is nothing to compact")
    print(f"closed segments: {before} bytes before, {after} bytes after")
