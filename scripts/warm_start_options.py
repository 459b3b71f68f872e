"""The command line of `scripts/warm_start.py`."""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from configs.load import ConfigError

MOST_EPOCHS = 1_000_000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options given. Exits with a message that names what is none."""
    parser = argparse.ArgumentParser(description="Learn from demonstrations, supervised.")
    parser.add_argument("config", help="a YAML file, for example configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields to override")
    source = parser.add_mutually_exclusive_group(required=True)
    add = source.add_argument
    add("--demonstrations", type=Path, action="append", metavar="FILE", help="JSONL; repeatable")
    add("--from-run", type=Path, metavar="RUN", help="what this run's actors were rewarded for")
    add = parser.add_argument
    add("--reward", type=_finite, default=1.0, help="with --from-run: the least (default 1)")
    add("--out", type=Path, metavar="FOLDER", help="default: runs/warm-start-<config>-<time>")
    add("--epochs", type=_epochs, default=1.0, help="passes over the demonstrations")
    add("--steps", type=int, default=0, help="optimiser steps, instead of --epochs")
    add("--rows", type=int, default=32, help="demonstrations of a step (default 32)")
    add("--held-out", type=float, default=0.05, help="share of the questions (default 0.05)")
    add("--skip-bad", action="store_true", help="go on without rows that cannot be used")
    given = parser.parse_intermixed_args(argv)
    if not (0 <= given.held_out < 1 and given.rows > 0 and given.steps >= 0):
        parser.error("--held-out is a share from 0 to below 1, --rows and --steps are numbers")
    return given


def require_files(paths: Iterable[Path]) -> None:
    """Raise ConfigError for a file of demonstrations that is none, or empty: found before anything
    takes time.
    """
    for path in paths:
        shown = f"--demonstrations {str(path)!r}"
        if not path.exists():
            raise ConfigError(f"{shown}: no such file: name a JSONL file of demonstrations")
        if path.is_file() and not path.stat().st_size:
            raise ConfigError(f"{shown}: it is empty: write one demonstration a line")


def _epochs(text: str) -> float:
    number = float(text)
    if not 0 < number <= MOST_EPOCHS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number above 0, and {MOST_EPOCHS} at most"
        )
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r}: give a finite number")
    return number
