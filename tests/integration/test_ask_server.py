"""Models behind vLLM's own OpenAI-compatible server answer as the same models do in process."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.policies.engine import prepare_environment
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.demo.task import DemoFiles
from scripts.fleet import guardian
from tests.integration.spelt import PLACES, Task

pytestmark = [pytest.mark.soak("evaluation"), pytest.mark.vllm, pytest.mark.timeout(1500)]
READY_S, ANSWER_S, LEAVE_S = 300.0, 200.0, 30.0


@contextmanager
def serving(model: Path, length: int, log: Path) -> Iterator[str]:
    """The URL of a vLLM server of a model, as its users start one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; that looks for a package named vllm: the CPU's has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32", "--max-model-len", str(length), "--max-num-seqs", "4"]
    command += ["--enforce-eager", "--port", str(port), "--host", "127.0.0.1"]
    token, sockets = f"{log.parent.name}-{port}", log.with_name("sockets")
    scratch = tempfile.TemporaryDirectory(prefix="ask-", dir="/tmp")  # what vLLM leaves lying
    with pytest.MonkeyPatch.context() as environment, log.open("wb") as out:
        places = dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH"), scratch.name)
        environment.setattr(os, "environ", os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"} | places)
        prepare_environment(Config())
        environment.setenv(guardian.TOKEN, token)
        watcher = guardian.start(token, sockets)  # nothing of it outlives these tests
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=out, stderr=out, env=os.environ, start_new_session=True
        )
    try:
        end = time.monotonic() + READY_S
        while not _answers(f"http://127.0.0.1:{port}"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()
        process.wait()
        scratch.cleanup()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK
    except httpx.RequestError:
        return False


def ask(target: str, *words: str) -> list[dict[str, Any]]:
    """What the command prints with --json, but the seconds it took."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "ask", target, "--json", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    for record in records:
        del record["seconds"]
        for turn in record["turns"]:
            for search in turn["searches"]:
                del search["seconds"]
    return records


def test_it_searches_as_in_process(demo_files: DemoFiles, tmp_path: Path) -> None:
    rows = map(json.loads, demo_files.eval.read_text().splitlines()[:6])
    words = ["--config", "configs/demo.yaml", f"retrieval.corpus={demo_files.corpus}"]
    words.append("environment.name=rag")  # the starting policy itself need not search
    words += [row["question"] for row in rows]
    with serving(demo_files.model, 512, tmp_path / "log") as url:
        there = ask(url, "--tokenizer", str(demo_files.model), *words)
    assert len(there) == 6 and there == ask(str(demo_files.model), *words)
    assert any(record["searches"] and record["answer"] for record in there)


def test_tags_of_several_tokens_end_as_in_process(bpe_task: Task, tmp_path: Path) -> None:
    words = ["--config", str(bpe_task.config), f"retrieval.corpus={bpe_task.corpus}"]
    words += [f"who is the mayor of {place}?" for place in PLACES[:3]]
    with serving(bpe_task.model, 1024, tmp_path / "log") as url:
        there = ask(url, "--tokenizer", str(bpe_task.model), *words)
    assert there == ask(str(bpe_task.model), *words)
    assert len(there) == 3 and all(record["answer"] for record in there)
    assert there[0]["turns"][-1]["text"].endswith(" </answer>")
