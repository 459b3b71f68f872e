"""A rollout over the live web: its actors' client is the one of any server, and a search beyond the
money is told to the policy by name, not a failed lease.
"""

from pathlib import Path
from typing import Any

import pytest

from configs.load import parse
from retrieval_server.app.app import create_live_app
from retrieval_server.app.live.opening import open_live
from retrieval_server.client import RetrievalClient
from tests.actors.conftest import Stage
from tests.retrieval_server.app.live.providers_at_home import KEY, at_home
from tests.retrieval_server.conftest import running

ROOM = {"max_model_len": 4000, "max_action_tokens": 200, "max_passage_tokens": 100}


async def test_a_rollout_is_told_that_the_money_is_spent(
    qwen_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERPER_KEY", KEY)
    stage = Stage(qwen_tokenizer)
    with at_home("serper") as home:
        live = {"url": home.url, "key_variable": "SERPER_KEY", "price_usd": 1, "budget_usd": 1.5}
        words = [f"retrieval.live.{name}={value}" for name, value in live.items()]
        config = parse("", ["retrieval.kind=serper", f"run_dir={tmp_path}", *words], "test")
        with running(create_live_app(open_live(config))) as url:
            async with RetrievalClient(url, 10.0) as client:
                stage.retriever = client  # type: ignore[assignment]
                searches = ("<search> one </search>", "<search> two </search>")
                trajectory = await stage.perform(*searches, "<answer> kelu </answer>", **ROOM)
    assert home.requests == ["one"] and trajectory.answer == "kelu" and trajectory.reward == 1.0
    first, second, _ = (qwen_tokenizer.decode(turn.observation_tokens) for turn in trajectory.turns)
    assert "snippet 1 of one" in first
    assert "BudgetSpent: nothing was searched for, as all money for searches is spent." in second
    (search,) = trajectory.turns[1].searches
    assert search.passage_ids == ("error:BudgetSpent",)
