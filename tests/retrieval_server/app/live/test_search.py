"""Live searches against providers at home: answers, haste, bills, money, records and replays."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from retrieval_server.app.live import search as module
from retrieval_server.app.live.opening import open_live
from retrieval_server.app.live.search import LiveSearch
from retrieval_server.protocol import (
    PROBE,
    BadRecord,
    NotRecorded,
    RetrievalOverloaded,
    RetrievalUnavailable,
    ScoredDocument,
)
from tests.retrieval_server.app.live.conftest import Configured
from tests.retrieval_server.app.live.providers_at_home import Home, spent, throttled


async def asked(live: LiveSearch, *queries: str, within_s: float = 10.0) -> Any:
    return await live.search(queries, 3, time.monotonic() + within_s)


def told(row: list[ScoredDocument]) -> str:
    """The name of the error in place of passages; '' where there are some."""
    return str(row[0].document.id).partition("error:")[2] if len(row) == 1 else ""


async def test_a_search_is_bought_once(home: Home, configured: Configured) -> None:
    async with open_live(configured(home)) as live:
        rows = await asked(live, "q", "nothing", "q")
        assert rows[0] == rows[2] and rows[1] == [] and len(rows[0]) <= 3
        pages = [hit for hit in rows[0] if "Own" not in hit.document.contents]
        assert pages[0].document.contents == "q 1\nsnippet 1 of q"
        assert [hit.score for hit in rows[0]] == sorted((h.score for h in rows[0]), reverse=True)
        assert await asked(live, "q") == rows[:1]
    assert home.billed == 2 and live.figures()["spent_usd"] == pytest.approx(0.02)
    async with open_live(configured(home)) as again:  # after the end, from the disk
        assert await asked(again, "q", "nothing") == rows[:2]
    assert home.billed == 2 and again.figures()["remembered"] == 2


async def test_one_query_of_many_at_once_is_sent_once(serper: Home, configured: Configured) -> None:
    serper.delay_s = 0.1
    async with open_live(configured(serper)) as live:
        rows = await asyncio.gather(*(asked(live, "q") for _ in range(20)))
    assert serper.requests == ["q"] and all(each == rows[0] for each in rows)


async def test_the_probe_costs_nothing(serper: Home, configured: Configured) -> None:
    async with open_live(configured(serper)) as live:
        assert await asked(live, PROBE) == [[]]
    assert serper.requests == []


async def test_the_budget_holds_under_concurrency(home: Home, configured: Configured) -> None:
    home.delay_s = 0.02
    home.script = [throttled(home.kind, "0")] * 3 + [(503, {"retry-after": "0"}, {})]
    config = configured(home, price_usd=0.01, budget_usd=0.105, concurrency=32)
    async with open_live(config) as live:
        rows = await asyncio.gather(*(asked(live, f"q{number}") for number in range(60)))
    names = [told(row) for (row,) in rows]
    assert names.count("BudgetSpent") == 60 - home.billed and {*names} == {"", "BudgetSpent"}
    assert home.billed * 0.01 <= 0.105 and home.billed >= 9  # the 503 may have cost one
    assert live.figures()["spent_usd"] == pytest.approx(0.10)
    assert (
        "all money for searches is spent"
        in rows[names.index("BudgetSpent")][0][0].document.contents
    )


async def test_a_run_that_goes_on_goes_on_counting(
    serper: Home, configured: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(serper, price_usd=0.5, budget_usd=1.0)
    async with open_live(config) as live:
        await asked(live, "a", "b")
    async with open_live(config) as again:
        rows = await asked(again, "c", "a", "d")
    assert [told(row) for row in rows] == ["BudgetSpent", "", "BudgetSpent"]
    assert serper.billed == 2 and caplog.text.count("budget_usd = 1.0 is spent") == 1
    async with open_live(configured(serper, price_usd=0.5, budget_usd=1.5)) as richer:
        assert told((await asked(richer, "c"))[0]) == "" and serper.billed == 3


async def test_a_429_is_waited_for_and_not_paid(home: Home, configured: Configured) -> None:
    home.script = [throttled(home.kind, "1")]
    async with open_live(configured(home)) as live:
        rows = await asyncio.gather(*(asked(live, f"q{number}") for number in range(3)))
    assert all(told(row) == "" for (row,) in rows) and home.billed == 3
    assert live.figures()["spent_usd"] == pytest.approx(0.03)
    late = [at for at in home.times if at > home.times[0] + 0.5]
    assert late and min(late) - home.times[0] >= 0.99


async def test_an_account_without_searches_is_named_and_left_alone_for_a_minute(
    home: Home, configured: Configured
) -> None:
    home.script = [spent(home.kind)]
    async with open_live(configured(home)) as live:
        with pytest.raises(RetrievalUnavailable, match="see its account"):
            await asked(live, "q", within_s=2.0)
        with pytest.raises(RetrievalOverloaded, match="see its account") as raised:
            await asked(live, "r", within_s=2.0)
        assert 55.0 < raised.value.retry_after_s <= 60.0
    assert len(home.requests) == 1 and live.figures()["spent_usd"] == 0.0


async def test_a_429_beyond_the_deadline_is_told_at_once(
    home: Home, configured: Configured
) -> None:
    home.script = [throttled(home.kind, "30")]
    async with open_live(configured(home)) as live:
        begun = time.monotonic()
        for query in ("q", "r"):
            with pytest.raises(RetrievalOverloaded, match="answered 429") as raised:
                await asked(live, query, within_s=2.0)
            assert 28.0 < raised.value.retry_after_s <= 30.0
        assert time.monotonic() - begun < 1.5
    assert len(home.requests) == 1 and live.figures()["spent_usd"] == 0.0


async def test_requests_keep_to_the_rate(serper: Home, configured: Configured) -> None:
    async with open_live(configured(serper, requests_per_s=20.0)) as live:
        await asyncio.gather(*(asked(live, f"q{number}") for number in range(11)))
        with pytest.raises(RetrievalOverloaded, match="requests_per_s"):
            await asyncio.gather(*(asked(live, f"r{each}", within_s=0.3) for each in range(20)))
    assert serper.times[10] - serper.times[0] >= 0.35  # .5, less what the first one was late


async def test_no_more_are_under_way_than_allowed(serper: Home, configured: Configured) -> None:
    serper.delay_s = 0.05
    async with open_live(configured(serper, concurrency=3)) as live:
        await asyncio.gather(*(asked(live, f"q{number}") for number in range(9)))
    assert serper.most_under_way == 3


async def test_what_has_been_sent_is_kept_for_who_comes_back(
    serper: Home, configured: Configured
) -> None:
    serper.delay_s = 0.3
    async with open_live(configured(serper, concurrency=1)) as live:
        asking = asyncio.gather(asked(live, "sent"), asked(live, "waiting"))
        while not serper.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.6)
        assert serper.requests == ["sent"] and not live.waiting
        assert told((await asked(live, "sent"))[0]) == ""
    assert serper.requests == ["sent"]


async def test_a_wrong_key_is_named_and_not_hammered(
    home: Home, configured: Configured, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.write_text("another-key-of-somebody\n")
    async with open_live(configured(home)) as live:
        with pytest.raises(RetrievalUnavailable) as raised:
            await asked(live, "q")
        with pytest.raises(RetrievalOverloaded) as held:
            await asked(live, "r", within_s=5.0)
    assert len(home.requests) == 1 and live.figures()["spent_usd"] == 0.0
    for text in (str(raised.value), str(held.value), caplog.text):
        assert "the key" in text and "another-key-of-somebody" not in text


async def test_a_query_that_the_provider_refuses_is_told(
    serper: Home, configured: Configured
) -> None:
    async with open_live(configured(serper)) as live:
        await asked(live, "right")
        serper.script = [(400, {}, {"message": "Query too long"})]
        assert told((await asked(live, "q"))[0]) == "QueryRefused"
        assert told((await asked(live, "q"))[0]) == "QueryRefused"
    assert serper.requests == ["right", "q"] and live.figures()["spent_usd"] == pytest.approx(0.01)


async def test_a_refusal_of_whatever_is_asked_is_put_on_no_record(
    serper: Home, configured: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = (400, {}, {"error": {"message": "Request contains an invalid argument."}})
    serper.script = [wrong, wrong]
    async with open_live(configured(serper)) as live:
        for query in ("a", "b"):  # nothing has been answered yet
            with pytest.raises(RetrievalUnavailable, match="invalid argument"):
                await asked(live, query)
        assert caplog.text.count("see retrieval.live.engine_id, country, language and url") == 1
        assert told((await asked(live, "a"))[0]) == ""
        serper.script = [wrong] * 7
        for number in range(5):
            assert told((await asked(live, f"c{number}"))[0]) == "QueryRefused"
        for query in ("d", "e"):
            with pytest.raises(RetrievalUnavailable, match="invalid argument"):
                await asked(live, query)
        assert caplog.text.count("see retrieval.live.engine_id, country, language and url") == 2
        assert told((await asked(live, "d"))[0]) == ""
    assert live.figures()["spent_usd"] == pytest.approx(0.02)


@pytest.mark.slow
async def test_a_sick_provider_is_not_paid_on_and_on(
    serper: Home, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 1.0)
    serper.script = [(200, {}, b"<html>")] * 6
    async with open_live(configured(serper)) as live:
        for number in range(20):
            with pytest.raises((RetrievalUnavailable, RetrievalOverloaded)):
                await asked(live, f"q{number}", within_s=0.5)
        assert len(serper.requests) == 5
        await asyncio.sleep(live.backlog_s)
        rows = [asked(live, f"r{each}", within_s=0.5) for each in range(4)]
        errors = await asyncio.gather(*rows, return_exceptions=True)
        assert len(serper.requests) == 6 and all(isinstance(e, Exception) for e in errors)
        await asyncio.sleep(live.backlog_s)
        assert told((await asked(live, "s"))[0]) == "" and live.backlog_s < 0.5
        await asked(live, "t", within_s=0.5)
    assert live.figures()["spent_usd"] == pytest.approx(0.08)


async def test_nothing_is_bought_that_cannot_be_kept(
    serper: Home, configured: Configured, tmp_path: Path
) -> None:
    record = tmp_path / "run" / "live" / "answers.jsonl"
    away = record.with_suffix(".away")
    async with open_live(configured(serper)) as live:
        record.rename(away)
        rows = await asked(live, "q")
        assert told(rows[0]) == "" and await asked(live, "q") == rows
        with pytest.raises(BadRecord, match=r"answers\.jsonl"):
            await asked(live, "r")
        assert serper.requests == ["q"] and live.figures()["spent_usd"] == pytest.approx(0.01)
        away.rename(record)
        assert told((await asked(live, "r"))[0]) == ""
    assert len(record.read_text().splitlines()) == 2


async def test_requests_are_to_hold_one_query(serper: Home, configured: Configured) -> None:
    """So that one that fails fails no other."""
    async with open_live(configured(serper, concurrency=16)) as live:
        assert live.offered == 1


@pytest.mark.parametrize("kind", ["serpapi"])
async def test_a_query_that_no_request_holds_is_told(configured: Configured, kind: str) -> None:
    home = Home(kind, "http://127.0.0.1:9/search")
    async with open_live(configured(home)) as live:
        assert told((await asked(live, "x" * 65_536))[0]) == "QueryRefused"


@pytest.mark.parametrize("broken", [(500, {}, {}), (200, {}, b"<html>"), (200, {}, {"organic": 1})])
async def test_what_may_have_been_billed_is_tried_twice_and_counted(
    serper: Home, configured: Configured, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.05)
    serper.script = [broken]
    async with open_live(configured(serper)) as live:
        assert told((await asked(live, "q"))[0]) == ""
        assert live.figures()["spent_usd"] == pytest.approx(0.02)
        serper.script = [broken, broken]
        with pytest.raises(RetrievalUnavailable, match="serper"):
            await asked(live, "r")
        assert live.figures()["spent_usd"] == pytest.approx(0.04)


async def test_silence_ends_by_the_timeout(
    serper: Home, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    serper.delay_s = 1.0
    async with open_live(configured(serper, timeout_s=0.2)) as live:
        with pytest.raises(RetrievalUnavailable, match=r"no answer within 0\.2 s"):
            await asked(live, "q")
    assert live.figures()["spent_usd"] == pytest.approx(0.02)


async def test_nobody_there_costs_nothing(configured: Configured) -> None:
    async with open_live(configured(Home("serper", "http://127.0.0.1:9/search"))) as live:
        with pytest.raises(RetrievalOverloaded, match="no connection"):
            await asked(live, "q", within_s=0.5)
    assert live.figures()["spent_usd"] == 0.0


async def test_a_replay_makes_no_request(
    home: Home, configured: Configured, tmp_path: Path
) -> None:
    config = configured(home, price_usd=0.4, budget_usd=1.0)
    queries = ("a", "nothing", "another")
    async with open_live(config) as live:
        first = await asked(live, *queries)
    made = len(home.requests)
    record = tmp_path / "run" / "live" / "answers.jsonl"
    replay = configured(home, replay=record, price_usd=0.0, budget_usd=0.0, key_file="")
    before = sorted(each.read_bytes() for each in record.parent.iterdir())
    async with open_live(replay) as again:
        assert await asked(again, *queries) == first
        with pytest.raises(NotRecorded, match=r"query 'other' is not in .*answers\.jsonl"):
            await asked(again, "other")
    assert sorted(told(row) for row in first) == ["", "", "BudgetSpent"]  # in any order
    assert len(home.requests) == made == 2
    assert sorted(each.read_bytes() for each in record.parent.iterdir()) == before


@pytest.mark.slow
async def test_pauses_grow_by_failures_not_by_what_met_one_together(
    serper: Home, configured: Configured
) -> None:
    serper.delay_s = 0.3
    serper.script = [throttled("serper")] * 8
    async with open_live(configured(serper)) as live:
        with pytest.raises(RetrievalOverloaded) as first:
            await asyncio.gather(*(asked(live, f"q{each}", within_s=0.8) for each in range(8)))
        assert 0.5 < first.value.retry_after_s <= 1.0
        while live.waiting or live.backlog_s:
            await asyncio.sleep(0.05)
        serper.script = [throttled("serper")]
        with pytest.raises(RetrievalOverloaded) as second:
            await asked(live, "r", within_s=1.0)
        assert 1.5 < second.value.retry_after_s <= 2.0


async def test_who_has_no_money_left_waits_for_no_turn(
    serper: Home, configured: Configured
) -> None:
    config = configured(serper, price_usd=1.0, budget_usd=1.0, requests_per_s=0.5)
    async with open_live(config) as live:
        await asked(live, "q")
        rows = await asyncio.gather(*(asked(live, f"r{each}", within_s=1.0) for each in range(40)))
    assert {told(row) for (row,) in rows} == {"BudgetSpent"} and serper.billed == 1
