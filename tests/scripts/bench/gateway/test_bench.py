"""The gateway's benchmark: its figures have their names, and the calls are counted."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.server import Gateway
from actors.prompt import Prompter
from scripts import cli
from scripts.ask.dry_run import Said
from scripts.bench.gateway import bench
from scripts.bench.gateway.calls import TURNS, window
from scripts.bench.gateway.serving import Address
from scripts.bench.harness import BenchError
from tests.actors.gateway.conftest import LEASE, all_verified, config_of


def test_the_figures_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any) -> dict[str, float]:
        return dict(zip(bench.GOALS, (0.95, 6.0, 1.0, 0.01, 0.0), strict=True))

    monkeypatch.setattr(bench, "measure", measured)
    file = tmp_path / "figures.json"
    assert cli.main(["bench", "gateway", "--quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["sessions"] == 64 and {*bench.METHOD} <= {*found["method"]}
    assert {*bench.GOALS} <= {*found} and "missed" in capsys.readouterr().out


@pytest.mark.slow
async def test_sessions_are_played_and_looked_at(word_tokenizer: Any) -> None:
    config = config_of()
    prompter = Prompter(word_tokenizer, config.questions, config.actors)
    texts: Iterator[str] = itertools.repeat("<search> mayor </search>")
    policy = Said(prompter, lambda _: next(texts))
    gateway = await Gateway.start(policy, prompter, config, all_verified)
    try:
        address = Address(gateway.url, [gateway.open(LEASE).key for _ in range(2)])
        sizes = {"at_once": 2, "sessions": 3, "max_tokens": 9, "first": 0}
        made = await window(address, ["what is"], **sizes, look=True)
        assert made.whole == [True] * 3 and not made.errors and made.seconds > 0.0
        assert made.tokens / len(made.latencies_s) == bench._sampled([made, made])
        assert len(made.latencies_s) == 3 * TURNS and made.tokens == 3 * 3 * TURNS
        texts = itertools.repeat("kelu")
        once = await window(address, ["what is"], **sizes, look=True)
        assert not once.whole and len(once.latencies_s) == 3  # one turn tells nothing of merging
        with pytest.raises(BenchError, match="no session had a second turn"):
            await bench._figures(address, address, bench.Sizes(4, 2, 1), print)
        wrong = await window(Address(gateway.url, ["no key"]), ["what is"], **sizes)
        assert wrong.errors == 3 and not wrong.tokens
    finally:
        await gateway.close()
    assert not asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.slow
async def test_the_figures_of_two_servers(word_tokenizer: Any) -> None:
    config = config_of()
    prompter = Prompter(word_tokenizer, config.questions, config.actors)
    gateway = await Gateway.start(
        Said(prompter, lambda _: "<search> mayor </search>"), prompter, config, all_verified
    )
    try:
        address = Address(gateway.url, [gateway.open(LEASE, free=True).key for _ in range(8)])
        found = await bench._figures(address, address, bench.Sizes(4, 2, 1), print)
    finally:
        await gateway.close()
    assert found["merged_whole"] == 1.0 and found["tokens_per_call"] == {"gateway": 3, "vllm": 3}
    assert not found["errors"] and not found["sampled_differs"]
