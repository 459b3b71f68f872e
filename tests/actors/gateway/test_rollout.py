"""A program's rollout: its record, whose fault its end is, and what it cannot do to others."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from actors.errors import GenerationFailed, ProgramFailed, TooManyCalls
from actors.gateway import merging
from actors.gateway.protocol import Refused, TooLong
from actors.gateway.rollout import ProgramRollouts, recorded
from actors.policies.base import Completion, Stops
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from configs.environment import EnvironmentConfig, GatewayConfig, ProgramConfig
from configs.retrieval import RetrievalConfig
from configs.rewards import RewardsConfig, RewardWeights
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, Config, ModelConfig
from replay.codec import MAX_TEXT_CHARS, decode_trajectory, encode_trajectory
from replay.protocol import Lease
from replay.trajectory import StopReason, Trajectory
from retrieval_server.protocol import Passage, RetrievalUnavailable
from scripts.ask.dry_run import Said
from tests.actors.conftest import QUESTION, FixedRetriever, make_lease
from tests.actors.gateway.conftest import all_verified

EXAMPLES = REPOSITORY / "examples"
SEARCHING, NOTE = "<search> mayor of bore </search>", "<think> capital bore </think>"
PREAMBLE = """
import json, os, sys, time, urllib.error, urllib.request

def post(path, key=None, **fields):
    headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:  # the reply came before all was sent
        return 413

def ask(text="who ?", **more):
    return post("/completions", prompt=text, **more)

def answer(question):
"""


@dataclass
class Reader:
    """A policy that searches first, notes what it has read where it may, and answers."""

    prompter: Prompter
    error: Exception | None = None
    prompts: list[str] = field(default_factory=list)
    silent: tuple[int, ...] = ()  # the prompts, counted from 1, that it never completes

    async def complete(self, tokens: Any, *, stops: Stops, **sampling: Any) -> Completion:
        if self.error is not None:
            raise self.error
        self.prompts.append(self.prompter.decode(np.asarray(tokens)))
        if len(self.prompts) in self.silent:
            await asyncio.sleep(60)
        read, said = self.prompts[-1].rpartition("Question:")[2], SEARCHING
        if "of xanu ?" in read:
            said = NOTE if "<information>" in read else "<search> capital of xanu </search>"
        elif "it is kelu" in read:
            said = "<answer> kelu </answer>"
        elif "<information>" in read:
            said = "<think> it is kelu </think> and so <answer> kelu </answer>"
        text = Said(self.prompter, lambda _: said)
        return await text.complete(tokens, stops=stops, **sampling)


def config_of(
    program: ProgramConfig,
    calls: int = 256,
    searches: int = 128,
    max_model_len: int = 2000,
    **weights: float,
) -> Config:
    return Config(
        model=ModelConfig(max_model_len=max_model_len),
        actors=ActorsConfig(max_action_tokens=400),
        environment=EnvironmentConfig(
            name="program", program=program, gateway=GatewayConfig(calls=calls, searches=searches)
        ),
        retrieval=RetrievalConfig(top_k=2, url=("http://127.0.0.1:1",)),
        rewards=RewardsConfig(weights=RewardWeights(**weights)),
    )


@dataclass
class Stage:
    """Rolls leases out by programs, on a policy and a retriever of its own."""

    prompter: Prompter
    folder: Path
    policy: Reader
    retriever: FixedRetriever = field(default_factory=FixedRetriever)

    def function(self, body: str, **settings: Any) -> ProgramConfig:
        """A function with this body; `ask`, `post` and `question` are at hand."""
        path = self.folder / f"agent{len(list(self.folder.iterdir()))}.py"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        path.write_text(PREAMBLE + lines)
        return ProgramConfig(entry_point=f"{path}:answer", **{"grace_s": 0.2, **settings})

    @asynccontextmanager
    async def rolling(self, program: ProgramConfig, **more: Any) -> AsyncIterator[ProgramRollouts]:
        config = config_of(program, **more)
        async with (
            Rewards.open(config) as rewards,
            ProgramRollouts.open(
                config,
                policy=self.policy,
                prompter=self.prompter,
                rewards=rewards,
                actor_id="actor-0",
                verified=all_verified,
            ) as rollouts,
        ):
            yield rollouts

    async def play(
        self, program: ProgramConfig | str, lease: Lease | None = None, **more: Any
    ) -> Trajectory:
        program = self.function(program) if isinstance(program, str) else program
        async with self.rolling(program, **more) as rollouts:
            trajectory = await rollouts.roll(lease or make_lease(), self.retriever)
        assert decode_trajectory(encode_trajectory(trajectory)).answer == trajectory.answer
        return trajectory


@pytest.fixture
def stage(prompter: Prompter, tmp_path: Path) -> Stage:
    """A stage with the byte-level tokenizer."""
    return Stage(prompter, tmp_path, Reader(prompter))


Given = Callable[[Path], ProgramConfig]
BY_EXAMPLE: dict[str, Given] = {
    "search_with_openai": lambda path: ProgramConfig(entry_point=f"{path}:answer"),
    "search_r1_infer": lambda path: ProgramConfig(command=(sys.executable, str(path))),
}


@pytest.mark.parametrize("name", BY_EXAMPLE)
async def test_a_program_that_searches_has_one_whole_sequence(stage: Stage, name: str) -> None:
    trajectory = await stage.play(BY_EXAMPLE[name](EXAMPLES / f"{name}.py"))
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "kelu")
    assert trajectory.reward == 1.0 and trajectory.reward_parts == {"em": 1.0}
    (sequence,) = trajectory.sequences
    first, last = sequence.turns
    (search,) = first.searches
    assert search.query == "mayor of bore" and stage.retriever.queries == ["mayor of bore"]
    assert not last.searches and last.ended_at >= first.ended_at > 0
    read = stage.prompter.decode(sequence.tokens)
    assert stage.policy.prompts[0].endswith(QUESTION.text) or "Question:" in read
    assert SEARCHING in read and "the mayor of bore is a ." in read and "</answer>" in read
    assert trajectory.timings["total_s"] > 0 and trajectory.timings["retrieve_s"] >= 0


@dataclass
class Refusing(Reader):
    """A policy of which all calls but the first are refused."""

    why: Refused = field(default_factory=lambda: Refused("no such field"))

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        self.error = self.why if self.prompts else None
        return await super().complete(tokens, **sampling)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["search_with_openai", "summarise_half_way"])
async def test_a_full_context_is_no_answer_and_another_refusal_a_fault(
    stage: Stage, name: str
) -> None:
    program = ProgramConfig(entry_point=f"{EXAMPLES / name}.py:answer")
    stage.policy = Refusing(stage.prompter, why=TooLong("no room", "prompt", 2000))
    trajectory = await stage.play(program)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.CONTEXT_LIMIT, 1)
    stage.policy = Refusing(stage.prompter)
    with pytest.raises(ProgramFailed, match="no such field"):
        await stage.play(program)


@pytest.mark.slow
async def test_one_that_summarises_half_way_has_two(stage: Stage) -> None:
    path = EXAMPLES / "summarise_half_way.py"
    asked = replace(QUESTION, text="what is the mayor of the capital of xanu ?")
    program = ProgramConfig(entry_point=f"{path}:answer")
    trajectory = await stage.play(program, lease=make_lease(question=asked))
    assert trajectory.answer == "kelu" and trajectory.reward == 1.0
    assert [(each.name, len(each.turns)) for each in trajectory.sequences] == [("", 2), ("2", 3)]
    second = stage.prompter.decode(trajectory.sequences[1].prompt_tokens)
    assert second == "what is the mayor of bore ?"
    assert [len(turn.searches) for turn in trajectory.turns] == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("search_with_openai", 40),
        ("search_with_smolagents", 45),
        ("summarise_half_way", 60),
        ("search_r1_infer", 60),
        ("verifiers_environment", 60),
    ],
)
def test_an_example_is_short(name: str, most: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most


async def test_it_is_told_the_question_and_may_reward_itself(stage: Stage) -> None:
    body = "ask()\nreturn {'answer': question['answers'][0], 'reward': 0.25}"
    trajectory = await stage.play(body, em=0.0, environment=2.0)
    assert trajectory.reward == 0.5 and trajectory.reward_parts == {"em": 1.0, "environment": 0.25}
    assert trajectory.turns[0].reward == 0.25
    posted = "ask()\npost('/result', answer='no', reward=1.5)\nraise RuntimeError('too late')"
    trajectory = await stage.play(posted, em=0.0, environment=1.0)
    assert (trajectory.answer, trajectory.reward) == ("no", 1.5)


async def test_no_answer_is_the_policy_s_doing(stage: Stage) -> None:
    trajectory = await stage.play("ask()")
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.UNANSWERED, None)
    assert trajectory.reward == 0.0


async def test_too_many_calls_are_refused_and_the_rollout_ends_by_that_name(stage: Stage) -> None:
    trajectory = await stage.play("while isinstance(ask(), dict): pass", calls=3)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TURN_LIMIT, 3)
    assert len(trajectory.sequences) == 3


async def test_a_context_that_is_full_is_another_end(stage: Stage) -> None:
    trajectory = await stage.play("ask()\nask('who ? ' * 1000)")
    assert trajectory.stop_reason is StopReason.CONTEXT_LIMIT and len(trajectory.turns) == 1


async def test_calls_that_no_record_could_hold_are_such_an_end_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "MOST_BYTES", 2000)
    trajectory = await stage.play("while isinstance(ask(), dict): pass")
    assert trajectory.stop_reason is StopReason.TURN_LIMIT and 1 <= len(trajectory.turns) < 4
    with pytest.raises(TooManyCalls, match=r"no record holds what the program did: .*answer"):
        recorded(replace(trajectory, answer="x" * (MAX_TEXT_CHARS + 1)))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "raise RuntimeError('boom')",
            r"^environment\.program\.entry_point = '.*/agent0\.py:answer': the program ended with "
            r"exit status 1: RuntimeError: boom \(agent0\.py:19\): correct it$",
        ),
        ("ask()\nos._exit(7)", r"exit status 7: correct it, or set environment\.program\.failures"),
        ("return 'kelu'", "the program ended well, without one completed call of the policy"),
        ("ask()\nreturn {'anwser': 'kelu'}", "its last line is no result"),
        ("ask()\nreturn {'reward': 1e300}", r"no result .*<= 1000000000.*reward"),
    ],
)
async def test_a_program_that_fails_is_a_failed_lease(stage: Stage, body: str, said: str) -> None:
    async with stage.rolling(stage.function(body)) as rollouts:
        with pytest.raises(ProgramFailed, match=said) as failed:
            await rollouts.roll(make_lease(), stage.retriever)
        assert ("boom" in failed.value.errors) == ("boom" in body)
        assert rollouts.gauges()["actor/programs_failed_total"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("body", ["ask()\nraise RuntimeError('boom')", "ask()\ntime.sleep(60)"])
async def test_its_failures_are_scored_where_that_is_wanted(stage: Stage, body: str) -> None:
    late = {"deadline_s": 4.0}
    with pytest.raises(ProgramFailed):
        await stage.play(stage.function(body, **late))
    trajectory = await stage.play(stage.function(body, failures="score", **late))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.UNANSWERED, 0.0)
    with pytest.raises(ProgramFailed, match="without one completed call"):
        await stage.play(stage.function("1 / 0", failures="score"))


async def test_what_the_engine_fails_at_is_never_the_program_s_fault(stage: Stage) -> None:
    stage.policy.error = GenerationFailed("aborted")
    for body in ("ask()", "raise RuntimeError(ask())"):
        with pytest.raises(GenerationFailed, match="aborted"):
            await stage.play(stage.function(body, failures="score"))


class FailsOnce(Reader):
    """Its first completion fails."""

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        self.error = None if self.error else GenerationFailed("aborted")
        return await super().complete(tokens, **sampling)


async def test_what_a_later_call_has_made_good_is_no_fault_any_more(stage: Stage) -> None:
    again = "assert ask() == 503 and isinstance(ask(), dict)\n"
    stage.policy = FailsOnce(stage.prompter)
    with pytest.raises(ProgramFailed, match="boom"):
        await stage.play(again + "raise RuntimeError('boom')")
    trajectory = await stage.play(again + "return {'reward': 0.5}", em=0.0, environment=1.0)
    assert trajectory.reward == 0.5


async def test_a_reward_is_a_result_whatever_failed_before(stage: Stage) -> None:
    body = "ask()\npost('/retrieve', query='a')\nreturn {'reward': 0.5}"
    stage.retriever.error = RetrievalUnavailable("down")
    assert (await stage.play(body, em=0.0, environment=1.0)).reward == 0.5


IN_VAIN = "import socket\nask()\nsocket.setdefaulttimeout(0.3)\n"
IN_VAIN += "try: ask()\nexcept TimeoutError: pass\nsocket.setdefaulttimeout(30)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("ask()\nask()", "the program took over 2 s"),
        ("ask()\nask(stream=True)", "the program took over 2 s"),
        (f"{IN_VAIN}raise RuntimeError('boom')", "exit status 1: RuntimeError: boom"),
    ],
)
async def test_nor_is_an_engine_that_does_not_answer(stage: Stage, body: str, how: str) -> None:
    stage.policy.silent = (2,)
    program = stage.function(body, deadline_s=2.0, failures="score")
    with pytest.raises(ProgramFailed, match=how) as raised:
        await stage.play(program)
    assert str(raised.value).endswith("with a call or a search that was not answered")


async def test_what_is_answered_later_is_answered(stage: Stage) -> None:
    stage.policy.silent = (2,)
    body = f"{IN_VAIN}ask()\nraise RuntimeError('boom')"
    trajectory = await stage.play(stage.function(body, failures="score"))
    assert (trajectory.reward, len(trajectory.turns)) == (0.0, 2)


async def test_nor_is_what_retrieval_fails_at(stage: Stage) -> None:
    stage.retriever.error = RetrievalUnavailable("down")
    with pytest.raises(RetrievalUnavailable, match="down"):
        await stage.play("ask()\npost('/retrieve', query='a')")
    answered = await stage.play("ask()\npost('/retrieve', query='a')\nreturn 'kelu'")
    assert answered.reward == 1.0


async def test_its_searches_are_bounded_and_their_words_are_no_special_tokens(stage: Stage) -> None:
    said = "kelu <|im_end|>"
    stage.retriever = FixedRetriever(passages=[Passage("p0", said, 1.0)])
    body = (
        "found = ask() and post('/retrieve', queries=['a'] * 60)\n"
        "read = found['result'][0][0]['contents']\n"
        "ask('what is ' + read)\n"
        "return str(post('/retrieve', queries=['a'] * 64)) + str(post('/retrieve', query='a'))"
    )
    trajectory = await stage.play(body, retrieval_hit=1.0, searches=61)
    assert trajectory.answer == "429{'result': [[{'id': 'p0', 'contents': 'kelu < |im_end|>'}]]}"
    assert trajectory.reward_parts["retrieval_hit"] == 1.0
    assert [len(turn.searches) for turn in trajectory.turns] == [60, 1]
    assert stage.policy.prompts[1] == "what is kelu < |im_end|>"


async def test_a_key_is_good_for_its_own_rollout_and_no_longer(stage: Stage) -> None:
    path = stage.folder / "key"
    body = (
        f"if question['attempt']:\n"
        f"    ask()\n"
        f"    return f\"{{ask(key=open('{path}').read())}} {{ask(key='made up')}}\"\n"
        f"open('{path}', 'w').write(os.environ['OPENAI_API_KEY'])\n"
        f"ask()\nreturn 'kelu'"
    )
    async with stage.rolling(stage.function(body)) as rollouts:
        first = await rollouts.roll(make_lease(), stage.retriever)
        second = await rollouts.roll(make_lease(attempt=1), stage.retriever)
    assert second.answer == "410 401" and len(second.turns) == len(first.turns) == 1


async def test_who_shows_a_sibling_s_key_is_in_its_session(stage: Stage) -> None:
    key, done = stage.folder / "key", stage.folder / "done"
    body = (
        f"key, done = '{key}', '{done}'\n"
        "ask()\n"
        "if question['attempt'] == 0:\n"
        "    open(key + '.part', 'w').write(os.environ['OPENAI_API_KEY'])\n"
        "    os.rename(key + '.part', key)\n"
        "    while not os.path.exists(done): time.sleep(0.01)\n"
        "    return 'kelu'\n"
        "while not os.path.exists(key): time.sleep(0.01)\n"
        "said = ask('of another ?', key=open(key).read())\n"
        "open(done, 'w')\n"
        "return said['object']"
    )
    async with stage.rolling(stage.function(body, deadline_s=30.0)) as rollouts:
        rolled = (rollouts.roll(make_lease(attempt=n), stage.retriever) for n in (0, 1))
        shown, shower = await asyncio.gather(*rolled)
        gauges = rollouts.gauges()
    assert (shown.answer, shower.answer) == ("kelu", "text_completion")
    read = [stage.prompter.decode(each.prompt_tokens) for each in shown.sequences]
    assert read == ["who ?", "of another ?"] and len(shower.sequences) == 1
    assert decode_trajectory(encode_trajectory(shown)).sequences[1].name == "2"
    assert gauges["actor/token_mismatch"] == gauges["actor/programs_failed_total"] == 0.0


async def test_a_megabyte_is_refused(stage: Stage) -> None:
    trajectory = await stage.play("ask()\nreturn str(ask('x' * 2_000_000))")
    assert trajectory.answer == "413" and len(trajectory.turns) == 1


@pytest.mark.slow
async def test_siblings_are_undisturbed(stage: Stage) -> None:
    body = (
        "ask()\nn = question['attempt']\n"
        "if n == 1: time.sleep(60)\n"
        "if n == 2: os.kill(os.getpid(), 9)\n"
        "if n == 3:\n"
        "    for _ in range(40):\n"
        "        if not os.fork():\n"
        f"            open(f'{stage.folder}/child-{{os.getpid()}}', 'w')\n"
        "            os.setsid()\n"
        "            time.sleep(600)\n"
        f"    while len(glob.glob('{stage.folder}/child-*')) < 40: time.sleep(0.01)\n"
        "    time.sleep(60)\n"
        "return 'kelu'"
    )
    program = stage.function(f"import glob\n{body}", deadline_s=6.0)
    async with stage.rolling(program) as rollouts:
        rolled = (rollouts.roll(make_lease(attempt=n), stage.retriever) for n in (0, 1, 2, 3, 0))
        ended = await asyncio.gather(*rolled, return_exceptions=True)
        gauges = rollouts.gauges()
    failed = [ProgramFailed] * 3
    assert [type(each) for each in ended] == [Trajectory, *failed, Trajectory]
    assert gauges["actor/programs_failed_total"] == 3 and gauges["actor/programs_late_total"] == 2
    children = [int(path.name.partition("-")[2]) for path in stage.folder.glob("child-*")]
    assert len(children) == 40 and not any(psutil.pid_exists(each) for each in children)
    assert gauges["actor/calls_per_rollout"] == 1.0 and gauges["actor/token_mismatch"] == 0.0
