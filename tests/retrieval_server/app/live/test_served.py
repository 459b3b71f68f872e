"""The process over a provider at home: what actors' clients get, and what its folder holds."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from configs.load import save
from configs.runtime.process import Exit
from configs.schema import Config
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import Passage, RetrievalRefused, RetrievalUnavailable
from tests.children import ends_with_us
from tests.retrieval_server.app.live.conftest import Configured
from tests.retrieval_server.app.live.providers_at_home import KEY, Home, refusal, throttled

Started = Callable[[Config], tuple[str, "subprocess.Popen[bytes]"]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """start(config): the URL and process of a server whose log is in the run's folder."""
    processes: list[subprocess.Popen[bytes]] = []

    def started(config: Config) -> tuple[str, "subprocess.Popen[bytes]"]:
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        save(config, run / "config.yaml")
        command = [sys.executable, "-m", "retrieval_server.worker", str(run / "config.yaml")]
        with (run / "server.log").open("ab") as log:
            begins = log.tell()
            process = subprocess.Popen(command, stderr=log, env=ends_with_us(OMP_NUM_THREADS="1"))
        processes.append(process)
        while process.poll() is None:
            said = (run / "server.log").read_bytes()[begins:].decode()
            if found := re.search(r"serving the live web on (http://\S+) by", said):
                return found[1], process
            time.sleep(0.05)
        raise AssertionError((run / "server.log").read_text())

    yield started
    for process in processes:
        process.kill()
        process.wait()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == Exit.DONE


async def found(url: str, *queries: str, timeout_s: float = 10.0) -> list[list[Passage]]:
    async with RetrievalClient(url, timeout_s, cache_queries=100) as client:
        return await client.retrieve(queries, 3)


@pytest.mark.slow
async def test_a_run_is_searched_paid_for_resumed_and_replayed(
    home: Home, configured: Configured, start: Started, tmp_path: Path
) -> None:
    run, record = tmp_path / "run", tmp_path / "run" / "live" / "answers.jsonl"
    home.script = [throttled(home.kind, "1")]
    config = configured(home, price_usd=0.25, budget_usd=0.8)
    url, process = start(config)
    first = await found(url, "a")
    assert first[0][-1].text == "snippet 2 of a"
    home.script = [refusal(home.kind, KEY)]
    with pytest.raises(RetrievalUnavailable, match="the key"):  # which its answer holds
        await found(url, "b", timeout_s=4.0)
    info, metrics = (
        httpx.get(f"{url}/{path}", trust_env=False).text for path in ("info", "metrics")
    )
    assert f"live {home.kind}" in info and "retrieval_live_spent_usd 0.25" in metrics
    process.kill()
    url, process = start(config)  # the budget is counted on
    rows = await asyncio.gather(*(found(url, f"c{number}") for number in range(8)))
    told = [each for (row,) in rows for each in row if each.id == "error:BudgetSpent"]
    assert home.billed == 3 and len(told) == 6
    assert (told[0].title, told[0].text.partition(":")[0]) == ("Search error", "BudgetSpent")
    stop(process)
    made = len(home.requests)
    url, process = start(configured(home, replay=record, key_file="", url=""))
    assert await found(url, "a") == first
    assert [row for each in range(8) for row in await found(url, f"c{each}")] == [
        row for (row,) in rows
    ]
    with pytest.raises(RetrievalRefused, match=r"NotRecorded: query .*never asked"):
        await found(url, "never asked")
    stop(process)
    assert len(home.requests) == made
    files = [each for each in run.rglob("*") if each.is_file()]
    assert {"config.yaml", "server.log", "spending.jsonl", "answers.jsonl"} <= {
        f.name for f in files
    }
    assert all(KEY.encode() not in each.read_bytes() for each in files)


def test_it_does_not_start_without_its_key(
    serper: Home, configured: Configured, key_file: Path, start: Started
) -> None:
    key_file.chmod(0o644)
    with pytest.raises(AssertionError, match=r"mode 0644 lets others read it: chmod 600"):
        start(configured(serper))
