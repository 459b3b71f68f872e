"""The shape of the tree: few rooms, short files and functions, pages of bounded length."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from configs.runtime.process import PACKAGES, REPOSITORY, Exit

SOURCES = sorted(file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py"))
PAGES = {"README.md": 120, "docs/architecture.md": 150}
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
A_URL = re.compile(r"\s*(- )?<?https?://\S+")


def functions(file: Path) -> dict[str, int]:
    found = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, found)]
    return {f"{n.name}:{n.lineno}": (n.end_lineno or 0) - n.lineno + 1 for n in nodes}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_at_most_sixteen_rooms(package: str) -> None:
    top = REPOSITORY / package
    inside = [file.relative_to(top).parts[0] for file in SOURCES if file.is_relative_to(top)]
    assert len(set(inside) - {"__init__.py"}) <= 16


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in SOURCES}
    assert {file: n for file, n in lengths.items() if n > 400} == {}


def test_no_function_is_longer_than_forty_lines() -> None:
    found = {(file, name): n for file in SOURCES for name, n in functions(file).items()}
    assert {name: n for name, n in found.items() if n > 40} == {}


def test_the_training_loop_is_read_on_one_page() -> None:
    assert len((REPOSITORY / "learner" / "loop.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES)
def test_the_first_pages_are_short(page: str) -> None:
    assert len((REPOSITORY / page).read_text().splitlines()) <= PAGES[page]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_no_line_of_a_page_is_wider_than_120_characters(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [n for n, line in lines if len(line) > 120 and not A_URL.fullmatch(line)] == []


def test_every_exit_code_is_explained() -> None:
    manual = (REPOSITORY / "docs" / "running.md").read_text()
    assert set(map(int, re.findall(r"^\| (\d+) \|", manual, re.M))) == {*map(int, Exit)}


def test_make_help_lists_every_target_with_a_line() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, re.M)
    said = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True)
    lines = said.stdout.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("make ")} == {*phony.split()}
    assert all(len(line.split()) > 3 for line in lines) and max(map(len, lines)) <= 80
