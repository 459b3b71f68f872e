"""Options of a command: the fields of a frozen dataclass beside the function that it is for.

    @dataclass(frozen=True)
    class ShowOptions:
        run: Path = argument("a run directory, for example runs/latest")
        step: int | None = option("only the batch of this step")

`scripts.cli` makes the command line of it: a field `eval_every` is `--eval-every`, a `bool` a flag;
a `tuple[T, ...]` takes one word or more, a `Literal` is one of its words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from configs.load import ConfigError

WRITTEN = ("json", "plot", "export")  # options that name a file to write


@dataclass(frozen=True)
class Options:
    """The base of checked options. Raises ConfigError for a value below its field's `least`, and
    for a file to write that has no folder or is one.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            given, least = getattr(self, each.name), each.metadata["least"]
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and least is not None and value < least:
                    raise ConfigError(f"{flag(each.name)} {value}: at least {least}")
            if each.name in WRITTEN and given:
                require_folder(flag(each.name), given)


def require_folder(name: str, file: Path) -> None:
    """Raise ConfigError where a file cannot be written, named by its option."""
    if file.is_dir():
        raise ConfigError(f"{name} {str(file)!r}: it is a folder: name a file in it")
    if not file.resolve().parent.is_dir():
        raise ConfigError(f"{name} {str(file)!r}: there is no such folder to write it in")


def flag(name: str) -> str:
    """The spelling of an option on the command line; `from_` is `--from`."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def argument(help: str, *, default: Any = MISSING, metavar: str = "") -> Any:
    """A positional word; required without a default. A `tuple[T, ...]` takes all that are left."""
    told = {"help": help, "metavar": metavar, "positional": True, "least": None}
    return field(default=default, metadata=told)


def option(help: str, *, default: Any = None, metavar: str = "", least: float | None = None) -> Any:
    """`--name VALUE`, or a flag `--name`; `default=MISSING` (of dataclasses) makes it required.
    `least`: the least value, or that of each, checked by `Options`; None passes.
    """
    told = {"help": help, "metavar": metavar, "positional": False, "least": least}
    return field(default=default, metadata=told)


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Have errors of these kinds refuse the input: raise them anew as ConfigError."""
    try:
        yield
    except kinds as error:
        raise ConfigError(str(error)) from error


def overrides() -> Any:
    """Fields of the configuration, `a.b=c`, as the words that no other argument takes."""
    return argument("fields of the configuration to override", default=(), metavar="a.b=c")
