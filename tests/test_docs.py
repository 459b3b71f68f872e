"""Names in the pages exist: commands, options, fields, gauges and links."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from actors.policies.engine_keys import FIELD, Source
from configs.load import FIELDS
from configs.runtime.process import PACKAGES, REPOSITORY
from configs.schema import Config
from replay.log.records import Record
from replay.protocol import Reply, Request
from scripts import cli

PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")])
PYTHON = re.compile(r"<<'END'\n.*?^END$", re.M | re.S)  # whose names are its own
TEXT = {page.name: PYTHON.sub("", page.read_text()) for page in PAGES}
PROSE = {name: re.sub(r"^```.*?^```", "", text, flags=re.M | re.S) for name, text in TEXT.items()}
SECTIONS = [name for name in Config.__struct_fields__ if name not in ("seed", "run_dir", "keys")]
SUFFIXES = ("py", "md", "jsonl", "yaml")
GAUGES = ("actor", "retrieval", "replay", "sync", "learner", "eval")
SOURCE = "\n".join(
    file.read_text()
    for package in PACKAGES
    for file in sorted((REPOSITORY / package).rglob("*.py"))
)
WRITTEN = {*re.findall(r'"([a-z]+/[a-z0-9_]+)"', SOURCE)}
_LITERALS = re.findall(r'f"([a-z]+/[^"\n ]*\{[^"\n ]*)"', SOURCE)
MADE = [
    re.sub(r"\\?\{.*?\}", "[a-z0-9_]+", each)
    for each in _LITERALS
    if not re.search(r"/\{[^}]*\}$", each)
]


def found(pattern: str, pages: dict[str, str] = TEXT) -> list[tuple[str, list[str]]]:
    """Each page that has any, and all that it says of a pattern's first group."""
    said = {page: sorted({*re.findall(pattern, text)}) for page, text in pages.items()}
    return [(page, words) for page, words in said.items() if words]


A_FIELD = rf"\b((?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+)"


@pytest.mark.parametrize(("page", "fields"), found(A_FIELD))
def test_the_fields_of_a_page_exist(page: str, fields: list[str]) -> None:
    assert [field for field in fields if not is_field(field)] == []


def is_field(name: str) -> bool:
    """True of a field, or a section; also of a file's name, and a module's."""
    module = Path(*name.split("."))
    if name.endswith(SUFFIXES) or (REPOSITORY / module).with_suffix(".py").is_file():
        return True
    known = _of_vllm() if name.startswith(f"{FIELD}.") else FIELDS
    return any(each == name or each.startswith(f"{name}.") for each in known)


@cache
def _of_vllm() -> list[str]:
    """The fields that are arguments of the installed vLLM."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations
    return [
        f"{FIELD}.{key}" for key in Source(Path(package.submodule_search_locations[0])).arguments()
    ]


@pytest.mark.parametrize(("page", "commands"), found(r"[`\n]forage ([a-z][a-z-]*(?: [a-z-]+)?)"))
def test_the_commands_of_a_page_exist(page: str, commands: list[str]) -> None:
    names = {*cli.COMMANDS, *cli.GROUPS}
    assert [words for words in commands if not {words, words.split()[0]} & names] == []


OPTIONS = r"[`\n]forage ((?:data |bench )?[a-z-]+[^`]*? --[a-z][^`]*)"


@pytest.mark.parametrize(("page", "lines"), found(OPTIONS))
def test_an_option_of_a_page_is_one_of_its_command(page: str, lines: list[str]) -> None:
    for line in lines:
        for part in re.split(r"\n(?:\$ )?forage ", line.replace("\\\n", " ")):
            command = part.partition("\n")[0].partition("#")[0]
            name = cli._named(command.split())
            if name:
                asked = set(re.findall(r" (--[a-z][\w-]*)", command))
                assert asked <= cli._written_flags(name), command


@pytest.mark.parametrize(("page", "gauges"), found(rf"`((?:{'|'.join(GAUGES)})/[a-z_0-9]+)[`<]"))
def test_the_gauges_of_a_page_exist(page: str, gauges: list[str]) -> None:
    assert [gauge for gauge in gauges if not is_gauge(gauge)] == []


def is_gauge(gauge: str) -> bool:
    """True of one that is written; also of a family's beginning, and a folder."""
    if gauge.endswith("_") or (REPOSITORY / gauge).is_dir() or gauge in WRITTEN:
        return True
    name = gauge.partition("/")[2]
    # A key of gauges, or a field of the struct that holds them.
    alone = re.search(rf'"{name}"|^ +{name}: ', SOURCE, re.M)
    return bool(alone) or any(re.fullmatch(each, gauge) for each in MADE)


def symptoms() -> list[str]:
    """The messages in the tables of what may be wrong; … stands for anything."""
    section = TEXT["cluster.md"].partition("## When something is wrong")[2].partition("\n## ")[0]
    tables = section + TEXT["troubleshooting.md"]
    first = re.findall(r"^\| (`.+?) \|", tables, re.M)
    said = [each for cell in first for each in re.findall(r"`([^`]+)`", cell) if " " in each]
    return [each for each in said if each != "no signal" and not each.startswith("forage ")]


def test_the_messages_of_a_page_are_printed() -> None:
    scripts = [file.read_text() for file in (REPOSITORY / "deploy").glob("*.sh")]
    whole = re.sub(r'"\s+f?"', "", "\n".join([SOURCE, *scripts]))  # of strings in several lines
    messages = symptoms()
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert messages and [part for part in parts if part not in whole] == []


@pytest.mark.parametrize("page", PROSE)
def test_a_code_span_of_a_page_stands_on_one_line(page: str) -> None:
    lines = [line for line in PROSE[page].splitlines() if "```" not in line]
    assert not [line for line in lines if line.count("`") % 2]


@pytest.mark.parametrize("kinds", [Record, Request, Reply], ids=["record", "request", "reply"])
def test_the_fields_of_records_and_messages_are_all_told(kinds: Any) -> None:
    for kind in get_args(kinds):
        rows = re.findall(rf"^\| `{kind.__name__}` \| (.*?)\|", TEXT["records.md"], re.M)
        told = re.findall(r"`(\w+)`", "".join(rows))
        held = [name for name in kind.__struct_fields__ if name != "now"]
        assert rows and told == held, kind.__name__


@pytest.mark.parametrize(("page", "links"), found(r"\]\(((?!https?:)[^)\s]+)\)", PROSE))
def test_the_links_of_a_page_lead_somewhere(page: str, links: list[str]) -> None:
    (home,) = (each.parent for each in PAGES if each.name == page)
    for link in links:
        file, _, heading = link.partition("#")
        target = home / file if file else home / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if heading else []
        named = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
        assert not heading or heading in named, link
