"""How long a version takes by each transport that the machine's GPUs can do, against one copy of
the same bytes: `python -m tests.gpu.transports [--json FILE]`. Says what it skips, and why.
`--device cpu` measures what needs no GPU.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from rich.table import Table

from scripts.bench.harness import START_S, medians, present
from scripts.bench.weight_sync.peer import CONFIG, DEADLINE_S, model
from scripts.bench.weight_sync.run import Row, peers, published
from weight_sync.publisher import Publisher

MB = 1_000_000
ROWS = (Row(100 * MB, 300, 1), Row(1000 * MB, 300, 1), Row(1000 * MB, 5000, 1))


def usable(device: str) -> list[tuple[str, str]]:
    """The transports that can be measured here, each with the receiver's device."""
    if device == "cpu":
        return [("gloo", "cpu"), ("snapshot", "cpu")]
    ways = [("cuda_ipc", "cuda:0"), ("gloo", "cuda:0"), ("snapshot", "cuda:0")]
    return [*ways, ("nccl", "cuda:1")] if torch.cuda.device_count() > 1 else ways


def measure(row: Row, transport: str, device: str, receiver: str, rounds: int) -> dict[str, Any]:
    """Medians of one row by one transport, after a round that does not count."""
    weights = model(row.tensors, row.nbytes, device)
    config = msgspec.structs.replace(CONFIG, transport=transport)
    seen = []
    with TemporaryDirectory(prefix="forage-gpu-") as folder:
        endpoint = f"ipc://{folder}/sync"
        words = [["forage", f"actor-{i}", endpoint, receiver] for i in range(row.receivers)]
        with (
            peers(words, row, Path(folder)),
            Publisher(config, row.receivers, 1, endpoint) as publisher,
        ):
            publisher.wait_for_actors(START_S)
            for version in range(rounds + 1):
                for weight in weights.values():
                    weight.add_(1.0)
                found = published(publisher, version, weights)
                found["copy_s"] = copied(weights)
                seen.append(found)
    return {"transport": transport, **msgspec.to_builtins(row), **medians(seen[1:])}


def copied(weights: dict[str, torch.Tensor]) -> float:
    """Seconds of one copy of all of it, on its device."""
    flat = torch.cat([weight.view(-1) for weight in weights.values()])
    target = flat.clone()
    waiting = torch.cuda.synchronize if flat.is_cuda else lambda: None
    waiting()
    begun = time.perf_counter()
    target.copy_(flat)
    waiting()
    return time.perf_counter() - begun


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for every row."""
    shown = Table("by", "MB", "tensors", "whole s", "trainer s", "copy s", "transfer s", "apply s",
                  "pause s", title="a version, published")  # fmt: skip
    for row in rows:
        names = ("whole_s", "publish_s", "copy_s", "broadcast_s", "apply_s", "generation_pause_s")
        figures = [f"{row[name]:.4f}" for name in names]
        shown.add_row(row["transport"], f"{row['nbytes'] / MB:g}", f"{row['tensors']:,}", *figures)
    return shown


def main(words: list[str] | None = None) -> int:
    """Measure and print; exit code 3 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, nargs="*", help="of these sizes only")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args(words)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("transports: no GPU here, so nothing was measured", file=sys.stderr)
        return 3
    sizes = given.megabytes and [Row(size * MB, 300, 1) for size in given.megabytes]
    rows = []
    for row in sizes or ROWS:
        for transport, receiver in usable(given.device):
            print(f"{row.nbytes // MB} MB by {transport}", file=sys.stderr)
            rows.append(measure(row, transport, given.device, receiver, given.rounds))
    if given.device == "cuda" and torch.cuda.device_count() < 2:
        print("nccl was left out: it needs two GPUs", file=sys.stderr)
    present([table(rows)])
    if given.json:
        found = {"device": given.device, "deadline_s": DEADLINE_S, "rows": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
