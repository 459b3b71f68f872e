"""Evaluations of a real model through the real command: whole, in pieces, and of an average."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from configs.load import load, save
from configs.runtime.process import REPOSITORY
from learner import checkpoint
from scripts.demo.task import DemoFiles

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
QUESTIONS = 16
ENVIRONMENTS = ("search_r1", "no_search", "rag")
NOT_REPEATED = ("timing",)
Process = subprocess.Popen[str]
Start = Callable[..., Process]


class Copies:
    """A trainer whose weights and average are the demo's start."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def export(self, folder: Path) -> None:
        for part in ("model", "ema"):
            shutil.copytree(self.model, folder / part)


class Tokenizer:
    """What the model folder holds already."""

    def save_pretrained(self, folder: Path) -> None: ...


@pytest.fixture
def run(demo_files: DemoFiles, tmp_path: Path) -> Path:
    """A run of the demo with one checkpoint."""
    folder = tmp_path / "run"
    overrides = [
        f"run_dir={folder}",
        f"model.path={demo_files.model}",
        f"questions.train={demo_files.train}",
        f"questions.eval={demo_files.eval}",
        f"retrieval.corpus={demo_files.corpus}",
    ]
    config = load(REPOSITORY / "configs" / "demo.yaml", overrides)
    tokenizer: Any = Tokenizer()
    checkpoint.save(config, 3, Copies(demo_files.model), tokenizer)
    save(config, folder / "config.yaml")
    return folder


@pytest.fixture
def start(run: Path, demo_files: DemoFiles) -> Iterator[Start]:
    """start(out, *options): the command, evaluating the run; killed afterwards if it still goes."""
    processes: list[Process] = []

    def begin(out: Path, *options: str) -> Process:
        command = [sys.executable, "-m", "scripts.cli", "evaluate", str(run)]
        command += ["--sets", f"demo={demo_files.eval}", "--limit", str(QUESTIONS)]
        process = subprocess.Popen(
            [*command, "--out", str(out), *options],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def ended(process: Process, code: int = 0) -> str:
    """What it has printed."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output[-5000:]
    return output


def struck(process: Process, out: Path, rows: int, number: int) -> str:
    """Send the signal once so many rows are there; what it has printed, when nothing is left."""
    end = time.monotonic() + 400
    path = out / "rows.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < end
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert children and not alive
    return output


def scores(out: Path) -> dict[str, Any]:
    """Everything reported of each environment and set but what the machine has a part in."""
    methods = json.loads((out / "report.json").read_text())["methods"]
    return {
        method: {
            name: {key: value for key, value in figures.items() if key not in NOT_REPEATED}
            for name, figures in sets.items()
        }
        for method, sets in methods.items()
    }


def answers(out: Path) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    """What each rollout searched for, was shown, and answered."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return {
        (row["environment"], row["id"], row["sample"]): (
            row["answer"],
            *((search["query"], tuple(search["passage_ids"])) for search in row["searches"]),
        )
        for row in rows
    }


@pytest.mark.soak("evaluation")
@pytest.mark.timeout(1500)
def test_in_pieces_it_gives_the_numbers_that_it_gives_as_a_whole(
    start: Start, tmp_path: Path
) -> None:
    given = ("--exact", "--environment", *ENVIRONMENTS)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    printed = ended(start(whole, *given))
    assert "Exact match of run-step-3, greedy" in printed and "Details" in printed
    interrupted = start(pieces, *given)
    said = struck(interrupted, pieces, 2, signal.SIGINT)
    assert interrupted.returncode == 130 and "interrupted by SIGINT" in said
    assert "to go on: forage evaluate" in said
    struck(start(pieces, *given), pieces, 10, signal.SIGKILL)
    ended(start(pieces, *given))
    assert answers(pieces) == answers(whole) and len(answers(whole)) == 3 * QUESTIONS
    assert scores(pieces) == scores(whole)
    for method in ENVIRONMENTS:
        figures = scores(whole)[method]["demo"]
        assert figures["answered"] + figures["no_answer"] == figures["rows"] == QUESTIONS
    check_kept(start, whole, *given)


def check_kept(start: Start, out: Path, *given: str) -> None:
    """What is complete is shown again without an engine, and no other evaluation is mixed in."""
    report, rows = (out / "report.json").read_bytes(), (out / "rows.jsonl").read_bytes()
    ended(start(out, *given))
    said = ended(start(out, *given, "seed=5"), 2)
    assert "holds another evaluation: seed = 0 there, 5 here" in said
    assert (out / "report.json").read_bytes() == report
    assert (out / "rows.jsonl").read_bytes() == rows


@pytest.mark.timeout(800)
def test_samples_of_an_average_are_counted_question_by_question(
    start: Start, run: Path, tmp_path: Path
) -> None:
    out, report = tmp_path / "out", tmp_path / "ema.json"
    options = ("--weights", "ema", "--temperature", "1", "--samples", "4", "--json", str(report))
    printed = ended(start(out, *options))
    assert "Exact match (Avg@4) of run-step-3-ema, T = 1" in printed
    assert "WARNING" not in printed and "WARNING" in (out / "engine.log").read_text()
    found = json.loads(report.read_text())
    assert found["model"] == str(run / "checkpoints" / "step-3" / "ema")
    (figures,) = found["methods"]["search_r1"].values()
    score = {name: each["mean"] for name, each in figures["scores"].items()}
    assert figures["rows"] == 4 * QUESTIONS and figures["failed"] == 0
    assert score["em"] <= score["pass@2"] <= score["pass@4"]
    assert len({answer[:1] for answer in answers(out).values()}) > 1


@pytest.mark.soak("evaluation")
@pytest.mark.timeout(1500)
def test_two_engines_share_the_work_and_two_checkpoints_are_compared(
    start: Start, run: Path, tmp_path: Path
) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(run / "checkpoints" / "step-3", other)
    (file,) = (other / "model").glob("*.safetensors")
    weights = {name: each + 0.02 for name, each in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    printed = ended(start(out, "--exact", "--engines", "2", "--against", str(other)))
    assert "run-step-3 against other" in printed and "difference" in printed
    alone = tmp_path / "alone"
    ended(start(alone, "--exact", "--engines", "1"))
    assert answers(alone) == answers(out), "whichever engine rolls out"
    assert scores(alone) == scores(out)
    report = json.loads((out / "report.json").read_text())
    (pair,) = report["against"]["methods"]["search_r1"].values()
    assert pair["questions"] == QUESTIONS and pair["left_out"] == 0
    for side, folder in (("here", out), ("there", out / "against")):
        assert scores(folder)["search_r1"]["demo"]["scores"]["em"]["mean"] == pair["em"][side]
