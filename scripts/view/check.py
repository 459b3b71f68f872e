"""`forage view --check`: every page is opened in a headless browser, and what was wrong is told."""

import importlib.util
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from configs.load import ConfigError
from scripts.view.index import Index
from scripts.view.rollouts.wanted import Wanted
from scripts.view.server import Following, Server, listener

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES = ("overview", "rollouts", "health", "timeline")
_SHOWN_S = 30.0  # the longest that a page may take
_QUIET_MS = 300  # in which a page that is shown may still complain
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # else Playwright's own
_COUNTED = re.compile(r"([\d.,\s\u202f]+) rollouts")


@contextmanager
def browser() -> Iterator["Browser"]:
    """A headless Chromium. Raises ConfigError where there is none, or no Playwright."""
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError(
            "--check drives a browser by Playwright, which is not installed here: "
            f"{sys.executable} -m pip install playwright"
        )
    from playwright.sync_api import Error, sync_playwright

    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    words = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root without it
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=words)
        except Error as error:
            raise ConfigError(
                f"--check: {found or 'a browser'} cannot be started "
                f"({error.message.splitlines()[0]}): apt-get install chromium, or {sys.executable} "
                "-m playwright install chromium"
            ) from error
        with opened:
            yield opened


def check(index: Index, key: str, opened: "Browser") -> dict[str, Any]:
    """Serve the pages of what was read, and look at each; return what was found."""
    following = Following(index)
    with listener(0) as found:
        server = Server(index, following, key)
        serving = threading.Thread(target=server.run, args=([found],), name="pages", daemon=True)
        serving.start()
        try:
            return _looked(f"http://127.0.0.1:{found.getsockname()[1]}/{key}/", index, opened)
        finally:
            following.leaving = server.should_exit = True
            serving.join()


def _looked(url: str, index: Index, opened: "Browser") -> dict[str, Any]:
    errors, foreign, pages, rows = list[str](), list[str](), dict[str, dict[str, float]](), 0
    for name in PAGES:
        try:
            page = opened.new_page()
            _listen(page, name, url, errors, foreign)
            pages[name] = _shown(page, url, name)
            if name == "rollouts":
                rows = _rows(page)
            page.close()
        except Exception as error:  # noqa: BLE001 - whatever the browser met, it is told of the page
            errors.append(f"{name}: {str(error).splitlines()[0]}")
    (count, _) = index.rollouts(Wanted(), 0, 0)
    if rows != count:
        errors.append(f"rollouts: the page counts {rows}, the index {count}")
    return {
        "pages": pages,
        "console_errors": errors,
        "foreign_requests": foreign,
        "first_paint_s": max((each["first_paint_s"] for each in pages.values()), default=None),
        "rows": rows,
    }


def _listen(page: "Page", name: str, url: str, errors: list[str], foreign: list[str]) -> None:
    page.set_default_timeout(_SHOWN_S * 1000)
    page.on(
        "console",
        lambda said: errors.append(f"{name}: {said.text}") if said.type == "error" else None,
    )
    page.on("pageerror", lambda error: errors.append(f"{name}: {error}"))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith((url, "data:")) else foreign.append(asked.url),
    )


def _shown(page: "Page", url: str, name: str) -> dict[str, float]:
    """Seconds to a page's first paint, and until all of it is there. Raises ValueError where it
    says that it cannot be shown.
    """
    begun = time.perf_counter()
    page.goto(f"{url}#{name}")
    page.wait_for_selector(f"main[data-page={name}] > *")
    shown_s = time.perf_counter() - begun
    page.wait_for_timeout(_QUIET_MS)
    said = page.locator("main > [role=alert]")
    if said.count():
        raise ValueError(said.first.inner_text())
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    paint_s = page.evaluate(painted) / 1000
    return {"first_paint_s": round(paint_s, 3), "shown_s": round(shown_s, 3)}


def _rows(page: "Page") -> int:
    page.wait_for_function("/\\d rollouts/.test(document.querySelector('.table p').textContent)")
    found = _COUNTED.fullmatch(page.locator(".table p").inner_text())
    return int(re.sub(r"\D", "", found[1])) if found else 0
