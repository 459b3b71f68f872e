"""Names in the pages exist: commands, options, fields, gauges and links."""

import importlib.util
import re
from pathlib import Path
from typing import get_args

import msgspec
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


def found(pattern: str, pages: dict[str, str] = TEXT) -> list[tuple[str, str]]:
    """Each page and what it says of a pattern's first group."""
    return sorted(
        {(page, said) for page, text in pages.items() for said in re.findall(pattern, text)}
    )


@pytest.mark.parametrize(("page", "field"), found(rf"\b((?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+)"))
def test_a_field_of_a_page_exists(page: str, field: str) -> None:
    module = Path(*field.split("."))
    if field.endswith(SUFFIXES) or (REPOSITORY / module).with_suffix(".py").is_file():
        return  # a file, or a module
    known = _of_vllm() if field.startswith(f"{FIELD}.") else FIELDS
    assert any(each == field or each.startswith(f"{field}.") for each in known)


def _of_vllm() -> list[str]:
    """The fields that are arguments of the installed vLLM."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations
    return [
        f"{FIELD}.{key}" for key in Source(Path(package.submodule_search_locations[0])).arguments()
    ]


@pytest.mark.parametrize(("page", "words"), found(r"[`\n]forage ([a-z][a-z-]*(?: [a-z-]+)?)"))
def test_a_command_of_a_page_exists(page: str, words: str) -> None:
    names = {*cli.COMMANDS, *cli.GROUPS}
    assert words in names or words.split()[0] in names


OPTIONS = r"[`\n]forage ((?:data |bench )?[a-z-]+[^`]*? --[a-z][^`]*)"


@pytest.mark.parametrize(("page", "line"), found(OPTIONS))
def test_an_option_of_a_page_is_one_of_its_command(page: str, line: str) -> None:
    for part in re.split(r"\n(?:\$ )?forage ", line.replace("\\\n", " ")):
        command = part.partition("\n")[0].partition("#")[0]
        name = cli._named(command.split())
        if name:
            asked = set(re.findall(r" (--[a-z][\w-]*)", command))
            assert asked <= cli._written_flags(name), command


@pytest.mark.parametrize(("page", "gauge"), found(rf"`((?:{'|'.join(GAUGES)})/[a-z_0-9]+)[`<]"))
def test_a_gauge_of_a_page_exists(page: str, gauge: str) -> None:
    if gauge.endswith("_") or (REPOSITORY / gauge).is_dir():
        return  # a family's beginning, or a folder
    name = gauge.partition("/")[2]
    # A key of gauges, or a field of the struct that holds them.
    alone = re.search(rf'"{name}"|^ +{name}: ', SOURCE, re.M)
    assert gauge in WRITTEN or alone or any(re.fullmatch(each, gauge) for each in MADE)


def symptoms() -> list[str]:
    """The messages in the table of what may be wrong with a cluster; … stands for anything."""
    section = TEXT["cluster.md"].partition("## When something is wrong")[2].partition("\n## ")[0]
    first = re.findall(r"^\| (.+?) \|", section, re.M)[1:]
    return [said for cell in first for said in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", symptoms())
def test_a_message_of_a_page_is_printed(message: str) -> None:
    scripts = [file.read_text() for file in (REPOSITORY / "deploy").glob("*.sh")]
    whole = re.sub(r'"\s+f?"', "", "\n".join([SOURCE, *scripts]))  # of strings in several lines
    parts = [part.strip() for part in message.split("…")]
    assert all(part in whole for part in parts), parts


@pytest.mark.parametrize("page", PROSE)
def test_a_code_span_of_a_page_stands_on_one_line(page: str) -> None:
    lines = [line for line in PROSE[page].splitlines() if "```" not in line]
    assert not [line for line in lines if line.count("`") % 2]


@pytest.mark.parametrize("kind", [*get_args(Record), *get_args(Request), *get_args(Reply)])
def test_the_fields_of_records_and_messages_are_all_told(kind: type[msgspec.Struct]) -> None:
    rows = re.findall(rf"^\| `{kind.__name__}` \| (.*?)\|", TEXT["records.md"], re.M)
    told = re.findall(r"`(\w+)`", "".join(rows))
    assert rows and told == [name for name in kind.__struct_fields__ if name != "now"]


@pytest.mark.parametrize(("page", "link"), found(r"\]\(((?!https?:)[^)\s]+)\)", PROSE))
def test_a_link_of_a_page_leads_somewhere(page: str, link: str) -> None:
    (home,) = (each.parent for each in PAGES if each.name == page)
    file, _, heading = link.partition("#")
    target = home / file if file else home / page
    assert target.exists()
    if heading:
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
        assert heading in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
