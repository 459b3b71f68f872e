"""What live searches have spent is said once it is nearly all, and once it is all."""

from pathlib import Path

import pytest

from configs.retrieval import LiveConfig, RetrievalConfig
from configs.schema import Config
from retrieval_server.app.live.budget import Budget
from scripts.fleet.money import EVERY_S, MoneyWatch

LIVE = LiveConfig(key_file="/key", price_usd=0.1, budget_usd=1.0)


@pytest.fixture
def said() -> list[str]:
    return []


def watch(run: Path, said: list[str], **fields: object) -> MoneyWatch:
    asked = {"kind": "serper", "live": LIVE} | fields
    config = Config(run_dir=str(run), retrieval=RetrievalConfig(**asked))
    return MoneyWatch(config, lambda text, style: said.append(f"{style}: {text}"))


def test_each_thing_is_said_once_and_in_time(tmp_path: Path, said: list[str]) -> None:
    watching, now = watch(tmp_path, said), 0.0
    watching.tend(now)
    budget = Budget(tmp_path / "live" / "spending.jsonl", 1.0, 0.1)
    told = []
    for _ in range(10):
        assert budget.take()
        watching.tend(now + EVERY_S / 2)
        now += EVERY_S
        watching.tend(now)
        told.append(len(said))
    assert told == [0] * 7 + [1, 1, 2]
    assert said[0].startswith("yellow: live searches have spent 0.8 of retrieval.live.budget_usd =")
    assert "is spent: 1 of retrieval.live.budget_usd = 1 US dollars. The run goes on" in said[1]
    assert f"`forage resume {tmp_path} --trust retrieval.live.budget_usd=USD`" in said[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "", "corpus": "corpus.jsonl"},
        {"live": LiveConfig(replay="answers.jsonl")},
        {"url": ("https://192.0.2.7",)},
    ],
)
def test_nothing_is_said_where_the_run_pays_nothing(
    tmp_path: Path, said: list[str], fields: dict[str, object]
) -> None:
    budget = Budget(tmp_path / "live" / "spending.jsonl", 0.1, 0.1)
    assert budget.take()
    watch(tmp_path, said, **fields).tend(0.0)
    assert not said


def test_a_file_that_cannot_be_read_is_the_servers_to_name(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "spending.jsonl").write_text("no line\n")
    watch(tmp_path, said).tend(0.0)
    assert not said
