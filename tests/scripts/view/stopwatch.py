"""How long a user waits on the pages of a long run, in headless Chromium:
`python stopwatch.py CHROMIUM URL ROLLOUTS`, once they are all read.

It prints as JSON the seconds of each page's first paint, the milliseconds of each interaction from
the input to what it shows, and what the pages complained of or asked of others.
"""

import json
import sys
from collections.abc import Iterator
from functools import reduce
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

PAGES = {  # and what is there once it is shown
    "overview": "figure canvas",
    "rollouts": ".row:not(.head) .c-number",
    "health": ".rule canvas",
    "timeline": ".lanes canvas",
}
TEXTS = ("karo", "mayor", "ruled by ta", "train 39", "of sota", "so", "nobody")
COLUMNS = ("reward", "searches", "tokens", "staleness", "question", "stop", "step")
LIMIT_MS = 30_000
WATCH = """() => new Promise((resolve, reject) => {
  const begun = performance.now();
  const look = () => {
    const took = performance.now() - begun;
    if (DONE) resolve(took);
    else if (took > LIMIT) reject(new Error("waited in vain"));
    else requestAnimationFrame(look);
  };
  ACT;
  look();
})"""
FORGET = "document.querySelectorAll('.row:not(.head)').forEach((row) => row.dataset.old = '');"
AWAY = "document.querySelectorAll('.detail .action').forEach((each) => each.remove());"
OPEN = "document.querySelector('.detail .action') && document.querySelector('.others .picked')"
FIRST = ".row:not(.head) .c-number"
NEW = f"document.querySelector('{FIRST}') && !document.querySelector('.row[data-old]')"
BIN = "document.querySelector('.range').textContent.split('a bin is')[1]"
COUNT = "document.querySelector('.table p').textContent"


def took(page: Page, act: str, done: str) -> float:
    """Milliseconds from an act until an expression is true and drawn."""
    words = {"ACT": act, "DONE": done, "LIMIT": str(LIMIT_MS)}
    script = reduce(lambda text, name: text.replace(name, words[name]), words, WATCH)
    return round(float(page.evaluate(script)), 1)


def of_filter(page: Page) -> Iterator[float]:
    """Each text typed, and cleared again."""
    for text in TEXTS:
        for typed in (text, ""):
            act = (
                f"const before = {COUNT}, field = document.querySelector('[name=text]');"
                f"field.value = '{typed}';"
                "field.dispatchEvent(new Event('input', {bubbles: true}))"
            )
            yield took(page, act, f"{COUNT} !== before")


def of_sort(page: Page) -> Iterator[float]:
    """Each column, descending and ascending."""
    for column in COLUMNS:
        for way in ("descending", "ascending"):
            head = f".row.head .c-{column}"
            act = f"{FORGET} document.querySelector('{head} button').click()"
            sorts = f"document.querySelector('{head}').ariaSort === '{way}'"
            yield took(page, act, f"{sorts} && {NEW}")


def of_rows(page: Page) -> Iterator[float]:
    """A rollout from its row."""
    for place in range(8):
        act = f"{AWAY} document.querySelectorAll('.row:not(.head)')[{place}].click()"
        yield took(page, act, OPEN)


def of_siblings(page: Page) -> Iterator[float]:
    """Another of its group from its chip."""
    for place in range(7):
        chip = f"document.querySelectorAll('.others .chip')[{place}]"
        act = f"const chip = {chip}; {AWAY} chip.click()"
        yield took(page, act, f"{OPEN} && {chip}.classList.contains('picked')")


def of_zoom(page: Page) -> Iterator[float]:
    """Closer on the timeline until its bins are finer, and back again."""
    for key in ("+", "+", "+", "+", "-", "-", "-", "-"):
        act = (
            f"const before = {BIN}, pressed = {{key: '{key}', bubbles: true}};"
            "document.querySelector('.lanes').dispatchEvent(new KeyboardEvent('keydown', pressed))"
        )
        yield took(page, act, f"{BIN} !== before")


def of_pages(page: Page) -> Iterator[float]:
    """From page to page, two rounds."""
    for name, there in [*PAGES.items()] * 2:
        act = f"location.hash = '#{name}'"
        yield took(page, act, f"document.querySelector('main[data-page={name}] {there}')")


USED = {  # the timeline last: the page that it is on is the last
    "filter": of_filter,
    "sort": of_sort,
    "row": of_rows,
    "siblings": of_siblings,
    "page": of_pages,
    "zoom": of_zoom,
}


def opened(page: Page, url: str, name: str) -> float:
    """Seconds to a page's first paint."""
    page.goto(f"{url}#{name}")
    page.wait_for_selector(f"main[data-page={name}] {PAGES[name]}")
    page.wait_for_timeout(300)
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return round(float(page.evaluate(painted)) / 1000, 3)


def main() -> None:
    """Open each page in a window of its own; then use them in one."""
    chromium, url, rollouts = sys.argv[1:]
    found: dict[str, Any] = {"errors": [], "foreign": [], "first_paint_s": {}}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1300, "height": 800})
        context.set_default_timeout(LIMIT_MS)
        context.on("console", lambda said: found["errors"].append(said.text))
        context.on("weberror", lambda error: found["errors"].append(str(error.error)))
        context.on("request", lambda asked: found["foreign"].append(asked.url)
                   if not asked.url.startswith((url, "data:")) else None)  # fmt: skip
        for name in PAGES:
            page = context.new_page()
            found["first_paint_s"][name] = opened(page, url, name)
            page.close()
        page = context.new_page()
        opened(page, url, "rollouts")
        expect(page.locator(".table p")).to_have_text(rollouts, timeout=600_000)
        for what, times in USED.items():
            found[what] = list(times(page))
        browser.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
