"""A fault that `scripts/mutants.py` plants."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` stands exactly once in `file` and becomes `new`; `tests` are pytest's
    arguments.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
