"""`forage`, the command: its words, their functions, and the exit code of every ending.

A command is a function that takes one frozen dataclass of options (`scripts.command.options`).
Its module is imported when the command is called, so that `forage --help` is quick. Exit codes: 0
done, 1 failed, 2 bad input, 3 stopped by rule, 130 interrupted; a command may return others.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from configs import hints
from configs.load import FIELDS, ConfigError
from configs.runtime.files import Locked, LockUnsupported, is_full
from configs.runtime.process import Exit, assert_packages, die_with_parent
from configs.runtime.signals import Interrupt
from scripts.command.options import flag
from scripts.command.terminal import complain
from scripts.setup.overrides import is_override

if "__mp_main__" in sys.modules:
    # vLLM's engine child runs the main file of its parent by this name: `forage`, which imports us.
    # `multiprocessing.parent_process` is not set that early.
    die_with_parent()


@dataclass(frozen=True)
class Command:
    """`target`: `module:function` of `scripts`; the one parameter says what its options are."""

    target: str
    help: str

    @property
    def module(self) -> str:
        """The dotted name of its module."""
        return f"scripts.{self.target.partition(':')[0]}"

    def function(self) -> Callable[[Any], int | None]:
        """Import the module; the function."""
        name = self.target.partition(":")[2]
        return getattr(importlib.import_module(self.module), name)  # type: ignore[no-any-return]


COMMANDS = {
    "demo": Command(
        "demo.demo:demo",
        "Train on a task that comes with it, on two cores: a made-up world, or real text (wiki).",
    ),
    "train": Command("fleet.launch:train", "Train, or only evaluate, a model."),
    "resume": Command("fleet.launch:resume", "Go on with a run."),
    "scale": Command("fleet.scale:scale", "Change the number of a running run's actors."),
    "sync": Command("train_sync:sync", "Train in one process, synchronously."),
    "warm-start": Command("warm_start.warm_start:warm_start", "Learn from demonstrations first."),
    "evaluate": Command("evaluation.evaluate:evaluate", "Ask a model every question of test sets."),
    "ask": Command("ask.ask:ask", "Ask a trained model questions in the terminal."),
    "try": Command("ask.dry_run:try_question", "Play one question, without training."),
    "gateway": Command("ask.gateway:gateway", "Serve a model to programs, at a URL like OpenAI's."),
    "runs": Command("runs.runs:runs", "List runs, and compare some."),
    "show": Command("runs.show:show", "Print a run's rollouts in colour."),
    "view": Command(
        "view.view:view", "Look at runs in a browser: curves, rollouts, health, timeline."
    ),
    "plot": Command("runs.plot:plot", "Draw a run's learning curve."),
    "audit": Command("runs.audit:audit", "Close a run's books."),
    "compact": Command("runs.compact:compact", "Make a stopped run's log smaller."),
    "relearn": Command("runs.relearn:relearn", "Learn again, offline, from a run's log."),
    "data prepare": Command("data.prepare:prepare", "Put data sets into one schema."),
    "data audit": Command("data.corpus_audit:audit", "Count the questions a corpus answers."),
    "index": Command("data.build_index:index", "Build an index of a corpus."),
    "memory": Command("setup.memory:memory", "Calculate what GPUs must hold, and a run's pace."),
    "plan": Command("plan.plan:plan", "Simulate a run: tokens a second, staleness, GPUs."),
    "doctor": Command("fleet.doctor:doctor", "Check what a run needs, here or on a cluster."),
    "bench learner": Command("bench.learner:bench", "Time and memory of a learner's step."),
    "bench staleness": Command(
        "bench.staleness.bench:bench", "Exact match by the data's age, for each correction."
    ),
    "bench gateway": Command(
        "bench.gateway.bench:bench", "Tokens a second through the gateway, beside vLLM's server."
    ),
    "bench stream": Command("bench.stream.bench:bench", "Trajectories a second into the log."),
    "bench weight-sync": Command(
        "bench.weight_sync.bench:bench", "Time that new weights take to reach the actors."
    ),
    "bench retrieval": Command("bench.retrieval.bench:bench", "Searches a second, and how late."),
    "bench engine": Command(
        "bench.engine.bench:bench", "Rollouts a second, by the order of an engine's queue."
    ),
    "bench overlap": Command("bench.overlap.bench:bench", "Tokens a second, while searches wait."),
    "bench end-to-end": Command(
        "bench.end_to_end.bench:bench", "Tokens a second and exact match, by training schedule."
    ),
    "bench algorithms": Command("bench.algorithms.bench:bench", "What algorithms cost."),
    "bench plan": Command("bench.plan.bench:bench", "A plan's error, beside runs in full."),
    "bench wiki": Command("bench.wiki.bench:bench", "Exact match of the wiki task, and baselines."),
}
MEANT = {  # by a word that is no command
    "help": "--help",
    "version": "--version",
    **dict.fromkeys(("run", "start", "launch"), "train"),
    "test": "evaluate",
    **dict.fromkeys(("chat", "generate", "infer", "predict"), "ask"),
    "play": "try",
    "serve": "gateway",
    "draw": "plot",
    "compare": "runs",
    "sft": "warm-start",
    "finetune": "warm-start",
    "check": "doctor",
    "continue": "resume",
}
_QUOTE = "'"
COMPLETING = "_FORAGE_COMPLETE"  # set by the shell's completion
GROUPS = {
    "data": "Prepare questions, audit a corpus.",
    "bench": "Measure one part side by side with its baseline.",
}
THEMES = {
    "Train": ("demo", "train", "resume", "scale", "sync", "warm-start"),
    "Use a model": ("evaluate", "ask", "try", "gateway"),
    "Look into a run": ("runs", "show", "view", "plot", "audit", "compact", "relearn"),
    "Prepare": ("data", "index", "memory", "plan", "doctor"),
    "Measure": ("bench",),
}


def run() -> None:
    """The console entry."""
    assert_packages()
    if "FORAGE_PARENT" in os.environ:  # another command has started this one
        die_with_parent()
    sys.exit(main())


def main(words: Sequence[str] | None = None) -> int:
    """Parse, call one command, map its ending to an exit code."""
    words = list(sys.argv[1:] if words is None else words)
    if COMPLETING in os.environ:  # a shell asks, and typer answers
        words = shlex.split(os.environ.get("COMP_WORDS", ""))[1:]
    elif not words or (words == words[:1] and words[0] in GROUPS):
        return _end(_choices(*words), Exit.BAD_INPUT)
    elif words[0] == "--version":
        print(f"forage {importlib.metadata.version('forage')}")
        return Exit.DONE
    name = _named(words)
    try:
        command: Any = typer.main.get_command(application(name))
        first = dict.fromkeys(path.split()[0] for path in COMMANDS)
        command.commands = {word: command.commands[word] for word in first}  # groups were last
        _bare(command)
        spread = list(_one_each(words, _options_of(COMMANDS[name]) if name else []))
        return command.main(spread, prog_name="forage", standalone_mode=False) or Exit.DONE
    except typer.TyperException as error:
        return _end(_explained(error, name, words), Exit.BAD_INPUT)
    except ConfigError as error:
        return _end(str(error), Exit.BAD_INPUT)
    except KeyboardInterrupt:
        return _end("interrupted", Exit.INTERRUPTED)
    except _failures() as error:
        from replay.log.format import OtherFormat  # late, as the others

        if isinstance(error, OSError) and not _is_the_user_s(error):
            raise
        return _end(str(error), Exit.BAD_INPUT if isinstance(error, OtherFormat) else Exit.FAILED)


def _failures() -> tuple[type[Exception], ...]:
    """The root of each package's errors, from its leaf; imported once something has failed."""
    from actors.errors import ActorError
    from learner.errors import LearnerError
    from replay.protocol import ReplayError
    from retrieval_server.protocol import RetrievalError
    from scripts.bench.harness import BenchError
    from scripts.demo.demo import DemoFailed
    from scripts.setup.retrieval import ServerFailed
    from weight_sync.protocol import WeightSyncError

    of_packages = (ActorError, LearnerError, ReplayError, RetrievalError, WeightSyncError)
    return (OSError, ServerFailed, BenchError, DemoFailed, *of_packages)


def _is_the_user_s(error: OSError) -> bool:
    """True for a file or disk that the user can mend; any other is ours, as its traceback shows."""
    kinds = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    of_a_file = isinstance(error, (*kinds, Locked, LockUnsupported)) and error.filename is not None
    return of_a_file or is_full(error)


def _choices(group: str = "") -> str:
    names = [name for name in COMMANDS if name.startswith(group)]
    return f"name a command: {', '.join(names)}; `forage {f'{group} --help'.strip()}` tells more"


def _end(text: str, code: int) -> int:
    complain(text)
    return code


def application(name: str) -> typer.Typer:
    """All commands by name and help; the options of the one that is called."""
    app = typer.Typer(no_args_is_help=False, help="Train language models to search.")
    app.callback()(_root)
    groups = {group: typer.Typer(help=help) for group, help in GROUPS.items()}
    for group, inner in groups.items():
        app.add_typer(inner, name=group, rich_help_panel=_theme(group))
    for path, command in COMMANDS.items():
        group, _, last = path.rpartition(" ")
        place, panel = (groups[group], None) if group else (app, _theme(last))
        called = _callback(command, group == "bench") if path == name else _unread
        place.command(last, help=command.help, rich_help_panel=panel)(called)
    return app


def _bare(command: Any) -> None:
    """Have the help of a command, and of those in it, call no flag a <bool>."""
    for each in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(each, "is_flag", False):
            each.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _bare(inner)


def _theme(word: str) -> str | None:
    return next((theme for theme, words in THEMES.items() if word in words), None)


def _unread() -> None:
    """The stand-in of a command that is not called."""


def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """The options of `forage` alone, for its help; `main` answers them."""


def _named(words: Sequence[str]) -> str:
    """The command that the words begin with, in one word or two; '' for none."""
    plain = [word for word in words[:2] if not word.startswith("-")]
    return next((each for each in (" ".join(plain), *plain[:1]) if each in COMMANDS), "")


def _options_of(command: Command) -> list[Field[Any]]:
    options = get_type_hints(command.function())["options"]
    hints = get_type_hints(options)
    found = list(fields(options))
    for each in found:
        each.type = hints[each.name]
    return found


def _callback(command: Command, in_order: bool) -> Callable[..., int | None]:
    function = command.function()
    options = get_type_hints(function)["options"]
    parameters = [_parameter(each) for each in _options_of(command)]

    def call(**given: Any) -> int | None:
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
        try:
            with Interrupt() if in_order else nullcontext():  # SIGTERM as Ctrl-C: folders go
                return function(options(**values))
        except KeyboardInterrupt:  # typer would end without a word
            return _end("interrupted", Exit.INTERRUPTED)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _parameter(of: Field[Any]) -> inspect.Parameter:
    kind: Any = of.type
    several = get_origin(kind) is tuple
    if several:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    default = list(of.default) if several and of.default is not MISSING else of.default
    positional = of.metadata["positional"]
    shown = of.metadata["metavar"] or (of.name.upper() if positional else None)
    told = bool(default) and "default" not in of.metadata["help"]  # once
    words = {"help": of.metadata["help"], "metavar": shown, "show_default": told}
    info = typer.Argument(**words) if positional else typer.Option(flag(of.name), **words)
    return inspect.Parameter(
        of.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, info],
    )


def _one_each(words: Sequence[str], listed: Sequence[Field[Any]]) -> Iterator[str]:
    """`--sets a b` as `--sets a --sets b`, up to the next option or override."""
    options = [each for each in listed if not each.metadata["positional"]]
    several = {flag(each.name) for each in options if get_origin(each.type) is tuple}
    current, first = "", False
    for word in words:
        if re.match("-+[a-z]", word) or is_override(word):  # -1 is a value
            current, first = (word if word in several else ""), True
        elif current:
            if not first:
                yield current
            first = False
        yield word


def _explained(error: typer.TyperException, name: str, words: Sequence[str]) -> str:
    text = " ".join(error.format_message().split())
    option, lacks = getattr(error, "option_name", ""), getattr(error, "param", None)
    if option and hasattr(error, "possibilities"):  # it is no option of this command
        option = next((word for word in words if word.startswith(option)), option)
        text = f"{name}: no option {option}" if name else f"no option {option}"
        text += _meant(option.partition("=")[0], name)
    elif lacks and hasattr(error, "param_type"):  # an argument, or an option that must be given
        text = f"{name}: name {lacks.get_error_hint()}, {lacks.help}"
    elif not name and words[0] not in GROUPS:
        text = f"No such command {words[0]!r}{_meant_command(words[0])}"
    elif not name and "Did you mean" not in text:
        inner = [path.split()[1] for path in COMMANDS if path.startswith(f"{words[0]} ")]
        text = f"{text.rstrip('.')}: it is none of {', '.join(inner)}"
    elif lacks:  # its value is of another kind
        errors = getattr(error.__cause__, "errors", None)
        given = errors()[0].get("input") if errors else None
        shown = "" if given is None else f" = {given!r}"
        said = error.message.removeprefix("Value error, ")
        text = f"{name}: {str(lacks.get_error_hint()).strip(_QUOTE)}{shown}: {said}"
    place = name or (words[0] if words[0] in GROUPS else "")
    return f"{text} ({' '.join(('forage', *place.split(), '--help'))})"


def _meant_command(word: str) -> str:
    """The command that a first word which is none may mean, or those that there are."""
    if word.endswith((".yaml", ".yml")):
        return f". Did you mean 'forage train {word}'?"
    known = word.lower().replace("_", "-")
    if known in MEANT:
        return f". Did you mean 'forage {MEANT[known]}'?"
    last = [path for path in COMMANDS if path == known or path.endswith(f" {known}")]
    first = list(dict.fromkeys(path.split()[0] for path in COMMANDS))
    if meant := last or difflib.get_close_matches(known, first):
        return f". Did you mean {' or '.join(map(repr, meant))}?"
    return f": it is none of {', '.join(first)}"


def _meant(option: str, name: str) -> str:
    """The rest of the line about an option that the command does not have."""
    listed, plain = _options_of(COMMANDS[name]) if name else [], option.lstrip("-")
    own = [flag(each.name) for each in listed if not each.metadata["positional"]]
    words = {each.name for each in listed if each.metadata["positional"]}
    if plain in ("h", "help", "hlep"):
        return ": did you mean --help?"
    if re.fullmatch(r"-\d.*", option):
        return ": a number below 0 is no value here"
    if plain in words and plain != "overrides":
        return f": {plain.upper()} is written without it, forage {name} {plain.upper()}"
    if plain in COMMANDS and plain != name:
        return f": did you mean forage {plain}?"
    longer = [each for each in own if each.startswith(option)]
    if near := longer or difflib.get_close_matches(option, own, cutoff=0.7):
        return f": did you mean {near[0]}?"
    if words & {"overrides", "words"} and (field := hints.option(plain, FIELDS)):
        return f": did you mean {field}?"
    if others := [other for other in COMMANDS if option in _written_flags(other)]:
        told = " and ".join(filter(None, (", ".join(others[:-1]), others[-1])))
        return f": forage {told} {'take' if others[1:] else 'takes'} it"
    return f"; it takes {', '.join(own) or 'none'}"


def _written_flags(name: str) -> set[str]:
    """The options of a command, as its source spells them: to import it may take seconds."""
    spec = importlib.util.find_spec(COMMANDS[name].module)
    if spec is None or spec.origin is None:
        return set()
    function, home = COMMANDS[name].target.partition(":")[2], Path(spec.origin)
    taken = re.search(rf"^def {function}\(options: (\w+)\)", home.read_text(), re.M)
    files = [*home.parent.glob("*.py"), *home.parent.parent.glob("*.py")]
    source = "\n\n\n".join(file.read_text() for file in files)
    found, classes = set[str](), [taken[1]] if taken else []
    while classes:
        head = rf"^class {classes.pop()}(?:\(([\w., ]+)\))?:"
        if written := re.search(head + r"(.*?)(?:\n\n\n|\Z)", source, re.M | re.S):
            names = re.findall(r"^    (\w+): .+ = option\(", written[2], re.M)
            found |= {flag(each) for each in names}
            classes += re.findall(r"(\w+)(?:,|$)", written[1] or "")
    return found


if __name__ == "__main__":
    run()
