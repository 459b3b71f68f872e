"""The process by hand: it serves, leaves on SIGTERM with 0, and with 2 when it cannot serve."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from configs.load import ConfigError, load
from configs.retrieval import RetrievalConfig
from configs.runtime.process import REPOSITORY, Exit
from configs.schema import Config
from retrieval_server import worker
from retrieval_server.app.app import create_app
from retrieval_server.encoder import Encoder
from retrieval_server.index.build import build_dense
from retrieval_server.index.open_index import open_index
from retrieval_server.worker import _warn_of_strangers, bind, check
from tests.children import ends_with_us
from tests.retrieval_server.conftest import running
from tests.retrieval_server.encoders import make_encoder

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def config(tmp_path: Path, write_corpus: Callable[..., Path]) -> Path:
    """A small configuration."""
    corpus = write_corpus({"id": "a", "contents": "bore\nthe mayor of bore is kelu ."})
    path = tmp_path / "config.yaml"
    path.write_text(f"retrieval:\n  corpus: {corpus}\n")
    return path


@pytest.fixture
def refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """refused(override): what it says before it serves, in this process."""
    monkeypatch.setattr(worker.process, "begin", lambda _: None)

    def said(override: str) -> str:
        assert worker.main([str(config), override]) == Exit.BAD_INPUT
        return capsys.readouterr().err

    return said


@pytest.fixture
def run(config: Path) -> Iterator[Run]:
    """Start `python -m retrieval_server.worker` on that configuration with overrides."""
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "retrieval_server.worker", str(config), *overrides]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=ends_with_us(OMP_NUM_THREADS="1")
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving 1 passages on (http://\S+)", line):
            return found[1]
    raise AssertionError(f"the worker ended with {process.wait()}")


def test_it_serves_on_a_free_port_and_ends_on_sigterm(run: Run) -> None:
    process = run("retrieval.top_k=0")
    url = _url(process)
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "passages": 1}
    body = {"queries": ["kelu"], "topk": None, "return_scores": True}
    reply = httpx.post(f"{url}/retrieve", json=body, trust_env=False).json()
    assert reply["result"][0][0]["document"]["id"] == "a"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in said


def test_the_documented_search_is_answered_as_documented(tmp_path: Path) -> None:
    section = (REPOSITORY / "docs" / "retrieval.md").read_text().split("## A search by hand")[1]
    blocks = re.findall(r"^```(?:json)?\n(.+?)^```$", section, re.M | re.S)
    corpus, answer, (start, search) = blocks[0], blocks[3], map(shlex.split, blocks[1:3])
    (tmp_path / "corpus.jsonl").write_text(corpus.split("<<'END'\n")[1].removesuffix("END\n"))
    assert start[:3] == ["python", "-m", "retrieval_server.worker"]
    here = f"retrieval.corpus={tmp_path / 'corpus.jsonl'}"
    config = load(str(REPOSITORY / start[3]), [*start[4:], here])
    assert f":{config.retrieval.port}/" in search[2]
    with running(create_app(*open_index(config.retrieval))) as url:
        path, body = httpx.URL(search[2]).path, search[search.index("-d") + 1]
        reply = httpx.post(f"{url}{path}", content=body, trust_env=False).json()
    assert reply == json.loads(answer)


@pytest.mark.slow
def test_it_ends_on_sigterm_with_a_client_connected(run: Run) -> None:
    process = run()
    with httpx.Client(base_url=_url(process), trust_env=False) as client:
        assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_it_says_that_it_leaves_before_it_does(run: Run) -> None:
    process = run("retrieval.drain_notice_s=60")
    url = _url(process)
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    process.send_signal(signal.SIGTERM)
    while (told := httpx.get(f"{url}/ready", trust_env=False)).status_code == 200:
        assert process.poll() is None
    assert (told.status_code, told.json()) == (503, {"status": "draining"})
    body = {"queries": ["kelu"], "topk": 1}
    assert httpx.post(f"{url}/retrieve", json=body, trust_env=False).status_code == 200
    process.send_signal(signal.SIGTERM)  # at once, then
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_token_is_asked_for_and_shown(run: Run, write_token: Callable[..., Path]) -> None:
    token_file = write_token("sesame-12")
    process = run(f"retrieval.token_file={token_file}", "retrieval.host=0.0.0.0")
    url = _url(process)
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    body = {"queries": ["kelu"], "topk": 1}
    assert httpx.post(f"{url}/retrieve", json=body, trust_env=False).status_code == 401
    shown = {"authorization": "Bearer sesame-12"}
    reply = httpx.post(f"{url}/retrieve", json=body, headers=shown, trust_env=False)
    assert reply.json()["result"][0][0]["id"] == "a"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert "WARNING" not in said and "sesame" not in said


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_listening_to_everybody_without_a_token_is_warned_of(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(retrieval=RetrievalConfig(host=host))
    _warn_of_strangers(config, host)
    said = "retrieval.host = '0.0.0.0': everybody who can reach 0.0.0.0 may search here"
    assert (said in caplog.text) is warned


def test_a_token_that_others_can_read_is_refused(
    refused: Callable[[str], str], write_token: Callable[..., Path]
) -> None:
    said = refused(f"retrieval.token_file={write_token('sesame', 0o640)}")
    assert "mode 0640 lets others read it: chmod 600" in said


def test_a_port_in_use_is_named(refused: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = refused(f"retrieval.port={port}")
    assert f"retrieval.port = {port}" in said
    assert "give another" in said


@pytest.mark.parametrize(
    ("retrieval", "said"),
    [
        (RetrievalConfig(), "retrieval.corpus = ''"),
        (RetrievalConfig(corpus="c", url=("http://x",)), "retrieval.url = 'http://x'"),
        (RetrievalConfig(corpus="c", recorded="/run"), "retrieval.recorded = '/run': that run's"),
        (RetrievalConfig(corpus="c", top_k=101), "retrieval.top_k = 101: at most 100"),
        (RetrievalConfig(corpus="c", encoder="e"), "retrieval.encoder = 'e': without"),
    ],
)
def test_settings_that_no_server_can_have_are_named(retrieval: RetrievalConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(Config(retrieval=retrieval))


@pytest.mark.parametrize("host", ["203.0.113.9", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"retrieval.host = {host!r}")):
        bind(host, 0)


def test_a_misspelled_key_is_named(refused: Callable[[str], str]) -> None:
    assert "retrieval.top_k" in refused("retrieval.tpo_k=3")


@pytest.mark.slow
def test_a_bad_line_of_the_corpus_is_named(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "contents": "b"}\n{"id": "b"}\n')
    process = run(f"retrieval.corpus={bad}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"{bad}:2: field 'contents' is missing" in said


@pytest.mark.slow
def test_a_dense_index_is_served(run: Run, tmp_path: Path) -> None:
    encoder = Encoder(make_encoder(tmp_path / "encoder"))
    build_dense(tmp_path / "corpus.jsonl", tmp_path / "out", encoder, "Flat", 1, lambda *_: None)
    url = _url(run(f"retrieval.index={tmp_path / 'out'}", "retrieval.corpus="))
    body = {"queries": ["anything", "else"], "topk": 100, "return_scores": True}
    reply = httpx.post(f"{url}/retrieve", json=body, trust_env=False).json()
    assert [[hit["document"]["id"] for hit in row] for row in reply["result"]] == [["a"], ["a"]]
    info = httpx.get(f"{url}/info", trust_env=False).json()
    assert info["index"].startswith("faiss FlatIP, encoder ")


@pytest.mark.slow
def test_an_index_that_is_none_is_named(run: Run, tmp_path: Path) -> None:
    process = run(f"retrieval.index={tmp_path / 'none'}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "retrieval.index: " in said and "none' does not exist: name an index folder" in said
