"""Make a run's event log smaller: `scripts/compact.py RUN`.

Takes the payloads of what is trained and committed, dropped or evaluated out of the log's closed
segments (`replay.compaction`). `--resume`, `audit.py`, the summary and the curve do without them;
`relearn.py`, `train_sync.py` and `show.py` do not: keep a copy of the log for those. Exit code 0:
done, 2: there is no log to compact, or a process writes it. It may be ended at any time, and run
again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from replay.compaction import compact
from replay.log import FILE_NAME
from replay.protocol import LogError


def main(words: Sequence[str] | None = None) -> int:
    """Compact one run's log; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's directory")
    arguments = parser.parse_args(words)
    before = after = closed = 0
    try:
        for change in compact(arguments.run / FILE_NAME):
            done = change.kept or f"{change.payloads} payloads taken away"
            print(f"{change.path}: {change.bytes_before} -> {change.bytes_after} bytes: {done}")
            before, after = before + change.bytes_before, after + change.bytes_after
            closed += 1
    except LogError as error:
        print(f"compact: {error}", file=sys.stderr)
        return 2
    if not closed:
        print("no segment is closed yet (replay.segment_bytes): there is nothing to compact")
    print(f"closed segments: {before} bytes before, {after} bytes after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
