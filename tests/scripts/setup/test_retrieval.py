"""A command's own retrieval server: it serves, says why it cannot, and ends with the command."""

import asyncio
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from configs.load import parse
from configs.schema import Config
from scripts.setup.retrieval import LOG, ServerFailed, own_address, probe, serving

ROME = '{"id": "1", "contents": "Rome\\nA city."}\n'


def config(tmp_path: Path, corpus: str = ROME, *overrides: str) -> Config:
    """Over this corpus, at an address of its own."""
    (tmp_path / "c.jsonl").write_text(corpus)
    named = [f"retrieval.corpus={tmp_path / 'c.jsonl'}", *overrides]
    return own_address(parse("", named, "test"))


@pytest.mark.slow
async def test_it_serves_until_it_is_left_and_hears_no_ctrl_c(tmp_path: Path) -> None:
    given = config(tmp_path)
    with serving(given, tmp_path) as own:
        await own.ready()
        await probe(given)
        assert os.getsid(own.process.pid) == own.process.pid
    with pytest.raises(ServerFailed, match="ended with exit code 0"):
        await own.watch()
    assert "serving 1 passages" in (tmp_path / LOG).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl", "config.yaml", LOG}


@pytest.mark.slow
async def test_one_that_cannot_serve_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with (
        serving(config(tmp_path, '{"id": "1"}\n')) as own,
        pytest.raises(ServerFailed, match=r"exit code 2: .*c\.jsonl:1(?!.*; see)"),
    ):
        await own.ready()
    assert not list(temporary.iterdir())


async def test_its_death_is_told_without_what_older_starts_said(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("an older start's last words\n")
    with serving(config(tmp_path), tmp_path) as own:
        own.process.kill()
        said = f"the retrieval server ended with exit code -9; see {tmp_path / LOG}"
        with pytest.raises(ServerFailed, match=f"^{re.escape(said)}$"):
            await own.watch()


async def test_the_work_beside_it_ends_with_it_and_it_is_named(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def work(kill: bool, error: Exception | None = None) -> str:
        try:
            if kill:
                own.process.kill()
            if error:
                own.process.wait()
                raise error
            return await asyncio.sleep(60.0 if kill else 0.0, "done")
        finally:
            ended.set()

    with serving(config(tmp_path), tmp_path) as own:
        assert await own.beside(work(kill=False)) == "done"
        with pytest.raises(ZeroDivisionError):
            await own.beside(_divided())
        ended.clear()
        with pytest.raises(ServerFailed, match="exit code -9"):
            await own.beside(work(kill=True))
        assert ended.is_set()
        with pytest.raises(ServerFailed, match="exit code -9"):  # not what came of its death
            await own.beside(work(kill=True, error=OSError("no answer")))


async def _divided() -> None:
    1 / 0  # noqa: B018


async def test_one_that_takes_too_long_names_the_setting(tmp_path: Path) -> None:
    given = config(tmp_path, ROME, "actors.starting_deadline_s=0.001")
    with (
        serving(given, tmp_path) as own,
        pytest.raises(ServerFailed, match=r"after 0.001 s: build .*starting_deadline_s; see .*log"),
    ):
        await own.ready()


def test_one_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    with serving(config(tmp_path), leave_s=0.1) as own:
        own.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, own.process.pid, os.WSTOPPED)
    assert own.process.returncode == -signal.SIGKILL
