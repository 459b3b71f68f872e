"""Which environments there are, what must be true before one is made, and a user's own."""

import asyncio
from typing import Any

import msgspec
import pytest

from actors.environments import registry
from actors.errors import EnvironmentFailed
from actors.prompt import Prompter
from configs.environment import EnvironmentConfig, ProgramConfig
from configs.load import ConfigError
from configs.rewards import RewardsConfig, RewardWeights
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, Config, LearnerConfig, ModelConfig, QuestionsConfig
from replay.trajectory import Question, StopReason
from tests.actors import calculator
from tests.actors.chats import CHATML, chat_tokenizer

FAULTY, UNTYPED = "tests.actors.faulty_tools", "tests.actors.typed_tools:untyped"
CALCULATOR, GUESSING = "tests.actors.calculator:calculator", "tests.actors.guessing:Guessing"


def config_with(max_turns: int = 3, chat_template: bool = True, **settings: Any) -> Config:
    return Config(
        model=ModelConfig(path="model"),
        questions=QuestionsConfig(chat_template=chat_template),
        environment=EnvironmentConfig(**settings),
        actors=ActorsConfig(max_turns=max_turns),
    )


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({}, ("</search>", "</answer>")),
        ({"tools": (CALCULATOR,)}, ("</search>", "</answer>", "</calculator>")),
        ({"name": "tool_call", "tools": (CALCULATOR,)}, ()),
        ({"name": "no_search"}, ("</answer>",)),
        ({"name": "rag"}, ("</answer>",)),
        ({"name": "program", "program": ProgramConfig(command=("agent",))}, ()),
        ({"name": GUESSING}, ("</answer>",)),
        ({"name": f"{FAULTY}:promptless"}, ("</search>", "</answer>")),
    ],
)
def test_each_environment_says_where_completions_end(settings: Any, stops: Any) -> None:
    assert registry.stops_of(config_with(**settings)) == stops


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "no.such:Thing"}, "environment.name = 'no.such:Thing': no.such cannot be impo"),
        ({"name": f"{FAULTY}:Missing"}, "environment.name = .*has no attribute 'Missing'"),
        ({"name": f"{FAULTY}:NO_TOOL"}, "environment.name = .*: a str cannot be called"),
        ({"name": f"{FAULTY}:Spelt"}, "its stops = '</done>': give a tuple of texts"),
        ({"tools": (f"{FAULTY}:search",)}, "environment.tools = .*: its name 'search' is taken"),
        ({"tools": (CALCULATOR, CALCULATOR)}, "its name 'calculator' is taken"),
        ({"tools": (f"{FAULTY}:silent",)}, "environment.tools = .*: it has no docstring"),
        ({"tools": (UNTYPED,)}, "environment.tools = .*: its parameter 'text' has no type"),
        ({"tools": (f"{FAULTY}:released",)}, "environment.tools = .*: a Event cannot be called"),
        ({"name": "tool_call", "chat_template": False}, "chat_template = False: environment.name"),
        ({"system": "x", "chat_template": False}, "chat_template = False: environment.system"),
        ({"force_answer": True, "max_turns": 0}, "actors.max_turns = 0 with environment.force"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        registry.check(config_with(**settings))


@pytest.mark.parametrize("name", ["no_search", "rag"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", (CALCULATOR,)), ("queries_per_turn", 2), ("tell_budget", 1), ("force_answer", 1)],
)
def test_what_would_act_on_nothing_is_refused_by_name(name: str, field: str, value: Any) -> None:
    registry.require_acting(config_with(name=name))
    registry.require_acting(config_with(**{field: value}))
    with pytest.raises(
        ConfigError, match=rf"environment\.{field} = .* with environment\.name = '{name}"
    ):
        registry.require_acting(config_with(name=name, **{field: value}))


PROGRAM = ProgramConfig(command=("agent",))


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", (CALCULATOR,)), ("mcp", ("server",)), ("tell_budget", 1), ("system", "Be brief.")],
)
def test_what_would_act_on_nothing_beside_a_program_is_refused(field: str, value: Any) -> None:
    registry.require_acting(config_with(name="program", program=PROGRAM))
    said = rf"environment\.{field} = .* acts on nothing with environment\.name = 'program'"
    with pytest.raises(ConfigError, match=said):
        registry.require_acting(config_with(name="program", program=PROGRAM, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"), [("command", ("agent",)), ("entry_point", "agents:one"), ("at_once", 8)]
)
def test_a_program_beside_an_environment_that_runs_none_is_refused(field: str, value: Any) -> None:
    config = config_with(program=ProgramConfig(**{field: value}))
    said = (
        rf"environment\.program\.{field} = .* acts on nothing with environment\.name = 'search_r1'"
    )
    with pytest.raises(ConfigError, match=said):
        registry.require_acting(config)


def test_a_program_may_give_rewards_and_shows_its_passages_itself() -> None:
    config = config_with(name="program", program=PROGRAM)
    rewards = RewardsConfig(weights=RewardWeights(environment=1.0))
    registry.require_acting(msgspec.structs.replace(config, rewards=rewards))
    shuffled = msgspec.structs.replace(config, actors=ActorsConfig(shuffle_passages=True))
    with pytest.raises(ConfigError, match=r"actors\.shuffle_passages = True acts on nothing"):
        registry.require_acting(shuffled)


async def test_a_program_is_not_played_turn_by_turn(lease_for: Any) -> None:
    nobody: Any = None
    with pytest.raises(ConfigError, match="'program': a program is not played turn by turn"):
        await registry.make(
            lease_for(),
            retriever=nobody,
            prompter=nobody,
            config=config_with(name="program", program=PROGRAM),
        )


@pytest.mark.parametrize("name", ["search_r1", "rag"])
def test_rewards_of_an_environment_that_gives_none_are_refused(name: str) -> None:
    rewards = RewardsConfig(weights=RewardWeights(environment=1.0))
    config = msgspec.structs.replace(config_with(name=name), rewards=rewards)
    with pytest.raises(ConfigError, match=r"rewards\.weights\.environment = 1\.0 acts on nothing"):
        registry.require_acting(config)
    own = EnvironmentConfig(name=GUESSING)
    registry.require_acting(msgspec.structs.replace(config, environment=own))


@pytest.mark.parametrize("name", ["search_r1", "no_search"])
def test_credit_of_turns_that_earn_nothing_is_refused(name: str) -> None:
    config = msgspec.structs.replace(config_with(name=name), learner=LearnerConfig(turn_credit=1.0))
    with pytest.raises(ConfigError, match=r"learner\.turn_credit = 1\.0 acts on nothing"):
        registry.require_acting(config)
    own = EnvironmentConfig(name=GUESSING)
    registry.require_acting(msgspec.structs.replace(config, environment=own))


def test_what_needs_a_chat_template_is_refused_without_one(bpe_tokenizer: Any) -> None:
    for settings in ({"name": "tool_call"}, {"system": "Be brief."}):
        config = config_with(**settings)
        prompter = Prompter(bpe_tokenizer, config.questions, config.actors)
        registry.check(config)
        with pytest.raises(
            ConfigError, match=r"model\.path = 'model': its tokenizer has no chat t"
        ):
            registry.check(config, prompter)
        chatting = Prompter(chat_tokenizer(bpe_tokenizer), config.questions, config.actors)
        registry.check(config, chatting)


def test_a_chat_template_that_cannot_be_used_is_refused(bpe_tokenizer: Any) -> None:
    template = CHATML.replace("{% if tools %}", "{% if false %}")
    config = config_with(name="tool_call")
    tokenizer = chat_tokenizer(bpe_tokenizer, template)
    with pytest.raises(ConfigError, match="shows the policy no tools"):
        registry.check(config, Prompter(tokenizer, config.questions, config.actors))


def test_ones_own_environment_is_played(stage: Any, bpe_tokenizer: Any, lease_for: Any) -> None:
    stage.tokenizer = bpe_tokenizer
    settings = {"environment": EnvironmentConfig(name=GUESSING), "max_action_tokens": 60}
    lease = lease_for(question=Question("q", "Which number ?", ("42",)))
    texts = [f"<answer> {guess} </answer>" for guess in ("50", "x", "42")]
    trajectory = stage.play(*texts, lease=lease, max_model_len=900, prompt="", **settings)
    hints = [bpe_tokenizer.decode(turn.observation_tokens) for turn in trajectory.turns]
    assert hints == ["\n\nlower\n\n", "\n\nhigher\n\n", ""]
    assert (trajectory.answer, trajectory.stop_reason) == ("42", StopReason.ANSWERED)
    prompt = bpe_tokenizer.decode(trajectory.prompt_tokens)
    assert prompt.startswith("Guess a number") and prompt.endswith("Which number ?\n")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Raising", r"environment\.name = '.*:Raising': KeyError: 'turn'"),
        ("Wordy", "TypeError: step gave 'more', which is no Outcome"),
        ("promptless", "TypeError: 'who\\?' is no int32"),
        ("speechless", "ValueError: prompt is empty"),
        ("Leaving", "SystemExit: 3"),
        ("Cancelling", "CancelledError: "),
    ],
)
def test_ones_own_environment_that_fails_fails_the_rollout_by_name(
    stage: Any, name: str, complaint: str
) -> None:
    named = EnvironmentConfig(name=f"{FAULTY}:{name}")
    with pytest.raises(EnvironmentFailed, match=complaint):
        stage.play("<answer> kelu </answer>", environment=named)


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        ("number", "TypeError: answer = 42 is neither str nor None"),
        ("surrogate", "UnicodeEncodeError: "),
        ("reason", "TypeError: stop = 'answered' is neither StopReason nor None"),
        ("list", r"TypeError: passages = \['p'\] is no tuple of Passage"),
        ("text", r"TypeError: passages = \('p',\) is no tuple of Passage"),
        ("query", r"TypeError: searches = \('q',\) is no tuple of Search"),
        ("maybe", "TypeError: malformed = 'no' is no bool"),
    ],
)
def test_an_outcome_that_no_trajectory_could_hold_fails_the_rollout_by_name(
    stage: Any, lease_for: Any, odd: str, complaint: str
) -> None:
    named = EnvironmentConfig(name=f"{FAULTY}:Odd")
    with pytest.raises(EnvironmentFailed, match=complaint):
        lease = lease_for(question=Question("q", odd, ("x",)))
        stage.play("<answer> kelu </answer>", lease=lease, environment=named)


def test_ones_own_environment_may_need_no_passages(
    stage: Any, config_for: Any, lease_for: Any
) -> None:
    config = config_for(environment=EnvironmentConfig(name=f"{FAULTY}:Raising"))
    prompter = stage.prompter(config)
    made = asyncio.run(
        registry.make(lease_for(), retriever=stage.retriever, prompter=prompter, config=config)
    )
    assert made.passages == () and made.budget(5) == 16


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("17 * 23", "391"),
        ("-(2 + 3) / 4", "-1.25"),
        ("1 / 0", "cannot work that out: division by zero"),
        ("2 ** 99999", "cannot work that out: only numbers, + - * / and brackets"),
        ("__import__('os')", "cannot work that out: only numbers, + - * / and brackets"),
    ],
)
def test_the_calculator(expression: str, said: str) -> None:
    assert calculator.calculator(expression) == said


def test_the_calculator_never_raises() -> None:
    for text in (
        "(" * 9999,
        "1" * 9999,
        "9" * 4000 + "*" + "9" * 4000,
        "1 +",
        "\0",
        "-" * 99999 + "1",
    ):
        assert calculator.calculator(text).startswith("cannot work that out: ")


def test_the_documentation_shows_what_is_tested() -> None:
    shown = (REPOSITORY / "docs" / "environments.md").read_text()
    for name in ("calculator", "guessing"):
        code = (REPOSITORY / "tests" / "actors" / f"{name}.py").read_text()
        assert code in shown and len(code.splitlines()) < 40
