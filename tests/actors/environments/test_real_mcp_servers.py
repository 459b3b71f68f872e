"""Two published MCP servers as tools of one policy: the reference servers `time` and `git`, pinned,
in an environment of their own.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.environments.mcp_servers import listed
from configs.environment import EnvironmentConfig
from tests.actors.chats import CHATML, chat_tokenizer
from tests.actors.environments.test_search_r1 import OPEN, Library
from tests.actors.environments.test_tool_call import ANSWER, END, call, seen
from tests.pip_environments import environment_of, run

PINS = ("mcp==2.3.0", "mcp-server-git==2026.10.19", "mcp-server-time==2026.10.19")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def python() -> Path:
    """The environment's Python."""
    return environment_of("mcp-servers", PINS)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a change that is not committed."""
    folder = tmp_path / "notes"
    for words in (
        ("init", "--quiet", folder),
        ("-C", folder, "config", "user.name", "Kelu"),
        ("-C", folder, "config", "user.email", "kelu@bore.example"),
    ):
        run("git", *words)
    (folder / "mayor.txt").write_text("The mayor of bore is kelu.\n")
    return folder


def test_a_policy_uses_both_beside_search(
    stage: Any, bpe_tokenizer: Any, python: Path, repository: Path
) -> None:
    stage.tokenizer, stage.retriever = chat_tokenizer(bpe_tokenizer, CHATML), Library()
    servers = (f"{python} -m mcp_server_time", f"{python} -m mcp_server_git")
    assert {tool.name for tool in listed(servers[0])} == {"get_current_time", "convert_time"}
    there = {"repo_path": str(repository)}
    zones = {"source_timezone": "Asia/Kolkata", "target_timezone": "Asia/Tokyo"}
    turns = (
        call(name="convert_time", time="16:30", **zones)
        + call("mayor of bore")
        + call(name="git_add", files=["mayor.txt"], **there),
        call(name="git_commit", message="Say who is mayor", **there)
        + call(name="convert_time", time="16:30", **zones | {"target_timezone": "Bore/Kelu"}),
        call(name="git_log", max_count=1, **there) + call(name="git_show", **there),
    )
    room = {"max_action_tokens": 900, "max_passage_tokens": 900, "max_model_len": 20_000}
    settings = EnvironmentConfig(name="tool_call", mcp=servers, queries_per_turn=3)
    played = stage.play(
        *(f"{turn}{END}" for turn in turns), ANSWER, **OPEN | room, environment=settings
    )
    first, second, third, _ = seen(stage, played)
    assert "T20:00:00+09:00" in first and "mayor of bore 1" in first and "staged" in first
    assert "committed" in second and "Bore/Kelu" in second
    assert "Say who is mayor" in third and "Kelu" in third and "rev" in third
    assert played.reward == 1.0 and not any(turn.malformed for turn in played.turns)
    used = [each for turn in played.turns if turn.info for each in json.loads(turn.info)["tools"]]
    assert len(used) == 6 and not any("error" in each for each in used)
    assert run("git", "-C", repository, "log", "--format=%an: %s") == "Kelu: Say who is mayor\n"
