"""`tool_call` on the chat templates of real models (tests/vectors/chat_templates)."""

import hashlib
import json
from typing import Any

import pytest

from actors.environments.chat import OWN, Chat, call_mark, format_of, parse_calls
from actors.environments.vllm_formats import VllmFormat
from actors.prompt import Prompter
from configs.environment import EnvironmentConfig
from configs.load import ConfigError
from configs.prompts import SEARCH_TOOL, TOOL_CALL_SYSTEM
from configs.runtime.process import REPOSITORY
from configs.schema import ActorsConfig, QuestionsConfig
from replay.trajectory import StopReason
from tests.actors.chats import chat_tokenizer
from tests.actors.environments.test_search_r1 import OPEN, Library

FOLDER = REPOSITORY / "tests" / "vectors" / "chat_templates"
DIGESTS = {
    "llama3_1": "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
    "llama3_2": "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",
    "qwen2_5": "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    "qwen3": "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    "qwen3_5_think": "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
    "smollm2": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
}
FORMATS = {
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
}
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
LLAMA_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QUERY = {"query_list": ["mayor of bore"]}
JSON_CALLS = {
    "hermes": f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': QUERY})}\n</tool_call>",
    "llama3_json": json.dumps({"name": "search", "parameters": QUERY}),
}
TOOLS = [SEARCH_TOOL]


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_bytes().decode()


@pytest.fixture
def model(request: Any, bpe_tokenizer: Any) -> Any:
    """A tokenizer with a real chat template and its special tokens."""
    name = request.param
    tokenizer = chat_tokenizer(bpe_tokenizer, text_of(name))
    if name.startswith("llama"):
        tokenizer.add_tokens(list(LLAMA_MARKS), special_tokens=True)
        tokenizer.bos_token, tokenizer.eos_token = LLAMA_MARKS[0], LLAMA_MARKS[-1]
    return tokenizer


def prompter_of(tokenizer: Any, **arguments: Any) -> Prompter:
    return Prompter(tokenizer, QuestionsConfig(template_arguments=arguments), ActorsConfig())


def with_environment(**settings: Any) -> dict[str, Any]:
    named = EnvironmentConfig(name="tool_call", **settings)
    roomy = {"max_action_tokens": 900, "max_passage_tokens": 400, "max_model_len": 20_000}
    return OPEN | roomy | {"environment": named}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_template_is_the_models_own_byte_for_byte(name: str) -> None:
    assert hashlib.sha256((FOLDER / f"{name}.jinja").read_bytes()).hexdigest() == DIGESTS[name]
    assert f"| `{name}.jinja` |" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("messages", [1, 3])
@pytest.mark.parametrize("model", FORMATS, indirect=True)
def test_an_observation_is_what_the_template_renders(model: Any, messages: int) -> None:
    prompter = prompter_of(model)
    chat = Chat(prompter, TOOLS, TOOL_CALL_SYSTEM, "")
    texts = [f'say "{number}"\nkelu' for number in range(messages)]
    said = [("search", [prompter.foreign(chat.change(text))]) for text in texts]
    action = prompter.text(f"I search{model.eos_token}")
    seen = prompter.decode(chat.observation(action, said, action[:0]))
    conversation = [
        {"role": "system", "content": TOOL_CALL_SYSTEM},
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "I search"},
        *({"role": "tool", "name": "search", "content": text} for text in texts),
    ]
    assert prompter.render(conversation, TOOLS).endswith(f"I search{model.eos_token}{seen}")


@pytest.mark.parametrize("model", ["llama3_1", "llama3_2", "qwen2_5", "qwen3"], indirect=True)
def test_a_rollout_calls_as_the_template_teaches(stage: Any, model: Any) -> None:
    stage.tokenizer, stage.retriever = model, Library()
    call = JSON_CALLS[format_of(prompter_of(model), TOOLS, "auto", "")]
    end = model.eos_token
    thought = f"<think>I might {call}</think>\n"
    says = (f"{thought}{call}{end}", f"<answer>kelu</answer>{end}")
    trajectory = stage.play(*says, **with_environment())
    assert stage.retriever.calls == [["mayor of bore"]] and trajectory.reward == 1.0
    first = stage.tokenizer.decode(trajectory.turns[0].observation_tokens)
    assert "mayor of bore 1 mayor of bore 2" in first and not trajectory.turns[0].malformed


@pytest.mark.parametrize("model", FORMATS, indirect=True)
def test_the_format_is_the_templates_own(request: Any, model: Any) -> None:
    name = request.node.callspec.params["model"]
    assert format_of(prompter_of(model), TOOLS, "auto", "") == FORMATS[name]


MARKS = {"qwen2_5": "<tool_call>", "qwen3": "<tool_call>", "qwen3_5_think": "<tool_call>"}


@pytest.mark.parametrize("model", DIGESTS, indirect=True)
def test_a_calls_mark_is_the_templates_own(request: Any, model: Any) -> None:
    name = request.node.callspec.params["model"]
    assert call_mark(prompter_of(model), TOOLS) == MARKS.get(name, "")


@pytest.mark.parametrize(
    ("written", "mark"),
    [
        ("{{ m.content }}[TOOL_CALLS][{{ f.name }}", "[TOOL_CALLS]"),
        ("{{ m.content }}<|calls|>\n<|call|>functions.{{ f.name }}:0", "<|calls|>"),
        ("<function name={{ f.name }} {{ f.arguments.items() }}>", "<function"),
        ("<call>{{ f.name }}{{ f.arguments + '' }}", "<call>"),
        ("[{{ f.name }}()]", ""),
        ("{{ m.content }}", ""),
        ("{{ raise_exception('no calls') }}", ""),
    ],
)
def test_a_calls_mark_is_the_first_tag_that_a_template_writes(
    bpe_tokenizer: Any, written: str, mark: str
) -> None:
    calling = "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}" + written
    each = f"{calling}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    opens = "{% if m.role == 'assistant' %}<|assistant|>{% endif %}"
    template = f"{{% for m in messages %}}{opens}{each}{{% endfor %}}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    prompter = prompter_of(chat_tokenizer(bpe_tokenizer, template))
    assert call_mark(prompter, TOOLS) == mark


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_thoughts_are_switched_off_by_a_template_argument(model: Any) -> None:
    conversation = [{"role": "user", "content": "a question"}]
    opens = "<|im_start|>assistant\n"
    assert prompter_of(model).render(conversation).endswith(opens)
    off = prompter_of(model, enable_thinking=False)
    assert off.render(conversation).endswith(f"{opens}<think>\n\n</think>\n\n")


@pytest.mark.parametrize("model", ["qwen2_5"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"enable_thinking": False}, "acts on nothing: the chat template .* no enable_thinking"),
        ({"tools": []}, "Forage gives the chat template its tools"),
    ],
)
def test_an_argument_that_acts_on_nothing_is_refused(
    model: Any, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"questions.template_arguments = .*{complaint}"):
        prompter_of(model, **arguments)


@pytest.mark.parametrize("model", ["smollm2"], indirect=True)
def test_a_template_without_tools_is_refused_by_name(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used .* shows the policy no tools"):
        Chat(prompter_of(model), TOOLS, TOOL_CALL_SYSTEM, "")


@pytest.mark.slow  # it imports vLLM
@pytest.mark.parametrize("model", ["qwen3_5_think"], indirect=True)
def test_a_call_is_read_by_vllms_parser(stage: Any, model: Any) -> None:
    pytest.importorskip("vllm")
    stage.tokenizer, stage.retriever = model, Library()
    model.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    days = "<parameter=days>\n2\n</parameter>\n"
    place = '<parameter=place>\n{"city": "bore"}\n</parameter>\n'
    call = f"<tool_call>\n<function=weather>\n{place}{days}</function>\n</tool_call>"
    broken = "<tool_call>\n<function=weather>\n</function>\n</tool_call>"
    settings = with_environment(tools=("tests.actors.typed_tools:weather",), queries_per_turn=2)
    end = model.eos_token
    says = (
        f"I might {broken}</think>\n{call}\n{call}{end}",
        f"</think>\n<answer>kelu</answer>{end}",
    )
    trajectory = stage.play(*says, **settings)
    first = stage.tokenizer.decode(trajectory.turns[0].observation_tokens)
    assert first.count('{"city":"bore","days":2,"unit":"C"}') == 2 and trajectory.reward == 1.0
    assert first.endswith("<|im_start|>assistant\n<think>\n")
    told = stage.play(f"</think>{broken}{end}", f"</think>kelu{end}", **settings)
    assert told.turns[0].malformed and told.stop_reason == StopReason.UNANSWERED
    assert "missing required field" in stage.tokenizer.decode(told.turns[0].observation_tokens)


@pytest.mark.slow  # it imports vLLM
@pytest.mark.parametrize("model", ["qwen3_5_think"], indirect=True)
@pytest.mark.parametrize("name", ["auto", "qwen3_xml"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>\n{"name": "search", "arguments": {"query_list": ["bore"',
        "<tool_call>\nsearch(bore)\n</tool_call>",
        "I call <tool_call> <query_list>bore</query_list>",
    ],
)
def test_a_call_that_vllms_parser_cannot_read_is_corrected(
    stage: Any, model: Any, name: str, text: str
) -> None:
    pytest.importorskip("vllm")
    stage.tokenizer, stage.retriever = model, Library()
    model.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    end = model.eos_token
    says = (f"</think>{text}{end}", f"</think><answer>kelu</answer>{end}")
    told = stage.play(*says, **with_environment(tool_format=name))
    first = stage.tokenizer.decode(told.turns[0].observation_tokens)
    assert "This call could not be read. Write the whole call in the form that you" in first
    assert told.turns[0].malformed and told.stop_reason == StopReason.ANSWERED
    thought = stage.play(f"I might {text}</think>kelu{end}", **with_environment(tool_format=name))
    assert len(thought.turns) == 1 and thought.stop_reason == StopReason.UNANSWERED


@pytest.mark.slow  # it imports vLLM
@pytest.mark.parametrize("model", ["qwen2_5"], indirect=True)
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("xml", "choose one of auto, hermes, llama3_json, .*qwen3_coder"),
        ("deepseek_v3", "cannot be used with the tokenizer of this model"),
    ],
)
def test_a_parser_that_is_none_is_refused(
    stage: Any, model: Any, name: str, complaint: str
) -> None:
    pytest.importorskip("vllm")
    stage.tokenizer = model
    with pytest.raises(ConfigError, match=f"environment.tool_format = '{name}': .*{complaint}"):
        stage.play("kelu", **with_environment(tool_format=name))


@pytest.mark.slow  # it imports vLLM
@pytest.mark.parametrize("model", ["qwen2_5"], indirect=True)
@pytest.mark.parametrize("name", OWN)
def test_our_own_formats_read_what_vllms_parsers_read(model: Any, name: str) -> None:
    pytest.importorskip("vllm")
    model.add_tokens(["<|python_tag|>"], special_tokens=True)
    theirs = VllmFormat(name, model, TOOLS)
    for text in (JSON_CALLS[name], f"I see. {JSON_CALLS[name]}", "kelu"):
        assert parse_calls(text, name) == theirs.calls(text)
