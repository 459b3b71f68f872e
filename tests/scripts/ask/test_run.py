"""The command itself: a real model and a real server, searched over a real corpus; how it ends."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from actors.prompt import Prompter
from configs.load import save
from configs.retrieval import RetrievalConfig
from configs.runtime.process import REPOSITORY, Exit
from configs.schema import ActorsConfig, Config, ModelConfig, QuestionsConfig
from learner import checkpoint
from replay.trajectory import Question
from retrieval_server.protocol import Passage
from tests.scripts.ask.asking import Endpoint, endpoint, event, stream
from tests.scripts.terminals import run_in_terminal

pytestmark = pytest.mark.slow
QUESTION = "what is the mayor of bore ?"
SEARCH, ANSWER = "<search> mayor of bore </search>", "<answer> kelu </answer>"
CORPUS = {
    "p0": "kelu\ntry again .",
    "p1": "bore\nthe mayor of bore is kelu .",
    "p2": "try\nwhat is invalid ?",
}


def passage() -> Passage:
    return Passage("p1", CORPUS["p1"], 1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run's configuration, for the word tokenizer, over CORPUS."""
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = (json.dumps({"id": id, "contents": contents}) for id, contents in CORPUS.items())
    corpus.write_text("\n".join(rows) + "\n")
    return Config(
        model=ModelConfig(dtype="float32", max_model_len=128),
        questions=QuestionsConfig(prompt="{question}"),
        retrieval=RetrievalConfig(corpus=str(corpus), top_k=1),
        actors=ActorsConfig(
            max_turns=2,
            max_action_tokens=20,
            passage_template="{text} ",
            observation_template=" <information> {passages} </information> ",
            correction="try again .",
        ),
    )


@pytest.fixture(scope="module")
def run(config: Config, word_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best checkpoint has learnt by heart to search for the answer and to give it."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "checkpoints" / "step-1" / "model"
    prompter = Prompter(word_tokenizer, config.questions, config.actors)
    pieces = [
        prompter.question(Question("q", QUESTION, ())),
        word_tokenizer.encode(SEARCH),
        prompter.observation([passage()]),
        word_tokenizer.encode(ANSWER),
    ]
    learn(np.concatenate(pieces).astype(np.int64), word_tokenizer, path)
    named = msgspec.structs.replace(config.model, path=str(path))
    of_run = msgspec.structs.replace(config, model=named)
    save(of_run, folder / "config.yaml")
    manifest = msgspec.json.encode(checkpoint.Manifest.of(of_run, 1, 1))
    (path.parent / checkpoint.MANIFEST).write_bytes(manifest)
    (folder / "checkpoints" / checkpoint.BEST).symlink_to("step-1")
    return folder


def learn(ids: Any, tokenizer: Any, path: Path) -> None:
    """Save a model that says these tokens int64[T]. (transformers takes whatever tokenizer lies
    beside a Qwen2 for Qwen2's.)"""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model, row = LlamaForCausalLM(shape), torch.from_numpy(ids)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(80):
        optimizer.zero_grad()
        model(input_ids=row, labels=row).loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@asynccontextmanager
async def asking(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, running."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scripts.cli",
        "ask",
        *words,
        cwd=REPOSITORY,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process, typed: str = "") -> tuple[str, str]:
    """What it has said, on standard output and error, when it has ended; without the progress that
    it shows where a busy machine makes it start slowly.
    """
    out, err = await process.communicate(typed.encode())
    assert "Traceback" not in err.decode()
    lines = err.decode().splitlines(keepends=True)
    return out.decode(), "".join(line for line in lines if not line.startswith("making ready ("))


def at(server: Endpoint, run: Path) -> list[str]:
    """The words that ask this server with the run's configuration and tokenizer."""
    return [server.url, QUESTION, "--config", str(run / "config.yaml")]


async def first_answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Ask once; the line that comes."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{QUESTION}\n".encode())
    answer: dict[str, Any] = json.loads(await process.stdout.readline())
    return answer


async def test_a_run_searches_a_real_server_and_answers_programs(run: Path) -> None:
    async with asking(str(run), "--json") as process:
        out, err = await ended(process, f"{QUESTION}\n\n{QUESTION}\n")
    assert process.returncode == 0
    assert all(line.startswith("making ready") for line in err.splitlines())  # on a slow machine
    first, second = map(json.loads, out.splitlines())
    assert (first["answer"], first["stop_reason"]) == ("kelu", "answered")
    assert [turn["text"] for turn in first["turns"]] == [SEARCH, ANSWER]
    assert first["turns"][0]["searches"][0]["passages"] == ["p1"]
    assert first["passages"] == [{"id": "p1", "title": "bore", "text": passage().text}]
    assert second["turns"][1] == first["turns"][1]


@pytest.mark.soak("commands")
def test_a_file_gets_the_answer_that_a_terminal_asked_for(run: Path, tmp_path: Path) -> None:
    words = ["-m", "scripts.cli", "ask", str(run), "--json", QUESTION]
    code, told = run_in_terminal(words, out=tmp_path / "o.json")
    assert (code, json.loads((tmp_path / "o.json").read_text())["answer"]) == (0, "kelu")
    assert "making ready" in told and "kelu" not in told


@pytest.mark.soak("commands")
async def test_a_question_that_is_too_long_fails_alone(run: Path) -> None:
    async with asking(str(run), "bore " * 200, QUESTION, "--json") as process:
        out, err = await ended(process)
    long, fine = map(json.loads, out.splitlines())
    assert long["question"].startswith("bore bore") and "raise model.max_model_len" in long["error"]
    assert fine["answer"] == "kelu"
    assert process.returncode == Exit.FAILED and "forage: question 'asked-1' takes 20" in err


@pytest.mark.soak("commands")
async def test_a_person_reads_searches_passages_and_the_answer(run: Path) -> None:
    async with asking(str(run), QUESTION) as process:
        out, _ = await ended(process)
    question, search, *panel, said, answer, numbers = out.splitlines()
    assert (question, search, said, answer) == (QUESTION, SEARCH, ANSWER, "kelu")
    assert "mayor of bore" in panel[0] and passage().text in "".join(panel)
    assert numbers.startswith("1 search, 8 tokens, ")


@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak("commands"))],
)
async def test_interrupted_it_ends_and_its_server_with_it(run: Path, signal_number: int) -> None:
    async with asking(str(run), "--json") as process:
        assert (await first_answer(process))["answer"] == "kelu"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal_number)
        await process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 30)
    assert process.returncode == Exit.INTERRUPTED
    assert children and not alive


@pytest.mark.soak("commands")
async def test_killed_it_takes_its_server_with_it(run: Path) -> None:
    async with asking(str(run), "--json") as process:
        await first_answer(process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        await process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 30)
    assert children and not alive


async def test_a_model_behind_a_server_is_asked_in_tokens(run: Path, word_tokenizer: Any) -> None:
    replies = [
        stream(event(text, "stop", token_ids=word_tokenizer.encode(text), stop_reason=None))
        for text in (SEARCH, ANSWER)
    ]
    async with endpoint(*replies) as server, asking(*at(server, run), "--json") as process:
        out, err = await ended(process)
    assert (process.returncode, err, json.loads(out)["answer"]) == (0, "", "kelu")
    first, second = (body["prompt"] for body in server.bodies)
    assert first == word_tokenizer.encode(QUESTION)
    observed = word_tokenizer.encode(f"<information> {passage().text} </information>")
    assert second == [*first, *word_tokenizer.encode(SEARCH), *observed]


@pytest.mark.soak("commands")
async def test_interrupted_while_a_server_is_silent_it_ends(run: Path) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def never(writer: asyncio.StreamWriter) -> None:
        asked.set()
        await left.wait()

    async with endpoint(never) as server, asking(*at(server, run)) as process:
        await asked.wait()
        process.send_signal(signal.SIGINT)
        await ended(process)
        left.set()
    assert process.returncode == Exit.INTERRUPTED


@pytest.mark.soak("commands")
async def test_a_server_that_refuses_is_one_line(run: Path) -> None:
    async with endpoint() as server:
        pass
    async with asking(*at(server, run)) as process:
        _, err = await ended(process)
    assert process.returncode == Exit.FAILED
    (line,) = err.splitlines()
    assert line.startswith(f"forage: {server.url}/v1: no connection") and "start the server" in line


@pytest.mark.soak("commands")
async def test_a_retrieval_server_that_is_not_there_is_one_line(run: Path) -> None:
    async with endpoint() as server:
        pass
    async with asking(str(run), QUESTION, "--retrieval", server.url) as process:
        _, err = await ended(process)
    assert process.returncode == Exit.FAILED
    (line,) = err.splitlines()
    assert line.startswith(f"forage: a search at retrieval.url = '{server.url}' failed: ")


@pytest.mark.soak("commands")
async def test_a_model_that_cannot_be_loaded_is_bad_input(run: Path, tmp_path: Path) -> None:
    for file in (run / "checkpoints" / "best" / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    words = (str(tmp_path), QUESTION, "--config", str(run / "config.yaml"))
    async with asking(*words) as process:
        _, err = await ended(process)
    assert process.returncode == Exit.BAD_INPUT
    assert err.startswith(f"forage: model.path = '{tmp_path}' cannot be loaded: ")
