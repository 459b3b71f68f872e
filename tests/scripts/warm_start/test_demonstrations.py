"""Demonstrations become the tokens that an actor would have produced; bad rows are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.prompt import Prompter
from configs.environment import EnvironmentConfig
from configs.load import ConfigError
from configs.schema import ActorsConfig, Config, ModelConfig, QuestionsConfig
from replay.log.records import Compacted, Delivered
from replay.log.summary import Summary
from replay.protocol import LogError
from replay.trajectory import Question
from retrieval_server.protocol import Passage
from scripts.warm_start import demonstrations
from scripts.warm_start.demonstrations import BadDemonstrations, Demonstration, read_files, read_run
from tests.actors.chats import CHATML, chat_tokenizer
from tests.actors.conftest import PASSAGES as PASSAGES_FOUND
from tests.actors.conftest import QUESTION, Stage, make_config
from tests.scripts.conftest import RecordedRun, rollout_of

CONFIG = Config(
    model=ModelConfig(max_model_len=60),
    questions=QuestionsConfig(prompt="{question} Reason .", chat_template=False),
    actors=ActorsConfig(
        max_turns=2,
        max_action_tokens=8,
        max_passage_tokens=5,
        passage_template="{title} : {text} ",
        observation_template=" <information> {passages} </information> ",
    ),
)
SEARCH, ANSWER = "<search> mayor of bore </search>", "<answer> kelu </answer>"
PASSAGES = [
    {"id": 1, "title": "bore", "text": "the mayor of bore is kelu ."},
    {"id": "2", "title": "kelu", "text": "is . ."},
]
GOOD = {
    "question": "what is the mayor of bore ?",
    "turns": [{"action": SEARCH, "passages": PASSAGES}, {"action": ANSWER}],
}


@pytest.fixture
def prompter(word_tokenizer: Any) -> Prompter:
    return Prompter(word_tokenizer, CONFIG.questions, CONFIG.actors)


@pytest.fixture
def read(tmp_path: Path, prompter: Prompter) -> Callable[..., tuple[list[Demonstration], list]]:
    """read(*rows, skip_bad): what a file of these rows, JSON or text, holds."""

    def read(*rows: Any, skip_bad: bool = False) -> tuple[list[Demonstration], list[str]]:
        path = tmp_path / "d.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n")
        return read_files([path], prompter, CONFIG, skip_bad)

    return read


def plain(segments: Any) -> list[tuple[list[int], bool]]:
    return [(np.asarray(tokens).tolist(), own) for tokens, own in segments]


def changed(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return GOOD | ({"turns": list(turns)} if turns else {}) | fields


def test_segments_are_what_an_actor_reads_and_writes(
    read: Callable[..., Any], prompter: Prompter, word_tokenizer: Any
) -> None:
    ((found,), bad) = read(GOOD)
    shown = [
        Passage("1", "bore\nthe mayor of bore is kelu .", 0.0),
        Passage("2", "kelu\nis . .", 0),
    ]
    expected = [
        (prompter.question(Question("", GOOD["question"], ())), False),
        (word_tokenizer.encode(SEARCH, add_special_tokens=False), True),
        (prompter.observation(shown), False),
        (word_tokenizer.encode(ANSWER, add_special_tokens=False), True),
    ]
    assert plain(found.segments) == plain(expected) and not bad
    assert len(found) == sum(len(tokens) for tokens, _ in expected)


SETTINGS = {
    "as it is": {},
    "budget told, answer opened": {
        "environment": EnvironmentConfig(tell_budget=True, force_answer=True),
        "max_turns": 1,
    },
    "no_search": {"environment": EnvironmentConfig(name="no_search"), "prompt": ""},
    "shuffled": {"shuffle_passages": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_demonstration_of_a_rollout_is_that_rollout(
    tmp_path: Path, word_tokenizer: Any, name: str
) -> None:
    settings = make_config(**SETTINGS[name])
    opened = settings.environment.force_answer
    texts = [SEARCH, "kelu </answer>" if opened else ANSWER][-settings.actors.max_turns - 1 :]
    if settings.environment.name == "no_search":
        texts = [ANSWER]
    trajectory = Stage(word_tokenizer).play(*texts, **SETTINGS[name])
    ids = {passage.id: passage for passage in PASSAGES_FOUND}
    turns = [
        {"action": text, "passages": [to_row(ids[i]) for s in turn.searches for i in s.passage_ids]}
        for text, turn in zip(texts, trajectory.turns, strict=True)
    ]
    del turns[-1]["passages"]
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": QUESTION.text, "turns": turns}))
    prompter = Prompter(word_tokenizer, settings.questions, settings.actors)
    ((found,), _) = read_files([tmp_path / "d.jsonl"], prompter, settings)
    expected = [(trajectory.prompt_tokens, False)]
    for turn in trajectory.turns:
        expected += [(turn.action_tokens, True), (turn.observation_tokens, False)]
    assert plain(found.segments) == plain(expected[:-1])


def to_row(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "contents": passage.contents}


def test_a_turn_of_calls_ends_with_the_end_token(tmp_path: Path, bpe_tokenizer: Any) -> None:
    settings = EnvironmentConfig(name="tool_call")
    config = make_config(environment=settings, max_model_len=2000, max_action_tokens=400)
    tokenizer = chat_tokenizer(bpe_tokenizer, CHATML)
    call = json.dumps({"name": "search", "arguments": {"query_list": ["mayor of bore"]}})
    texts = [f"<tool_call>\n{call}\n</tool_call>", ANSWER]
    turns = [{"action": texts[0], "passages": PASSAGES}, {"action": texts[1]}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "who", "turns": turns}))
    prompter = Prompter(tokenizer, config.questions, config.actors)
    ((found,), _) = read_files([tmp_path / "d.jsonl"], prompter, config)
    written = [tokenizer.decode(tokens) for tokens, own in found.segments if own]
    assert written == [f"{text}{tokenizer.eos_token}" for text in texts]
    assert "the mayor of bore is kelu ." in tokenizer.decode(found.segments[2][0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "rag"}, r"environment\.name = 'rag': .*--from-run"),
        ({"tools": ("tests.actors.calculator:calculator",)}, r"environment\.tools = .*no tools"),
        ({"mcp": ("python server.py",)}, r"environment\.mcp = .*no tools"),
        ({"name": "tool_call"}, r"no chat template, which environment\.name = 'tool_call' needs"),
    ],
)
def test_what_cannot_be_acted_out_is_refused(
    tmp_path: Path, word_tokenizer: Any, settings: dict[str, Any], words: str
) -> None:
    config = make_config(environment=EnvironmentConfig(**settings))
    prompter = Prompter(word_tokenizer, config.questions, config.actors)
    with pytest.raises(ConfigError, match=words):
        read_files([tmp_path / "d.jsonl"], prompter, config)


def test_passages_may_be_those_of_a_corpus_and_an_observation_may_be_given_whole(
    read: Callable[..., Any], prompter: Prompter
) -> None:
    contents = [{"id": p["id"], "contents": f"{p['title']}\n{p['text']}"} for p in PASSAGES]
    text = prompter.decode(read(GOOD)[0][0].segments[2][0])
    others = ({"passages": contents}, {"observation": text})
    rows = [changed({"action": SEARCH} | other, {"action": ANSWER}) for other in others]
    whole, *same = read(GOOD, *rows)[0]
    assert [plain(each.segments) for each in same] == [plain(whole.segments)] * 2


def test_no_special_token_comes_of_an_observation(
    read: Callable[..., Any], word_tokenizer: Any
) -> None:
    turn = {"action": SEARCH, "observation": "mayor [EOS] of bore [PAD]"}
    ((found,), _) = read(changed(turn, {"action": ANSWER}))
    expected = word_tokenizer.encode("mayor of bore", add_special_tokens=False)
    assert found.segments[2][0].tolist() == expected


def test_a_search_may_come_last_once_all_turns_are_used(read: Callable[..., Any]) -> None:
    turn = {"action": SEARCH, "passages": PASSAGES[1:]}
    ((found,), bad) = read(changed(turn, turn, {"action": SEARCH}))
    assert [own for _, own in found.segments] == [False, True] * 3 and not bad


def test_an_action_ends_with_its_tag_whatever_space_follows(read: Callable[..., Any]) -> None:
    spaced = changed({"action": f"{SEARCH} \n", "passages": PASSAGES}, {"action": f"{ANSWER}\n\n"})
    one, other = read(GOOD, spaced)[0]
    assert plain(one.segments) == plain(other.segments)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["truncated", "'{'"]),
        ({"question": "what ?"}, ["turns", '"turns": [{"action"']),
        (changed(question=3), ["Expected `str`", "$.question"]),
        (changed(question="  "), ["question is empty"]),
        (changed(turns=[]), ["turns number 0", "1 to 3"]),
        (changed(*[GOOD["turns"][0]] * 4), ["turns number 4", "actors.max_turns"]),
        (changed({"action": "kelu"}), ["turns[0].action", "kelu", "is malformed"]),
        (changed({"action": "<search> </search>"}), ["turns[0].action", "is malformed"]),
        (changed({"action": f"{ANSWER} kelu"}), ["turns[0].action", "goes on behind"]),
        (changed({"action": f"try </search> {ANSWER}"}), ["turns[0].action", "goes on behind"]),
        (
            changed({"action": ANSWER, "passages": []}, {"action": ANSWER}),
            ["turns[0].action", "(answered), but another"],
        ),
        (
            changed({"action": SEARCH}, {"action": ANSWER}),
            ["turns[0].passages", "neither is given"],
        ),
        (
            changed({"action": SEARCH, "passages": [], "observation": ""}, {"action": ANSWER}),
            ["turns[0].passages", "both are given"],
        ),
        (changed({"action": SEARCH, "passages": []}), ["turns[0].passages", "no action follows"]),
        (
            changed(GOOD["turns"][0], {"action": SEARCH}),
            ["turns[1].action", "nothing follows", "end with an answer", "actors.max_turns"],
        ),
        (
            changed({"action": SEARCH, "passages": [{"id": 1}]}, {"action": ANSWER}),
            ["turns[0].passages", "each has a text"],
        ),
        (
            changed({"action": f"<answer> {'kelu ' * 9}</answer>"}),
            ["turns[0].action", "11 tokens", "actors.max_action_tokens = 8"],
        ),
        (
            changed(question="what " * 60),
            ["turns[0].action", "no room", "model.max_model_len = 60"],
        ),
        (
            changed({"action": SEARCH, "observation": "is " * 60}, {"action": ANSWER}),
            ["it takes 77 tokens", "model.max_model_len = 60"],
        ),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    read: Callable[..., Any], tmp_path: Path, row: Any, words: list[str]
) -> None:
    with pytest.raises(BadDemonstrations) as raised:
        read(GOOD, "", row)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path}/d.jsonl:3: ")
    assert all(word in message for word in words), message


def test_a_cause_is_told_once_with_its_rows(read: Callable[..., Any], tmp_path: Path) -> None:
    empty = changed(question="")
    bad = [empty, changed({"action": "kelu"}), empty, changed({"action": "bore"}), *[empty] * 23]
    with pytest.raises(BadDemonstrations) as raised:
        read(GOOD, *bad)
    first, second = str(raised.value).split("\n")
    assert first.startswith(f"{tmp_path}/d.jsonl:2: question is empty: ")
    assert first.endswith(" (and 24 more of 28 rows: lines 4, 6, 7, 8, 9, 10, 11, 12, …)")
    assert second.startswith(f"{tmp_path}/d.jsonl:3: turns[0].action = …'kelu' is malformed")
    assert second.endswith(" (and 1 more of 28 rows: line 5)")
    found, left_out = read(GOOD, *bad, skip_bad=True)
    assert len(found) == 1 and left_out == [first, second]
    with pytest.raises(BadDemonstrations, match="question is empty"):
        read(*bad, skip_bad=True)


def test_only_the_first_causes_are_told(
    read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstrations, "MOST_SHOWN", 1)
    with pytest.raises(BadDemonstrations) as raised:
        read(changed(question=""), *[changed({"action": "kelu"})] * 3)
    _, last = str(raised.value).split("\n")
    assert last == "... and 3 more bad rows"


def test_questions_are_no_demonstrations(read: Callable[..., Any], tmp_path: Path) -> None:
    questions = [{"question": f"who {n} ?", "answers": ["x"]} for n in range(40)]
    for skip_bad in (False, True):
        with pytest.raises(BadDemonstrations) as raised:
            read(*questions, skip_bad=skip_bad)
        assert str(raised.value) == (
            f"{tmp_path}/d.jsonl: 40 of 40 rows have no `turns`: these are questions, not "
            "demonstrations (docs/warm_start.md)"
        )


def test_files_that_hold_none_are_named(
    read: Callable[..., Any], tmp_path: Path, prompter: Prompter
) -> None:
    with pytest.raises(BadDemonstrations, match=r"none\.jsonl: cannot be read"):
        read_files([tmp_path / "none.jsonl"], prompter, CONFIG)
    with pytest.raises(BadDemonstrations, match=r"d\.jsonl: no demonstrations: write"):
        read("")


def test_a_run_gives_what_was_rewarded_token_for_token(recorded_run: RecordedRun) -> None:
    recorded_run.evaluate(0)
    leases = list(recorded_run.leases)
    recorded_run.deliver_all(reward=None)
    found, left_out = read_run(recorded_run.path, 1.0, "digest", CONFIG)
    kept = [lease for lease in leases if lease.kind == "train" and lease.sibling == 1]
    trajectories = [rollout_of(lease, 0, 1.0) for lease in kept]
    assert [each.question for each in found] == [t.question_id for t in trajectories]
    for each, trajectory in zip(found, trajectories, strict=True):
        tokens = [token for ids, _ in each.segments for token in ids]
        assert tokens == trajectory.sequences[0].tokens.tolist()
        written = [token for ids, own in each.segments if own for token in ids]
        assert written == [token for turn in trajectory.turns for token in turn.action_tokens]
    evaluations = sum(lease.kind == "eval" for lease in leases)
    assert left_out == {"rewarded below 1": len(kept), "evaluations": evaluations}


def test_of_several_sequences_each_is_a_demonstration(recorded_run: RecordedRun) -> None:
    """Nothing of one stands before what another's policy wrote."""
    kept = [lease for lease in recorded_run.leases if lease.sibling == 1]
    recorded_run.deliver_all(sequences=3)
    found, _ = read_run(recorded_run.path, 1.0, "digest", CONFIG)
    told = [[token for ids, _ in each.segments for token in ids] for each in found]
    assert told == [s.tokens.tolist() for t in kept for s in rollout_of(t, 0, 1.0, 3).sequences]


def test_what_cannot_be_learnt_from_is_counted(recorded_run: RecordedRun) -> None:
    recorded_run.deliver_all()
    summary = Summary(99, 0, "q-0", "train", 1.0, 0, 0, 1, 1, 0, 0)
    recorded_run.append(Delivered(9.0, "actor", 99, 0, b"", summary, Compacted(9, 0)))
    short = msgspec.structs.replace(CONFIG, model=ModelConfig(max_model_len=4))
    with pytest.raises(BadDemonstrations, match=r"longer than model\.max_model_len") as raised:
        read_run(recorded_run.path, 1.0, "digest", short)
    assert "1 compacted away" in str(raised.value) and "lower --reward" in str(raised.value)


def test_a_run_with_another_tokenizer_is_refused(recorded_run: RecordedRun) -> None:
    recorded_run.deliver_all()
    with pytest.raises(BadDemonstrations, match=r"tokenizer digest, that of model\.path is mine"):
        read_run(recorded_run.path, 1.0, "mine", CONFIG)


def test_ids_that_the_model_does_not_embed_are_refused_by_name(
    recorded_run: RecordedRun, tmp_path: Path
) -> None:
    recorded_run.deliver_all()
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    small = msgspec.structs.replace(CONFIG, model=ModelConfig(str(tmp_path), max_model_len=60))
    words = r"group \d+: sibling 1: token id \d+: the model's vocabulary has 2, from 0: .*own model"
    with pytest.raises(BadDemonstrations, match=words):
        read_run(recorded_run.path, 1.0, "digest", small)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"events\.log: cannot be read"):
        read_run(tmp_path, 1.0, "digest", CONFIG)
