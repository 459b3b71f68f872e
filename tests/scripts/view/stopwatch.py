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
NEW = "document.querySelector('.row:not(.head) .c-number') && !document.querySelector('.row[data-old]')"


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
                "window.before = document.querySelector('.table p').textContent;"
                f"const field = document.querySelector('[name=text]'); field.value = '{typed}';"
                "field.dispatchEvent(new Event('input', {bubbles: true}))"
            )
            yield took(page, act, "document.querySelector('.table p').textContent !== window.before")


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
        act = (
            "document.querySelectorAll('.detail .action').forEach((each) => each.remove());"
            f"document.querySelectorAll('.row:not(.head)')[{place}].click()"
        )
        yield took(page, act, "document.querySelector('.detail .others .chip.picked')"
                              " && document.querySelector('.detail .action')")  # fmt: skip


def of_siblings(page: Page) -> Iterator[float]:
    """Another of its group from its chip."""
    for place in range(7):
        act = (
            "const chips = document.querySelector('.others').querySelectorAll('.chip:not(.picked)');"
            f"window.wanted = chips[{place}].textContent; chips[{place}].click()"
        )
        yield took(page, act, "document.querySelector('.detail .action') && document.querySelector("
                              "'.others .chip.picked')?.textContent === window.wanted")  # fmt: skip


def of_zoom(page: Page) -> Iterator[float]:
    """Closer on the timeline until its bins are finer, and back again."""
    for key in ("+", "+", "+", "+", "-", "-", "-", "-"):
        act = (
            "const bin = () => document.querySelector('.range').textContent.split('a bin is')[1];"
            "window.bin = bin; window.before = bin();"
            f"document.querySelector('.lanes').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"
        )
        yield took(page, act, "window.bin() !== window.before")


def of_pages(page: Page) -> Iterator[float]:
    """From page to page, two rounds."""
    for name, there in [*PAGES.items()] * 2:
        act = f"location.hash = '#{name}'"
        yield took(page, act, f"document.querySelector('main[data-page={name}] {there}')")


def opened(page: Page, url: str, name: str) -> float:
    """Seconds to a page's first paint."""
    page.goto(f"{url}#{name}")
    page.wait_for_selector(f"main[data-page={name}] {PAGES[name]}")
    page.wait_for_timeout(300)
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return round(page.evaluate(painted) / 1000, 3)


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
        for what, times in (("filter", of_filter), ("sort", of_sort), ("row", of_rows),
                            ("siblings", of_siblings), ("page", of_pages), ("zoom", of_zoom)):  # fmt: skip
            found[what] = list(times(page))
        browser.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
