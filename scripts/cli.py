"""`forage`, the command: its words, their functions, and the exit code of every ending.

A command is a function that takes one frozen dataclass of options (`scripts.options`). Its module
is imported when the command is called, so that `forage --help` is quick. Exit codes: 0 done, 1
failed, 2 bad input, 130 interrupted; a command may return one of its own (3: stopped by rule).
"""

import difflib
import importlib
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from configs.load import ConfigError
from configs.process import assert_packages, die_with_parent
from scripts.overrides import is_override

if multiprocessing.parent_process():
    die_with_parent()  # vLLM's engine child imports the main module of its parent: this one

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Command:
    """`target` is `module:function`; the function's one parameter says what its options are."""

    target: str
    help: str

    def function(self) -> Callable[[Any], int | None]:
        """Import the module; the function."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


COMMANDS = {
    "compact": Command("scripts.compact:compact", "Make a finished run's log smaller."),
    "bench learner": Command("scripts.bench_learner:bench", "The cost of the learner's step."),
    "bench staleness": Command("scripts.bench_staleness:bench", "Corrections by staleness."),
    "bench stream": Command("scripts.bench_stream:bench", "Trajectories into the durable log."),
    "bench weight-sync": Command("scripts.bench_weight_sync:bench", "New weights to the actors."),
    "bench retrieval": Command("scripts.bench_retrieval:bench", "Searches, and their latency."),
    "bench overlap": Command("scripts.bench_overlap:bench", "Waiting for searches, hidden."),
}
GROUPS = {
    "data": "Prepare questions, audit a corpus.",
    "bench": "Measure one part side by side with its baseline.",
}


def run() -> None:
    """The console entry."""
    assert_packages()
    sys.exit(main())


def main(words: Sequence[str] | None = None) -> int:
    """Parse, call one command, map its ending to an exit code."""
    words = list(sys.argv[1:] if words is None else words)
    name = _named(words)
    if not words:
        return _say(f"name a command: {', '.join(COMMANDS)}; `forage --help` says what they do")
    try:
        command = typer.main.get_command(application(name))
        listed = _options_of(COMMANDS[name]) if name in COMMANDS else []
        found = command.main(
            list(_one_each(words, listed)), prog_name="forage", standalone_mode=False
        )
        return found or DONE
    except typer.TyperException as error:
        return _say(_explained(error, name, words))
    except ConfigError as error:
        return _say(str(error))
    except KeyboardInterrupt:
        print("forage: interrupted", file=sys.stderr)
        return INTERRUPTED
    except _failures() as error:
        print(f"forage: {error}", file=sys.stderr)
        return FAILED


def _failures() -> tuple[type[Exception], ...]:
    """The error roots of the packages, each from its protocol leaf."""
    from actors.errors import ActorError
    from replay.protocol import ReplayError
    from retrieval_server.protocol import RetrievalError
    from scripts.bench_harness import BenchError

    return OSError, ActorError, ReplayError, RetrievalError, BenchError


def _say(text: str) -> int:
    print(f"forage: {text}", file=sys.stderr)
    return BAD_INPUT


def application(name: str) -> typer.Typer:
    """All commands by name and help; the options of the one that is called."""
    app = typer.Typer(no_args_is_help=False, help="Train language models to search.")
    groups = {group: typer.Typer(help=help) for group, help in GROUPS.items()}
    for group, inner in groups.items():
        app.add_typer(inner, name=group)
    for path, command in COMMANDS.items():
        group, _, last = path.rpartition(" ")
        place = groups[group] if group else app
        called = _callback(command) if path == name else _unread
        place.command(last, help=command.help)(called)
    return app


def _unread() -> None:
    """What stands for a command that is not called."""


def _named(words: Sequence[str]) -> str:
    """The command that the words begin with, in one word or two; '' for none."""
    plain = [word for word in words[:2] if not word.startswith("-")]
    return next((each for each in (" ".join(plain), *plain[:1]) if each in COMMANDS), "")


def _flag(of: Field[Any]) -> str:
    return f"--{of.name.replace('_', '-')}"


def _shown(of: Field[Any]) -> str | None:
    return of.name.upper() if of.metadata["positional"] else None


def _options_of(command: Command) -> list[Field[Any]]:
    options = get_type_hints(command.function())["options"]
    hints = get_type_hints(options)
    found = list(fields(options))
    for each in found:
        each.type = hints[each.name]
    return found


def _callback(command: Command) -> Callable[..., int | None]:
    """A function with the dataclass's fields as parameters, as typer reads them."""
    function = command.function()
    options = get_type_hints(function)["options"]
    parameters = [_parameter(each) for each in _options_of(command)]

    def call(**given: Any) -> int | None:
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
        return function(options(**values))

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _parameter(of: Field[Any]) -> inspect.Parameter:
    kind: Any = of.type
    several = get_origin(kind) is tuple
    if several:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    default = list(of.default) if several and of.default is not MISSING else of.default
    words = {"help": of.metadata["help"], "metavar": of.metadata["metavar"] or _shown(of)}
    positional = of.metadata["positional"]
    info = typer.Argument(**words) if positional else typer.Option(_flag(of), **words)
    return inspect.Parameter(
        of.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, info],
    )


def _one_each(words: Sequence[str], listed: Sequence[Field[Any]]) -> Iterator[str]:
    """`--sets a b` as `--sets a --sets b`: such an option takes all words up to the next option
    or override.
    """
    options = [each for each in listed if not each.metadata["positional"]]
    several = {_flag(each) for each in options if get_origin(each.type) is tuple}
    current, first = "", False
    for word in words:
        if word.startswith("-") or is_override(word):
            current, first = (word if word in several else ""), True
        elif current:
            if not first:
                yield current
            first = False
        yield word


def _explained(error: typer.TyperException, name: str, words: Sequence[str]) -> str:
    """One line: what is wrong, and the nearest that could be meant."""
    text = " ".join(error.format_message().split())
    option = getattr(error, "option_name", "")
    if option and name:
        listed = _options_of(COMMANDS[name])
        own = [_flag(each) for each in listed if not each.metadata["positional"]]
        near = difflib.get_close_matches(option, own)
        text = f"{name}: no option {option}"
        text += f": did you mean {near[0]}?" if near else f"; it takes {', '.join(own)}"
    return f"{text} (forage {name or ''}{' ' if name else ''}--help)"


if __name__ == "__main__":
    run()
