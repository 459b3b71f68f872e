"""The notebooks run from the first cell to the last, and say what they promise."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.runtime.process import REPOSITORY
from tests.scripts.conftest import RecordedRun, make_recorded_run

__all__ = ["make_recorded_run"]  # a fixture

BOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))
DEMO, REWARDS = (book.stem for book in BOOKS)
FEW = ("replay.groups_per_step=2", "replay.group_size=4", "replay.drop_no_signal=false")


def cells(name: str) -> list[dict[str, Any]]:
    text = (REPOSITORY / "docs" / "notebooks" / f"{name}.ipynb").read_text()
    found: list[dict[str, Any]] = json.loads(text)["cells"]
    return found


def executed(name: str, parameters: str = "") -> str:
    """What a notebook prints; `parameters` take the place of its own."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(REPOSITORY / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    for cell in book.cells:
        if parameters and "parameters" in cell.metadata.get("tags", ()):
            cell.source = parameters
    where = {"metadata": {"path": str(REPOSITORY)}}
    NotebookClient(book, timeout=1500, kernel_name="python3", resources=where).execute()
    outputs = [said for cell in book.cells for said in cell.get("outputs", ())]
    return "".join(said.text for said in outputs if said.output_type == "stream")


@pytest.mark.parametrize("name", [DEMO, REWARDS])
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
    assert sum("parameters" in cell["metadata"].get("tags", ()) for cell in code) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loop_takes_a_step() -> None:
    words = [*FEW, "learner.lr=1e-3", "learner.warmup_steps=0"]
    said = executed(DEMO, f"STEPS, QUESTIONS, SEED = 1, 4, 0\nOVERRIDES = {words}")
    assert re.findall(r"^step (\d): \{'em'", said, re.M) == ["0", "1"]
    assert "step 1/1  loss" in said and "  wrote: " in said


@pytest.mark.slow
def test_the_rewards_of_a_small_run_are_told(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = make_recorded_run()
    for step in range(3):
        run.train(step)
    run.log.close()
    said = executed(REWARDS, f'RUN = "{run.path}"')
    assert "rollouts of 3 steps" in said and "last third: " in said


@pytest.mark.soak("notebooks")
@pytest.mark.timeout(1800)
def test_the_loop_learns() -> None:
    said = executed(DEMO)
    start, end = map(float, re.findall(r"^step \d+: \{'em': ([\d.]+)", said, re.M))
    assert end > start + 0.3, said[-2000:]


@pytest.mark.soak("notebooks")
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_the_rewards_of_the_demo_say_when_it_learned_to_search(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    demo = [str(Path(sys.executable).with_name("forage")), "demo", f"run_dir={run_dir}"]
    fewer = ["learner.total_steps=20", "questions.eval_limit=20"]
    subprocess.run([*demo, *fewer], cwd=REPOSITORY, check=True, capture_output=True)
    said = executed(REWARDS, f'RUN = "{run_dir}"')
    assert "rollouts of 20 steps" in said and re.search(r"^since step \d+$", said, re.M)
