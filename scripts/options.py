"""Options of a command: the fields of a frozen dataclass beside the function that it is for.

    @dataclass(frozen=True)
    class ShowOptions:
        run: Path = argument("a run directory, for example runs/latest")
        step: int | None = option("only the batch of this step")

`scripts.cli` makes the command line of it: a field `eval_every` is `--eval-every`, a `bool` a flag;
a `tuple[T, ...]` takes one word or more, a `Literal` is one of its words. A leaf module.
"""

from dataclasses import MISSING, field
from typing import Any


def argument(help: str, *, default: Any = MISSING, metavar: str = "") -> Any:
    """A positional word; required without a default. A `tuple[T, ...]` takes all that are left."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "positional": True})


def option(help: str, *, default: Any = None, metavar: str = "") -> Any:
    """`--name VALUE`, or a flag `--name`; `default=MISSING` (of dataclasses) makes it required."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "positional": False})


def overrides() -> Any:
    """Fields of the configuration, `a.b=c`, as the words that no other argument takes."""
    return argument("fields of the configuration to override", default=(), metavar="a.b=c")
