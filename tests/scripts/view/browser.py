"""Looks at the pages as a user does, in headless Chromium: `python browser.py CHROMIUM URL`.

It prints what was seen as JSON; before it waits for a live update, a line `waiting`.
"""

import json
import re
import sys
from typing import Any

from playwright.sync_api import Page, Route, expect, sync_playwright

PAGES = ("overview", "rollouts", "health", "timeline")


def visit(page: Page, url: str) -> dict[str, Any]:
    """Visit each page; return how wide they are, and what they complain of."""
    seen: dict[str, Any] = {"errors": [], "foreign": [], "widths": {}}
    home = url.rsplit("/", 2)[0]
    page.on("console", lambda said: seen["errors"].append(said.text))
    page.on("pageerror", lambda error: seen["errors"].append(str(error)))
    page.on("request", lambda asked: seen["foreign"].append(asked.url)
            if not asked.url.startswith((home, "data:", "file:")) else None)  # fmt: skip
    for name in PAGES:
        page.goto(f"{url}#{name}")
        page.wait_for_selector(f"main[data-page={name}] .page")
        page.wait_for_timeout(300)
        if name == "health":
            seen["bounds"] = page.locator(".bound").all_inner_texts()
        seen["widths"][name] = page.evaluate("document.documentElement.scrollWidth")
    ground = "getComputedStyle(document.body).backgroundColor"
    return seen | {"ground": page.evaluate(ground)}


def look(page: Page, url: str, wait_for_news: bool) -> dict[str, Any]:
    """Visit each page; use the table by mouse and keyboard."""
    seen = visit(page, url)
    if wait_for_news:
        seen |= hold(page, url)
    page.goto(f"{url}#overview")
    page.wait_for_selector("main[data-page=overview] figure")
    page.wait_for_timeout(300)
    seen["charts"] = page.locator("figure canvas").count()
    seen["evaluated"] = page.locator("figure").first.inner_text()
    seen["events"] = page.locator(".events").first.inner_text()
    seen["damage"] = page.locator(".card .bad[role=alert]").all_inner_texts()
    seen["parts"] = (
        page.get_by_text(re.compile(r"actor/reward/\d,é+")).locator("visible=true").count()
    )
    seen["captions"] = page.locator("figcaption").all_inner_texts()
    seen["cards"] = page.locator(".card h2").all_inner_texts()
    page.keyboard.press("2")
    page.wait_for_selector(".row:not(.head) span")
    seen["title"] = page.title()
    if wait_for_news:
        seen |= late(page) | press(page) | hide(page)
    seen["count"] = page.locator(".table p").inner_text()
    seen["drawn"] = page.locator(".row:not(.head)").count()
    told_apart(page)
    page.evaluate("document.querySelector('.detail').replaceChildren()")
    page.locator(".view").focus()
    page.keyboard.press("End")  # of rows that were not asked for yet
    page.wait_for_selector(".detail .action")
    seen["last"] = page.locator(".detail h2").inner_text()
    page.keyboard.press("/")
    page.keyboard.type("script")
    expect(page.locator(".table p")).to_have_text("3 rollouts", timeout=30_000)
    expect(page).to_have_url(re.compile("text=script"))
    seen["address"] = page.url.partition("#")[2]
    page.locator(".view").focus()
    page.keyboard.press("End")
    page.wait_for_selector(".detail .action span")
    seen["picked"] = page.locator(".row.picked").count()
    page.locator(".action span").first.hover()
    seen["readout"] = page.locator(".readout").inner_text()
    page.locator(".action").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    seen["further"] = page.locator(".readout").inner_text()
    seen["question"] = page.locator(".detail h2").inner_text()
    seen["action"] = page.locator(".action").first.inner_text()
    seen["scripts"] = page.locator("script").count()
    if wait_for_news:  # of a rollout that was trained
        page.mouse.move(0, 0)  # pointing at nothing
        page.goto(f"{url}#rollouts?run=0&steps=1,7-9")
        expect(page.locator(".table p")).to_have_text("4 rollouts", timeout=30_000)
        page.locator(".view").focus()
        page.keyboard.press("End")
        page.wait_for_selector(".detail .action span")
        page.locator(".action").first.focus()
        page.keyboard.press("ArrowRight")
        seen["learnt"] = page.locator(".readout").inner_text()
        seen |= look_beside(page)
    return seen | look_at_time(page, url, wait_for_news)


def look_beside(page: Page) -> dict[str, Any]:
    """Click a sibling's chip and one of the same question; sort by a column's head."""
    seen: dict[str, Any] = {"chips": []}
    for _ in range(2):  # the first section, then the last
        chips = (
            page.locator(".others").nth(-1 if seen["chips"] else 0).locator(".chip:not(.picked)")
        )
        words = chips.first.inner_text()
        chips.first.hover()
        chips.first.click()
        picked = page.locator(".others").first.locator(".chip.picked")
        expect(picked).to_have_text(words)
        seen["chips"].append(f"{picked.count()} picked")
    head, cells = page.locator(".row.head .c-reward"), page.locator(".row:not(.head) .c-reward")
    for down, way in ((1, "descending"), (0, "ascending")):
        with page.expect_response(re.compile(rf"api/rollouts\?sort=reward&descending={down}&")):
            head.locator("button").click()
        expect(head).to_have_attribute("aria-sort", way)
    page.wait_for_selector(".row:not(.head) .c-reward")
    expect(cells).to_have_text(sorted(cells.all_inner_texts(), key=float))  # once it is drawn
    rewards = [float(each) for each in cells.all_inner_texts()]
    seen["sorted"] = [way, rewards == sorted(rewards)]
    page.locator("input[name=searches_from]").fill("0")
    expect(page).to_have_url(re.compile("searches_from=0"))
    found = page.locator(".row.head .c-reward").get_attribute("aria-sort")
    return seen | {"still_sorted": [found, "sort=reward" in page.url]}


def told_apart(page: Page) -> None:
    """Ask for each thing by which rollouts are told apart: of all one rollout has them."""
    count, which = page.locator(".table p"), page.locator("select[name=which]")
    before = count.inner_text()
    for each in ("repeated", "empty", "malformed", "limit", "dropped"):
        which.select_option(each)
        expect(page).to_have_url(re.compile(f"which={each}"))
        expect(count).to_have_text("1 rollouts")
    which.select_option("")
    expect(count).to_have_text(before)


def late(page: Page) -> dict[str, Any]:
    """Choose a rollout and then another, of which the second's answer comes first."""
    asked, held = re.compile(r"api/rollout\?"), list[Route]()
    rows = page.locator(".row:not(.head)")
    page.route(asked, lambda route: route.continue_() if held else held.append(route))
    with page.expect_request(asked):
        rows.nth(4).click()
    question = rows.nth(5).locator(".c-question").inner_text()
    rows.nth(5).click()
    expect(page.locator(".detail h2")).to_have_text(question)
    with page.expect_response(asked):
        held[0].continue_()
    page.unroute(asked)
    page.wait_for_timeout(300)
    return {"late": [page.locator(".detail h2").inner_text() == question]}


def press(page: Page) -> dict[str, Any]:
    """Hold a row down over news, and let go."""
    count, row = page.locator(".table p"), page.locator(".row:not(.head)").nth(6)
    before = count.inner_text()
    told = [row.locator(f".c-{each}").inner_text() for each in ("number", "question")]
    height = row.evaluate("each => each.style.transform")
    row.hover()
    page.mouse.down()
    print("waiting", flush=True)
    expect(page.locator("#live")).to_have_text("live again once you let go", timeout=30_000)
    seen = [count.inner_text() == before]
    page.mouse.up()
    expect(count).not_to_have_text(before, timeout=30_000)
    expect(page.locator(".detail h2")).to_have_text(told[1])
    picked = page.locator(".row.picked")
    seen += [[picked.locator(".c-number").inner_text()] == told[:1]]
    return {"pressed": [*seen, picked.evaluate("each => each.style.transform") != height]}


def hide(page: Page) -> dict[str, Any]:
    """Have nobody see the page, and then somebody."""
    hidden = "{value: true, configurable: true}"
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    with page.expect_event("requestfailed", lambda asked: asked.url.endswith("api/live")):
        page.evaluate(f"Object.defineProperty(document, 'hidden', {hidden}); {change}")
    page.evaluate("delete document.hidden")
    with page.expect_request("**/api/live"):
        page.evaluate(change)
    return {"live": [page.locator("#live").inner_text()]}


MARK = "document.querySelector('main .page').dataset.old = ''"
SELECT = "getSelection().selectAllChildren(document.querySelector('main p'))"
DRAWING = "document.querySelector('.rule canvas').toDataURL()"


def hold(page: Page, url: str) -> dict[str, Any]:
    """Zoom a chart, hide a curve, give a link and then a field the focus, and wait for news."""
    page.goto(f"{url}#health")
    page.wait_for_selector("main[data-page=health] .rule canvas")
    page.evaluate(MARK)
    whole = page.evaluate(DRAWING)
    box = page.locator(".rule .u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30, steps=3)
    page.mouse.up()
    page.locator(".rule .u-legend").nth(1).locator("th").nth(1).click()
    page.mouse.move(0, 0)
    zoomed = page.evaluate(DRAWING)
    page.locator("#fired-ess-0").focus()
    print("waiting", flush=True)
    page.wait_for_selector("main .page:not([data-old])")
    page.wait_for_timeout(100)
    seen: dict[str, Any] = {"kept": [whole != zoomed, page.evaluate(DRAWING) == zoomed]}
    seen["kept"] += [page.locator(".rule .u-series.u-off").count()]
    seen["kept"] += [page.evaluate("document.activeElement.id")]
    page.locator("nav a").nth(1).focus()
    page.evaluate(MARK)
    print("waiting", flush=True)
    page.wait_for_selector("main .page:not([data-old])")
    seen["kept"] += [page.evaluate("document.activeElement.innerText")]
    page.evaluate(SELECT)
    page.evaluate(MARK)
    print("waiting", flush=True)
    expect(page.locator("#live")).to_have_text("live again once you select no text")
    page.evaluate("getSelection().removeAllRanges()")
    page.wait_for_selector("main .page:not([data-old])")
    page.goto(f"{url}#overview")
    page.locator("#gauge").focus()
    page.evaluate(MARK)
    print("waiting", flush=True)
    expect(page.locator("#live")).to_have_text("live again once you leave the field")
    seen["held"] = page.locator("main .page[data-old]").count()
    page.locator("#gauge").select_option(index=1)  # news need not wait until it is left
    page.wait_for_selector("main .page:not([data-old])")
    expect(page.locator("#live")).to_have_text("live")
    page.evaluate(MARK)
    page.mouse.move(5, 5)
    page.mouse.down(button="right")  # after its menu nobody says that it was let go
    print("waiting", flush=True)
    page.wait_for_selector("main .page:not([data-old])")
    page.mouse.up(button="right")
    page.goto(f"{url}#health")
    link = page.locator("#fired-ess-0")
    words = link.inner_text()
    link.click()
    page.wait_for_selector("main[data-page=rollouts] .row.head")
    expect(page.locator(".table p")).to_have_text(re.compile("rollouts"))
    count = page.locator(".table p").inner_text()
    return seen | {"caused": [words, page.locator("input[name=steps]").input_value(), count]}


def look_at_time(page: Page, url: str, wait_for_news: bool) -> dict[str, Any]:
    """Look closer at the timeline, by wheel and keys; go to the rollouts of a time by both."""
    page.goto(f"{url}#timeline")
    page.wait_for_selector(".lanes canvas")
    whole = page.locator(".range")
    if wait_for_news:
        before = whole.inner_text()
        print("waiting", flush=True)
        expect(whole).not_to_have_text(before, timeout=30_000)
        page.wait_for_selector(".waits tr")
    seen: dict[str, Any] = {"waits": " ".join(page.locator(".waits").inner_text().split())}
    seen |= {"lanes": page.locator(".lane strong").all_inner_texts()}
    seen |= {"lacks": page.get_by_text("this run has no waits.jsonl").is_visible()}
    box = page.locator(".lanes canvas").nth(1).bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    expect(page).to_have_url(re.compile("time_from="))
    expect(whole).not_to_contain_text("the whole run")
    before = whole.inner_text()
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=3)
    page.mouse.up()
    expect(whole).not_to_have_text(before)
    page.locator(".lanes").focus()
    page.keyboard.press("0")
    expect(whole).to_contain_text("the whole run")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    seen["pointed"] = page.locator(".readout").inner_text()
    page.mouse.click(x, y)
    page.wait_for_selector("main[data-page=rollouts] .row.head")
    seen["clicked"] = page.url.partition("#")[2]
    expect(page.locator(".table p")).to_have_text(re.compile("rollouts"))
    seen["of_time"] = page.locator(".table p").inner_text()
    page.go_back()
    page.wait_for_selector(".lanes canvas")
    page.locator(".lanes").focus()
    for key in ("ArrowDown", "+", "Shift+ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("main[data-page=rollouts] .row.head")
    seen["entered"] = page.url.partition("#")[2]
    return seen


def main() -> None:
    """Look in light and wide, then in dark and narrow."""
    chromium, url = sys.argv[1:]
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = {}
        for scheme, width in (("light", 1300), ("dark", 400)):
            size = {"width": width, "height": 800}
            context = browser.new_context(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]
            context.set_default_timeout(30_000)
            live = scheme == "light" and url.startswith("http")
            found[scheme] = look(context.new_page(), url, live)
            context.close()
        for scheme, width in (("light", 400), ("dark", 1300)):
            size = {"width": width, "height": 800}
            context = browser.new_context(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]
            found[f"{scheme} {width}"] = visit(context.new_page(), url)
            context.close()
        browser.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
