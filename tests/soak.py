"""The tests marked `soak`, part by part: `python -m pytest -p tests.soak --soak PART` (or `all`).

A part is the tests marked `@pytest.mark.soak("PART")`. Each that passes is a line of
`.cache/soak/PART`, and is not run again: a part that was interrupted goes on with the others, and
one that has passed is done. `--fresh` runs all of it again.
"""

from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of these tests."""
    group = parser.getgroup("soak")
    group.addoption("--soak", metavar="PART", required=True, help="run this part, or `all`")
    group.addoption("--fresh", action="store_true", help="also run what has passed before")


def pytest_configure(config: pytest.Config) -> None:
    """Write down what passes."""
    folder = config.rootpath / ".cache" / "soak"
    soak = Soak(config.option.soak, config.option.fresh, folder)
    config.pluginmanager.register(soak, "soak-parts")


class Soak:
    """One run of a part."""

    def __init__(self, part: str, fresh: bool, folder: Path) -> None:
        self.part, self.fresh, self.folder = part, fresh, folder
        self.parts: dict[str, str] = {}  # of each test that is run
        self.left_out: Counter[str] = Counter()  # by part: passed before

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep what is of the part and has not passed yet. Raises UsageError for another name."""
        known = {item.nodeid: part for item in items if (part := part_of(item))}
        if self.part not in {"all", *known.values()}:
            names = ", ".join(sorted(set(known.values())))
            raise pytest.UsageError(f"no test is of part {self.part!r}: name one of {names}")
        chosen = {i: p for i, p in known.items() if self.part in ("all", p)}
        if self.fresh:
            for part in set(chosen.values()):
                (self.folder / part).unlink(missing_ok=True)
        passed = {part: read(self.folder / part) for part in set(chosen.values())}
        self.parts = {i: part for i, part in chosen.items() if i not in passed[part]}
        self.left_out.update(part for i, part in chosen.items() if i in passed[part])
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in self.parts])
        items[:] = [item for item in items if item.nodeid in self.parts]
        items.sort(key=lambda item: self.parts[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed once it is torn down without having failed."""
        if not report.passed:
            self.parts.pop(report.nodeid, None)
        elif report.when == "teardown" and (part := self.parts.get(report.nodeid)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / part).open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was not run, and how it would be."""
        for part, count in sorted(self.left_out.items()):
            said = f"{part}: {count} passed before and not run (FRESH=1 runs all again)"
            terminalreporter.write_line(said)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing left to do is no failure."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left_out:
            session.exitstatus = pytest.ExitCode.OK


def part_of(item: pytest.Item) -> str:
    """The part of a test; empty where it has none."""
    mark = item.get_closest_marker("soak")
    return "" if mark is None else str(mark.args[0])


def read(path: Path) -> set[str]:
    """The tests on record as passed."""
    return set(path.read_text().splitlines()) if path.exists() else set()
