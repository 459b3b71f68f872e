"""The examples on published libraries of agents, pinned, each in an environment of its own, on the
chat template of a real model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from actors.errors import GenerationFailed, ProgramFailed
from actors.gateway.protocol import Refused
from actors.policies.base import Completion
from configs.environment import ProgramConfig
from replay.trajectory import StopReason, Trajectory
from retrieval_server.protocol import Passage, RetrievalUnavailable
from scripts.ask.dry_run import Said
from tests.actors.conftest import PASSAGES
from tests.actors.environments.test_templates import model, prompter_of
from tests.actors.environments.test_tool_call import call
from tests.actors.gateway.test_rollout import EXAMPLES, Reader, Stage
from tests.pip_environments import environment_of

assert model  # the fixture: a tokenizer with a real template

PINS = {
    "search_with_smolagents": ("openai==3.57.0", "smolagents==1.26.0"),
    "verifiers_environment": ("openai==3.57.0", "verifiers==0.2.1"),
}
SEARCH, FOUND = f"I search. {call(query='mayor of bore')}", "\n".join(p.text for p in PASSAGES[:3])
LONG = [Passage("p0", "bore " * 8000, 1.0)]
Program = Callable[[str], ProgramConfig]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("model", ["qwen2_5"], indirect=True),
]


@dataclass
class Caller(Reader):
    """A policy that searches by a call, and says its last words once it has read what was found."""

    last: str = ""

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        if self.prompts and self.error is not None:
            raise self.error
        self.prompts.append(self.prompter.decode(tokens))
        said = self.last if self.last and FOUND in self.prompts[-1] else SEARCH
        return await Said(self.prompter, lambda _: said).complete(tokens, **sampling)


@pytest.fixture(scope="module")
def program() -> Program:
    """program(example): the example's command, on a Python that has what it imports."""

    def made(name: str) -> ProgramConfig:
        python = environment_of(name, PINS[name])
        return ProgramConfig(command=(str(python), str(EXAMPLES / f"{name}.py")))

    return made


@pytest.fixture
def stage(model: Any, tmp_path: Path) -> Stage:
    """A stage with the tokenizer of the template, and a policy that calls tools."""
    prompter = prompter_of(model)
    return Stage(prompter, tmp_path, Caller(prompter))


async def play(stage: Stage, program: ProgramConfig, last: str = "", **more: Any) -> Trajectory:
    stage.policy = Caller(stage.prompter, error=stage.policy.error, last=last)
    return await stage.play(program, **{"max_model_len": 6000} | more)


def searched_once(stage: Stage, trajectory: Trajectory) -> None:
    """The search is on record, and the policy has read what it found."""
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "kelu")
    assert [len(turn.searches) for turn in trajectory.turns] == [1, 0]
    assert stage.retriever.queries == ["mayor of bore"]
    first, last = stage.policy.prompts
    assert "mayor of bore ?" in first and '"name": "search"' in first and FOUND not in first
    assert FOUND in last and not any(turn.malformed for turn in trajectory.turns)


async def test_smolagents_answers(stage: Stage, program: Program) -> None:
    answer = call(name="final_answer", answer="kelu")
    played = await play(stage, program("search_with_smolagents"), answer)
    searched_once(stage, played)
    assert played.reward == 1.0
    assert [len(each.turns) for each in played.sequences] == [1, 1]  # it rewrites its history
    assert "Calling tools:" in stage.policy.prompts[1]


async def test_smolagents_comes_to_no_answer(stage: Stage, program: Program) -> None:
    asked = program("search_with_smolagents")
    played = await play(stage, asked)
    assert (played.stop_reason, played.reward) == (StopReason.UNANSWERED, 0.0)
    assert len(played.turns) == 7 and len(stage.retriever.queries) == 6  # asked for an end at last
    stage.policy.error = GenerationFailed("aborted")
    with pytest.raises(GenerationFailed, match="aborted"):
        await play(stage, asked)
    stage.policy.error = Refused("no such field")
    with pytest.raises(ProgramFailed, match="no such field"):
        await play(stage, asked)
    stage.policy.error, stage.retriever.passages = None, LONG
    full = await play(stage, asked)
    assert (full.stop_reason, len(full.turns)) == (StopReason.CONTEXT_LIMIT, 1)


REWARDED = {"em": 0.0, "environment": 1.0}


@pytest.mark.soak("examples")
async def test_verifiers_rewards(stage: Stage, program: Program) -> None:
    asked = program("verifiers_environment")
    played = await play(stage, asked, "So <answer>kelu</answer>", **REWARDED)
    searched_once(stage, played)
    assert played.reward == 1.0 and played.turns[-1].reward == 1.0
    assert [len(each.turns) for each in played.sequences] == [2]
    played = await play(stage, asked, "So <answer>bore</answer>", **REWARDED)
    assert (played.answer, played.reward, played.turns[-1].reward) == ("bore", 0.0, 0.0)


@pytest.mark.soak("examples")
async def test_verifiers_comes_to_no_answer(stage: Stage, program: Program) -> None:
    asked = program("verifiers_environment")
    played = await play(stage, asked, **REWARDED)
    assert (played.stop_reason, played.reward) == (StopReason.UNANSWERED, 0.0)
    (sequence,) = played.sequences
    assert len(sequence.turns) == 6 and len(stage.retriever.queries) == 5
    stage.retriever.error = RetrievalUnavailable("down")
    with pytest.raises(RetrievalUnavailable, match="down"):
        await play(stage, asked, **REWARDED)
    stage.policy.error, stage.retriever.error = GenerationFailed("aborted"), None
    with pytest.raises(GenerationFailed, match="aborted"):
        await play(stage, asked, **REWARDED)
    stage.policy.error, stage.retriever.passages = None, LONG
    full = await play(stage, asked, **REWARDED)
    assert (full.stop_reason, len(full.turns)) == (StopReason.CONTEXT_LIMIT, 1)
    assert full.turns[0].reward == 0.0  # its rubric's, which knows that the context is full
