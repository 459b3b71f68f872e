"""What live searches lack is said before anything is asked; their key is nowhere but in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.load import ConfigError
from configs.schema import Config
from retrieval_server.app.live.opening import check, open_live, read_key, require_folder
from tests.retrieval_server.app.live.conftest import Configured
from tests.retrieval_server.app.live.providers_at_home import KEY, Home


@pytest.fixture
def asking(configured: Configured) -> Callable[..., Config]:
    """asking(live fields …): a configuration that asks nobody who is there."""
    return lambda **live: configured(Home("serper", "http://127.0.0.1:9/search"), **live)


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        check(config)
    return str(raised.value)


def test_a_whole_configuration_passes_and_leaves_nothing(
    asking: Callable[..., Config], tmp_path: Path
) -> None:
    check(asking())
    assert not (tmp_path / "run").exists()


def test_the_key_may_be_in_the_environment(
    asking: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(key_file="", key_variable="A_KEY")
    assert "key_variable names no variable that is set here: export it" in refused(config)
    monkeypatch.setenv("A_KEY", f" {KEY}\n")
    check(config)
    assert read_key(config.retrieval.live) == KEY
    monkeypatch.setenv("A_KEY", "a secret with spaces")
    assert "holds no key" in (said := refused(config)) and "secret" not in said


def test_no_key_is_named_with_both_ways(asking: Callable[..., Config]) -> None:
    said = refused(asking(key_file=""))
    assert "retrieval.live.key_file = ''" in said and "retrieval.live.key_variable=NAME" in said


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_file_that_others_can_read_is_refused(
    asking: Callable[..., Config], key_file: Path, mode: int
) -> None:
    key_file.chmod(mode)
    said = refused(asking())
    assert f"mode {mode:04o} lets others read it: chmod 600 {key_file}" in said and KEY not in said


@pytest.mark.parametrize("text", ["", "two words", "short", "\x00\x01"])
def test_a_file_without_a_key_is_refused(
    asking: Callable[..., Config], key_file: Path, text: str
) -> None:
    key_file.write_text(text)
    said = refused(asking())
    assert "retrieval.live.key_file" in said and (not text or text not in said)


def test_a_missing_file_is_named(asking: Callable[..., Config]) -> None:
    assert "live.key_file = '/no/key': No such file" in refused(asking(key_file="/no/key"))
    assert "live.replay = '/no/record'" in refused(asking(replay="/no/record"))
    assert "its folder does not exist" in refused(asking(record="/no/folder/record"))


def test_a_budget_without_a_folder_is_refused(asking: Callable[..., Config]) -> None:
    config = msgspec.structs.replace(asking(), run_dir="")
    check(config)  # as an evaluation's is, whose folder is found later
    for refuse in (require_folder, open_live):
        with pytest.raises(ConfigError, match=r"run_dir = ''.*run_dir=DIR"):
            refuse(config)


@pytest.mark.parametrize(
    ("name", "field"), [("spending", "budget_usd = 1.0"), ("answers", "record = ")]
)
def test_books_that_cannot_be_read_are_refused(
    asking: Callable[..., Config], tmp_path: Path, name: str, field: str
) -> None:
    path = tmp_path / "run" / "live" / f"{name}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("no line of ours\n")
    said = refused(asking())
    assert f"retrieval.live.{field}" in said and f"{name}.jsonl" in said


async def test_a_replay_of_other_searches_is_refused(
    asking: Callable[..., Any], tmp_path: Path
) -> None:
    record = tmp_path / "answers.jsonl"
    record.write_text('{"scope":{"kind":"serpapi"},"query":"q","at":1.0}\n')
    assert "holds no answer of retrieval.kind = 'serper'" in refused(asking(replay=record))
    record.write_text('{"scope":{"kind":"serper","engine_id":"cx1"},"query":"q","at":1.0}\n')
    async with open_live(asking(replay=record, key_file="")) as live:
        assert live.budget is None
