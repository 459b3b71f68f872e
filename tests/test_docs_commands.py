"""Every command in the pages is read by the command line, and its configuration resolved; those
below `<!-- run -->` are run.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.load import load, parse
from configs.runtime.process import PACKAGES, REPOSITORY
from configs.schema import Config
from scripts import cli
from scripts.setup.overrides import is_override
from tests.scripts.parsing import parsed

PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")])
BLOCK = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```$|((?:^    \S.*\n)+)", re.M | re.S)
HEREDOC = re.compile(r"<<'END'\n.*?^END$", re.M | re.S)  # a file, with lines of its own
A_COMMAND = re.compile(r"^ *(?:\$ )?(?:\w+=\S+ )?(?:\.venv/bin/)?(forage .+)$", re.M)
LEFT_OUT = re.compile(r"\.\.\.|…|\[.*|[^[]*\]|\w[\w.]*=…|PART")  # words that stand for others
STAND_FOR = {"CONFIG": "configs/base.yaml", "N": "2", "SIZE": "80", "RUN": "runs/x"}


def commands(text: str) -> list[str]:
    """The commands of a page: those in its blocks, and in its lines those that are no mere form."""
    blocks, prose = divided(text)
    spans = re.findall(r"`(forage [^`]+)`", prose.replace("\n", " "))
    return [*A_COMMAND.findall(blocks), *filter(_is_whole, spans)]


def divided(text: str) -> tuple[str, str]:
    """The blocks of a page, a command a line, and the rest of it."""
    bare = HEREDOC.sub("", text)
    blocks = "\n".join(each[2] or each[3] for each in BLOCK.finditer(bare))
    return re.sub(r"\\\n *", " ", blocks), BLOCK.sub("", bare)


def _is_whole(command: str) -> bool:
    """True where nothing is left out after the command's name, and not all stands for others."""
    told = _after(command)
    left_out = any(map(LEFT_OUT.fullmatch, shlex.split(command)))
    stands = not set(told) - {*STAND_FOR.values(), "MODEL"}
    return bool(told) and not told[0].startswith("-") and not stands and not left_out


def _after(command: str) -> list[str]:
    """The words after a command's name."""
    words = _words(command)[1:]
    return words[len(cli._named(words).split()) :]


def _words(command: str) -> list[str]:
    given = [word for word in shlex.split(command, comments=True) if not LEFT_OUT.fullmatch(word)]
    return [STAND_FOR.get(word, word).replace("HOST:PORT", "node-1:6379") for word in given]


EACH = [(page.name, each) for page in PAGES for each in dict.fromkeys(commands(page.read_text()))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configurations of the tree and those that pages write or name."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    base = (REPOSITORY / "configs" / "base.yaml").read_text()
    for name in ("runs/x", "runs/latest", "RUN"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(base)
    quickstart = (REPOSITORY / "docs" / "quickstart.md").read_text()
    (tmp_path / "mine").mkdir()
    written = re.search(r"cat > mine/first.yaml <<'END'\n(.*?)^END$", quickstart, re.M | re.S)
    assert written
    (tmp_path / "mine" / "first.yaml").write_text(written[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "command"), EACH, ids=[f"{p}: {c[:60]}" for p, c in EACH])
def test_a_command_is_read_and_its_configuration_resolved(
    page: str, command: str, here: Path
) -> None:
    words = _words(command)[1:]
    name = cli._named(words)
    assert name, "no such command"
    options = parsed(name, *words[len(name.split()) :])
    fields = [word for word in words if is_override(word)]
    file = next((word for word in words if word.endswith(".yaml")), "configs/base.yaml")
    file = "configs/demo.yaml" if name == "demo" else file
    assert options is not None and isinstance(load(file, fields, gpus=8), Config)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_configurations_of_a_page_resolve(page: Path) -> None:
    sections = {*Config.__struct_fields__}
    for block in BLOCK.finditer(HEREDOC.sub("", page.read_text())):
        head = re.match(r"(\w+):", block[2] or "")
        if head and head[1] in sections:
            assert isinstance(yaml.safe_load(block[2]), dict)
            assert isinstance(parse(block[2], [], page.name), Config)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_has_make_and_python_do_exists(page: Path) -> None:
    blocks, prose = divided(page.read_text())
    code = "\n".join([blocks, *re.findall(r"`([^`]+)`", prose)])
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^([a-z.-]+):", makefile, re.M)
    assert {*re.findall(r"^make ([a-z.][a-z-]*)", code, re.M)} <= {*targets}
    modules = re.findall(rf"python -m ((?:{'|'.join((*PACKAGES, 'tests'))})\.[\w.]+)", code)
    homes = [REPOSITORY / Path(*each.split(".")).with_suffix(".py") for each in modules]
    assert [home for home in homes if not home.is_file()] == []


RUN = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"^<!-- run -->\n```\w*\n(.*?)^```$", page.read_text(), re.M | re.S)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), RUN, ids=[f"{p}: {b[:40]}" for p, b in RUN])
def test_a_block_that_is_marked_runs(page: str, block: str, here: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    shell = ["bash", "-eo", "pipefail", "-c", block]
    done = subprocess.run(shell, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
