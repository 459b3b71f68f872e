"""The judge against a small real server: its requests, its failures, the verdicts it reads."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import Unscorable
from actors.rewards.judge import Judge, read_verdict
from configs.load import ConfigError
from configs.prompts import JUDGE_PROMPT
from configs.rewards import JudgeConfig
from tests.actors.judges import JudgeServer, http, says

GOLDS = ["kelu", "Kelu I"]


def judge_at(url: str, **changes: Any) -> Judge:
    return Judge(JudgeConfig(**({"url": url, "model": "tiny", "timeout_s": 60.0} | changes)))


async def verdict_of(*script: bytes | None, **changes: Any) -> tuple[float, dict[str, float], int]:
    """The verdict, the judge's gauges and how many requests it took."""
    async with JudgeServer(*script) as server:
        judge = judge_at(server.url, **changes)
        try:
            verdict = await judge.verdict("who?", GOLDS, "kelu")
        finally:
            await judge.close()
        return verdict, judge.gauges(), len(server.requests)


async def fault_of(*script: bytes | None, **changes: Any) -> tuple[str, dict[str, float], int]:
    """The cause, the judge's gauges and how many requests it took."""
    async with JudgeServer(*script) as server:
        judge = judge_at(server.url, **changes)
        with pytest.raises(Unscorable) as raised:
            await judge.verdict("who?", GOLDS, "kelu")
        await judge.close()
        assert raised.value.whose == "judge" and server.url in str(raised.value)
        return str(raised.value), judge.gauges(), len(server.requests)


async def test_it_asks_a_chat_completion_with_everything_filled_in(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-forage_12\n")
    key.chmod(0o600)
    async with JudgeServer(says("Yes")) as server:
        judge = judge_at(server.url + "/chat/completions", key_file=str(key))
        assert await judge.verdict("who is {answer}?", GOLDS, "a {gold} one") == 1.0
        await judge.close()
    [request], [head] = server.requests, server.heads
    [message] = request["messages"]
    assert head.startswith("POST /v1/chat/completions ")
    assert "authorization: Bearer sk-forage_12\r\n" in head
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0, 256)
    assert message["role"] == "user" and "Question: who is {answer}?\n" in message["content"]
    assert "\n- kelu\n- Kelu I\n" in message["content"] and "\na {gold} one\n" in message["content"]
    assert message["content"].endswith(JUDGE_PROMPT[-40:])


async def test_what_some_endpoints_refuse_can_be_left_out() -> None:
    async with JudgeServer(says("0.5")) as server:
        judge = judge_at(server.url + "/", temperature=None, max_tokens=0)
        assert await judge.verdict("who?", GOLDS, "kelu") == 0.5
        await judge.close()
    assert set(server.requests[0]) == {"model", "messages"}
    assert "authorization" not in server.heads[0].lower()


@pytest.mark.parametrize(
    "fault",
    [
        http(500, {"error": "oops"}),
        http(503, b"", "retry-after: 0\r\n"),
        http(429, b"slow down"),
        http(200, b"<html>"),
        http(200, b"\xff\xfe"),
        http(200, {"choices": []}),
        http(200, {"choices": [{"text": "yes"}]}),
        http(200, {"error": "an error as a reply"}),
        http(200, b"[" * 100_000),
        b"",
        b"garbage\r\n\r\n",
    ],
)
async def test_a_fault_is_retried(fault: bytes) -> None:
    verdict, gauges, requests = await verdict_of(fault, says("no"))
    assert (verdict, requests) == (0.0, 2)
    assert gauges["actor/judge_retried_count"] == 1 and gauges["actor/judge_failures_count"] == 0
    assert gauges["actor/judge_latency_p99_s"] > 0


async def test_retries_end_and_the_last_cause_is_told() -> None:
    cause, gauges, requests = await fault_of(http(500, b"broken disk"), retries=1)
    assert requests == 2 and "status 500" in cause and "broken disk" in cause
    assert gauges["actor/judge_failures_count"] == 1


async def test_a_refusal_is_not_repeated_and_keeps_the_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-forage_12")
    key.chmod(0o600)
    refused = http(401, {"error": "Incorrect API key provided: sk-forage_12"})
    cause, _, requests = await fault_of(refused, key_file=str(key))
    assert requests == 1 and "status 401" in cause and "sk-forage" not in cause


@pytest.mark.parametrize("words", ["I cannot say.", "8/10", "", None])
async def test_an_unreadable_verdict_is_no_verdict(words: str | None) -> None:
    cause, gauges, requests = await fault_of(says(words))
    assert requests == 1 and repr(words or "") in cause
    assert gauges["actor/judge_failures_count"] == 1


async def test_a_reply_that_was_cut_short_is_no_verdict() -> None:
    cause, gauges, requests = await fault_of(says("Yes, if the", finish="length"))
    assert requests == 1 and "cut short (rewards.judge.max_tokens)" in cause
    assert "'Yes, if the'" in cause and gauges["actor/judge_failures_count"] == 1


async def test_the_query_of_an_address_stays_where_it_is() -> None:
    async with JudgeServer(says("yes")) as server:
        for path in ("/", "/chat/completions", ""):
            judge = judge_at(f"{server.url}{path}?api-version=2024-06-01")
            assert await judge.verdict("who?", GOLDS, "kelu") == 1.0
            await judge.close()
    asked = {head.split(" ")[1] for head in server.heads}
    assert asked == {"/v1/chat/completions?api-version=2024-06-01"}


async def test_a_server_that_stays_silent_is_given_up() -> None:
    cause, gauges, _ = await fault_of(None, timeout_s=0.2, retries=0)
    assert "within" in cause and gauges["actor/judge_failures_count"] == 1


@pytest.mark.slow
async def test_a_late_reply_leaves_time_for_another_attempt() -> None:
    verdict, gauges, _ = await verdict_of(None, says("yes"), timeout_s=4.0)
    assert verdict == 1.0 and gauges["actor/judge_retried_count"] == 1


async def test_nobody_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    judge = judge_at(f"http://127.0.0.1:{port}/v1", retries=1)
    with pytest.raises(Unscorable, match="ConnectError"):
        await judge.verdict("who?", GOLDS, "kelu")
    await judge.close()


async def test_a_verdict_is_asked_for_once() -> None:
    async with JudgeServer(says("yes")) as server:
        judge = judge_at(server.url)
        cases = [("who?", "kelu")] * 5 + [("who?", "kela"), ("where?", "kelu")]
        asked = (judge.verdict(question, GOLDS, answer) for question, answer in cases)
        assert await asyncio.gather(*asked) == [1.0] * 7
        assert await judge.verdict("who?", GOLDS, "kelu") == 1.0
        assert await judge.verdict("who?", ["kelu"], "kelu") == 1.0
        await judge.close()
    assert len(server.requests) == 4
    gauges = judge.gauges()
    assert (gauges["actor/judge_calls_count"], gauges["actor/judge_cached_count"]) == (4, 5)


async def test_a_failure_is_not_remembered() -> None:
    async with JudgeServer(says("hm"), says("yes")) as server:
        judge = judge_at(server.url)
        with pytest.raises(Unscorable):
            await judge.verdict("who?", GOLDS, "kelu")
        assert await judge.verdict("who?", GOLDS, "kelu") == 1.0
        await judge.close()


async def test_so_many_requests_at_once_and_no_more() -> None:
    async with JudgeServer(says("yes")) as server:
        server.free.clear()
        judge = judge_at(server.url, concurrency=2)
        asking = [asyncio.create_task(judge.verdict(f"{n}?", GOLDS, "kelu")) for n in range(6)]
        while len(server.requests) < 2:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(server.requests) == 2
        server.free.set()
        assert await asyncio.gather(*asking) == [1.0] * 6
        await judge.close()
    assert len(server.requests) == 6


async def test_an_answer_without_end_is_shown_in_part() -> None:
    async with JudgeServer(says("no")) as server:
        judge = judge_at(server.url)
        assert await judge.verdict("who?", GOLDS, "kelu \ud800 " * 100_000) == 0.0
        await judge.close()
    assert len(server.requests[0]["messages"][0]["content"]) < 6000


async def test_closing_waits_for_nobody() -> None:
    async with JudgeServer(None) as server:
        judge = judge_at(server.url)
        asking = asyncio.create_task(judge.verdict("who?", GOLDS, "kelu"))
        while not server.requests:
            await asyncio.sleep(0.001)
        await judge.close()
        with pytest.raises(asyncio.CancelledError):
            await asking


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-forage_12")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"rewards.judge.key_file = .*chmod 600"):
        judge_at("http://127.0.0.1:1/v1", key_file=str(key))


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("yes", 1.0),
        ("No.", 0.0),
        (" **Yes** \n", 1.0),
        ("True", 1.0),
        ("incorrect", 0.0),
        ("Yes, because nothing says no.", 1.0),
        ("No, but yes in part", 0.0),
        ("Yes. The accepted answer is no, and the answer is no.", 1.0),
        ("0.7", 0.7),
        ("1", 1.0),
        (".5", 0.5),
        ("1e-1", 0.1),
        ("0.5/1", 0.5),
        ("Score: 0.75", 0.75),
        ("The score is 0.9.", 0.9),
        ("Verdict: **no**", 0.0),
        ("Score: 0.2\nOn second thoughts.\nScore: 0.8", 0.8),
        ('{"score": 0.3, "reason": "yes and no"}', 0.3),
        ('```json\n{"verdict": "no"}\n```', 0.0),
        ('{"verdict": "no", "reason": "a score 1 would need more"}', 0.0),
        ('{"reason": "say \\"score\\": 1", "verdict": false, "score": 9}', 0.0),
        ('{"verdict": "no", "reason": "a score 1 would', 0.0),
        ("{'score': 1.0}", 1.0),
        ('{"score": 1}\nOn second thoughts.\n{"score": 0.5}', 0.5),
        ("Score: 1 out of 1", 1.0),
        ("Score: 0.5/1.0", 0.5),
        ("Score: 1 in my view", 1.0),
        ("They mean the same.\nYes", 1.0),
        ("<think>no, no … yes?\nno</think>\nYes", 1.0),
        ("thinking aloud: no</think>yes", 1.0),
    ],
)
def test_verdicts_are_read(reply: str, verdict: float) -> None:
    assert read_verdict(reply) == verdict


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I cannot say.",
        "Not sure",
        "yes or no",
        "yes/no",
        "maybe yes",
        "No one can tell",
        "8/10",
        "Score: 8/10",
        "1/10",
        "Score: 1 out of 10",
        "Score: 1 out of ten",
        "Rating: 1 of 5",
        "Rating: 0.5 in 10",
        "Score: 1/1.5",
        "1 of 5",
        "They differ.\n1 out of 10",
        '{"verdict": "unclear", "reason": "a score 1 would need more"}',
        '{"score": 8}',
        "80%",
        "1.5",
        "-0.2",
        "nan",
        "Score: 1,000",
        "1. The answer is",
        "The accepted answer is 1.",
        "The answer is not correct",
        "<think>yes",
        "correctly",
        "9" * 400,
    ],
)
def test_what_is_no_verdict_is_none(reply: str) -> None:
    assert read_verdict(reply) is None


@given(st.text() | st.text(alphabet="yesno01./% :*#<>\n", max_size=60))
def test_any_reply_is_a_number_from_0_to_1_or_nothing(reply: str) -> None:
    verdict = read_verdict(reply)
    assert verdict is None or 0.0 <= verdict <= 1.0


@pytest.mark.parametrize(
    "piece", [" ", "-", "*", "1", "score ", "score: ", '"score": ', "1 of ", "<think>", "\n", ".1"]
)
def test_a_huge_reply_is_read_in_a_moment(piece: str) -> None:
    assert read_verdict(piece * 100_000 + "?") is None
