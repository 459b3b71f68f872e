"""A model whose tags are several tokens trains twenty steps in each way of searching, and whatever
it is trained on went through its engine, id for id."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from actors.environments.search_r1 import STOP_TAGS
from actors.prompt import single_token_ids
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered
from replay.trajectory import Trajectory
from scripts.runs.books import Audit
from tests.integration.conftest import Run
from tests.integration.spelt import PLACES, Task
from tests.integration.test_run import scalars

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("environments")]
STEPS = 20


def trained(run: Run) -> Iterator[Trajectory]:
    """Every trajectory to train on that was delivered."""
    for record in read(run.run_dir / "events.log"):
        if isinstance(record, Delivered) and record.summary.kind == "train":
            yield decode_trajectory(record.payload)


def check_learnt(run: Run, model: Path) -> None:
    """Twenty steps were taken, most of them along a gradient, and the weights are others."""
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    norms = [point.value for point in scalars(run.run_dir).Scalars("learner/grad_norm")]
    assert len(norms) == STEPS and sum(norm > 0.0 for norm in norms) > STEPS // 2, norms
    end = run.run_dir / "checkpoints" / f"step-{STEPS}" / "model" / "model.safetensors"
    before, after = load_file(model / "model.safetensors"), load_file(end)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def check_audited(run: Run) -> None:
    """No record differed from what went through the policy, by the gauge, the summary and the
    log."""
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["token_mismatches"] == summary["lost_requests"] == 0
    gauge = [point.value for point in scalars(run.run_dir).Scalars("actor/token_mismatch")]
    assert set(gauge) == {0.0}
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.faults == [] and books.token_mismatches == 0


def check_varied(rollouts: list[Trajectory]) -> None:
    """Some answers are right and some wrong, and what is searched for is found."""
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    searches = [search for turn in turns for search in turn.searches]
    assert len(searches) >= 5  # it soon learns that answers are as often right without
    assert sum(search.status == "ok" for search in searches) > len(searches) // 2
    assert set(PLACES) & {name for search in searches for name in search.passage_ids}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "environment", [(), ("environment.name=tool_call",)], ids=["search_r1", "tool_call"]
)
def test_twenty_steps_are_trained_and_every_token_is_accounted_for(
    begin: Callable[[Path, list[str]], Run],
    bpe_task: Task,
    tmp_path: Path,
    environment: tuple[str, ...],
) -> None:
    run_dir = tmp_path / "run"
    overrides = [f"run_dir={run_dir}", *bpe_task.overrides, *environment]
    run = begin(run_dir, [str(bpe_task.config), *overrides])
    assert run.wait(800) == 0, "".join(run.lines) + run.logs()
    assert any("questions.train: left out, 1 of 9 rows" in line for line in run.lines)
    check_learnt(run, bpe_task.model)
    check_audited(run)
    check_varied(list(trained(run)))
    assert run.leftovers(5.0) == []


def test_the_model_s_tags_are_several_tokens_and_its_template_knows_tools(bpe_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe_model)
    assert single_token_ids(tokenizer, STOP_TAGS) is None
    assert all(len(tokenizer.encode(tag)) > 1 for tag in STOP_TAGS)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "who?"}, {"role": "tool", "content": "me"}],
        tools=[{"type": "function", "function": {"name": "search"}}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert '"name": "search"' in text and "<tool_response>\nme\n</tool_response>" in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
