"""The command line: words to options, and one line for what is not understood."""

import importlib.metadata
import importlib.util
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from configs.runtime.files import Locked
from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.bench.harness import in_memory
from scripts.command.options import Options, argument, option, overrides


@dataclass(frozen=True)
class AskedOptions(Options):
    model: str = argument("a folder")
    rest: tuple[str, ...] = overrides()
    sets: tuple[Path, ...] = option("files", default=())
    weights: Literal["model", "ema"] = option("which", default="model")
    eval_every: int = option("steps (default 2)", default=2, least=1)
    exact: bool = option("to the bit", default=False)
    peers: tuple[int, ...] = option("actors", default=(), least=0)


seen: list[AskedOptions] = []


def asked(options: AskedOptions) -> int:
    """Remember what came; 3, so that a command's own exit code shows."""
    seen.append(options)
    return 3


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    monkeypatch.setitem(cli.COMMANDS, "asked", cli.Command("asked", "For a test."))
    monkeypatch.setattr(cli.Command, "function", lambda self: asked)


def test_words_become_options() -> None:
    words = "asked m --sets a b seed=3 --exact --weights ema --eval-every 7 learner.lr=1"
    assert cli.main(words.split()) == 3
    sets = (Path("a"), Path("b"))
    assert seen == [AskedOptions("m", ("seed=3", "learner.lr=1"), sets, "ema", 7, True)]


def test_defaults_are_the_dataclass_s() -> None:
    cli.main(["asked", "m"])
    assert seen == [AskedOptions("m")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name a command: "),
        ("askd m", "Did you mean 'asked'"),
        ("bench nothing --quick", "No such command 'nothing': it is none of learner, staleness, "),
        ("bench steam", "No such command 'steam'. Did you mean 'stream'?"),
        ("data nothing", "No such command 'nothing': it is none of prepare, audit (forage data"),
        ("asked m --eval-evry 2", "did you mean --eval-every?"),
        ("asked m --judge 2", "it takes --sets, --weights, --eval-every, --exact"),
        ("asked m --eval-every 0", "--eval-every 0: at least 1"),
        ("asked m --peers 1 -1", "--peers -1: at least 0"),
        ("asked m --weights emma", "emma"),
        ("asked", "MODEL"),
        (
            "asked m --prepare-only",
            "asked: no option --prepare-only: forage train and resume",
        ),
    ],
)
def test_what_is_not_understood_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2 and not seen
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("forage: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train configs/bse.yaml",
            "'configs/bse.yaml' does not exist: did you mean configs/",
        ),
        ("train none.yaml", "'none.yaml' does not exist: name one of configs/*.yaml"),
        ("show configs", "RUN = 'configs': no config.yaml or events.log there: name a run's dir"),
        ("plot no/such", "RUN = 'no/such': there is no such directory: name a run's directory"),
        ("scale configs 0", "N = 0: at least 1"),
    ],
)
def test_a_wrong_place_is_named(
    words: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(REPOSITORY)
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("forage: ")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.json"), True),
        (PermissionError(13, "Permission denied", "a.json"), True),
        (OSError(28, "No space left on device"), True),
        (Locked(11, "another run has locked it", "runs/a"), True),
        (FileNotFoundError("no such thing"), False),
        (OSError(22, "Invalid argument"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
    ],
)
def test_of_the_system_s_errors_only_the_user_s_are_one_line(
    error: OSError,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(options: AskedOptions) -> int:
        raise error

    monkeypatch.setattr(cli.Command, "function", lambda self: fails)
    if told:
        assert cli.main(["asked", "m"]) == Exit.FAILED
        assert capsys.readouterr().err == f"forage: {error}\n"
    else:
        with pytest.raises(OSError) as raised:
            cli.main(["asked", "m"])
        assert raised.value is error


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: AskedOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Command, "function", lambda self: interrupted)
    assert cli.main(["asked", "m"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "forage: interrupted\n"


def test_sigterm_ends_a_benchmark_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []

    def measures(options: AskedOptions) -> int:
        with in_memory() as folder:
            folders.append(folder)
            signal.raise_signal(signal.SIGTERM)
        return Exit.DONE

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(cli.COMMANDS, "bench asked", cli.COMMANDS["asked"])
    monkeypatch.setattr(cli.Command, "function", lambda self: measures)
    assert cli.main(["bench", "asked", "m"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == "forage: interrupted\n"
    assert not folders[0].exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_command_has_a_theme_and_its_function() -> None:
    themed = {word for words in cli.THEMES.values() for word in words}
    for path, command in cli.COMMANDS.items():
        assert path.split()[0] in themed | {"asked"}
        assert importlib.util.find_spec(command.module) or path == "asked"


def test_the_readme_s_table_has_the_order_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    shown = re.findall(r"^│ ([a-z][a-z-]*) ", capsys.readouterr().out, re.M)
    themed = [word for words in cli.THEMES.values() for word in words]
    assert [word for word in shown if word != "asked"] == themed
    table = re.findall(r"^\| (`.+?) \|", (REPOSITORY / "README.md").read_text(), re.M)
    named = re.findall(r"(?:`|forage |, )([a-z][a-z-]+)", " ".join(table).replace("`forage ", "`"))
    assert list(dict.fromkeys(word for word in named if word in themed)) == themed


def test_help_says_a_default_once_and_no_flag_takes_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["asked", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "<bool>" not in said and "--exact to the bit" in said
    assert "(default 2)" in said and "[default: 2]" not in said and "[default: model]" in said


def test_the_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"forage {importlib.metadata.version('forage')}\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from scripts import cli; cli.main(['--help']); print(sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Look into a run" in said.stdout
    for heavy in ("torch", "vllm", "ray", "numpy", "zmq", "psutil"):
        assert f"'{heavy}'" not in said.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench end-to-end", "bench wiki", "demo wiki"])
def test_help_of_a_command_imports_no_models(command: str) -> None:
    words = [*command.split(), "--help"]
    code = f"import sys; from scripts import cli; cli.main({words}); print(sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--quick" in said.stdout
    for heavy in ("torch", "vllm", "transformers"):
        assert f"'{heavy}'" not in said.stdout


@pytest.mark.parametrize(
    ("typed", "completed"), [("forage tr", "train"), ("forage asked --ev", "--eval-every")]
)
def test_a_shell_completes_commands_and_options(
    typed: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FORAGE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        cli.main([])
    assert completed in capsys.readouterr().out.split()


def test_another_python_than_the_project_s_is_told_where_that_is() -> None:
    bare = [sys.executable, "-S", "scripts/launch.py", "configs/base.yaml"]
    ended = subprocess.run(bare, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "first `. .venv/bin/activate`, which `make .venv` installs" in ended.stderr
