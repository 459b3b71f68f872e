"""The account of a run's texts: of a sound run nothing, and one fault for each foreign text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.prompt import Prompter
from configs.environment import EnvironmentConfig
from configs.load import ConfigError, save
from configs.retrieval import RetrievalConfig
from configs.schema import Config, ModelConfig, QuestionsConfig
from replay.codec import encode_trajectory
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import Delivered, GroupOpened
from replay.log.summary import summarise
from replay.trajectory import (
    Question,
    Sampling,
    Search,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)
from retrieval_server.protocol import Passage
from tests.faults.texts_audit import audit_texts

CORPUS = {"p0": "the mayor of bore is kelu .", "p1": "bore is the mayor of kelu ."}
QUESTION = Question("q", "what is the mayor of bore ?", ("kelu",))
Change = Callable[[Trajectory], Trajectory]


@pytest.fixture
def config(tmp_path: Path, word_tokenizer: Any) -> Config:
    """Of a run in tmp_path, with its tokenizer and its corpus."""
    word_tokenizer.save_pretrained(tmp_path / "model")
    rows = ({"id": name, "contents": text} for name, text in CORPUS.items())
    (tmp_path / "corpus.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    config = Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        questions=QuestionsConfig(prompt="{question}"),
        retrieval=RetrievalConfig(corpus=str(tmp_path / "corpus.jsonl"), top_k=2),
    )
    save(config, tmp_path / "config.yaml")
    return config


def turn(observation: Any, **more: Any) -> Turn:
    """Two sampled tokens, then this observation."""
    sampled = np.array([3, 4], np.int32)
    logprobs, versions = np.zeros(2, np.float32), np.zeros(2, np.int32)
    return Turn(sampled, logprobs, versions, np.asarray(observation, np.int32), **more)


def sound(prompter: Prompter) -> Trajectory:
    """A search, a malformed action and an answer."""
    seen = [Passage(name, text, 0.0) for name, text in CORPUS.items()]
    search = Search("mayor of bore", ("p0", "p1"), 0.1, "ok")
    return Trajectory(
        group_id=1,
        sibling=0,
        question_id="q",
        kind="train",
        actor_id="actor",
        sampling=Sampling(),
        sequences=(
            TokenSequence(
                prompter.question(QUESTION),
                (
                    turn(prompter.observation(seen), searches=(search,)),
                    turn(prompter.correction(), malformed=True),
                    turn([]),
                ),
            ),
        ),
        stop_reason=StopReason.ANSWERED,
        answer="kelu",
        reward=1.0,
    )


def with_turn(trajectory: Trajectory, number: int, **changes: Any) -> Trajectory:
    """The same, but for one turn."""
    turns = list(trajectory.turns)
    turns[number] = msgspec.structs.replace(turns[number], **changes)
    only = TokenSequence(trajectory.prompt_tokens, tuple(turns))
    return msgspec.structs.replace(trajectory, sequences=(only,))


def spoilt(trajectory: Trajectory, number: int) -> Trajectory:
    """One token of an observation is another."""
    seen = trajectory.turns[number].observation_tokens.copy()
    seen[len(seen) // 2] += 1
    return with_turn(trajectory, number, observation_tokens=seen)


def found(trajectory: Trajectory, *names: str) -> Trajectory:
    """The first search found these passages."""
    return with_turn(trajectory, 0, searches=(Search("mayor of bore", names, 0.1, "ok"),))


def with_prompt(trajectory: Trajectory) -> Trajectory:
    """Another prompt."""
    only = TokenSequence(trajectory.prompt_tokens[1:].copy(), trajectory.turns)
    return msgspec.structs.replace(trajectory, sequences=(only,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t, ""),
        (lambda t: spoilt(t, 0), "group 1 sibling 0: turn 0: not what was found: "),
        (lambda t: spoilt(t, 1), "group 1 sibling 0: turn 1: not what was found: "),
        (lambda t: with_turn(t, 0, observation_tokens=np.empty(0, np.int32)), "turn 0: not what"),
        (lambda t: with_turn(t, 2, observation_tokens=np.ones(3, np.int32)), "turn 2: not what"),
        (lambda t: found(t, "p0", "x9"), "{'x9'} are no passages of the corpus"),
        (lambda t: found(t, "p1", "p0"), "turn 0: not what was found"),
        (with_prompt, "group 1 sibling 0: the prompt is "),
    ],
)
def test_what_does_not_belong_there_is_named(
    tmp_path: Path, config: Config, word_tokenizer: Any, change: Change, said: str
) -> None:
    trajectory = change(sound(Prompter(word_tokenizer, config.questions, config.actors)))
    ids = [sorted(trajectory.turns[0].searches[0].passage_ids)]
    texts = _audited(tmp_path, trajectory, lambda queries, top_k: ids)
    assert (texts.trajectories, texts.searches) == (1, 1)
    assert len(texts.faults) == bool(said) and said in "".join(texts.faults)


def test_what_a_sound_server_would_not_have_found_is_named(
    tmp_path: Path, config: Config, word_tokenizer: Any
) -> None:
    trajectory = sound(Prompter(word_tokenizer, config.questions, config.actors))
    texts = _audited(tmp_path, trajectory, lambda queries, top_k: [["p0"]] * len(queries))
    [fault] = texts.faults
    assert fault.startswith("'mayor of bore' found {") and fault.endswith("not ['p0']")


def test_every_query_of_a_turn_is_accounted_for(
    tmp_path: Path, config: Config, word_tokenizer: Any
) -> None:
    prompter = Prompter(word_tokenizer, config.questions, config.actors)
    seen = [[Passage(name, text, 0.0)] for name, text in CORPUS.items()]
    searches = tuple(Search(f"query {name}", (name,), 0.1, "ok") for name in CORPUS)
    trajectory = with_turn(
        sound(prompter), 0, searches=searches, observation_tokens=prompter.observation(*seen)
    )
    texts = _audited(tmp_path, trajectory, lambda queries, _: [[each[6:]] for each in queries])
    assert (texts.searches, texts.faults) == (2, [])


def test_texts_of_another_environment_are_refused(tmp_path: Path, config: Config) -> None:
    other = msgspec.structs.replace(config, environment=EnvironmentConfig(name="rag"))
    save(other, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"environment\.name = 'rag': .* cannot be accounted for"):
        audit_texts(tmp_path, lambda queries, _: [])


def _audited(run_dir: Path, trajectory: Trajectory, find: Any) -> Any:
    with EventLog.create(run_dir / FILE_NAME) as log:
        payload, summary = encode_trajectory(trajectory), summarise(trajectory)
        opened = GroupOpened(1.0, 1, "train", QUESTION, 1, 0)
        log.append([opened, Delivered(2.0, "actor", 1, 0, payload, summary)])
    return audit_texts(run_dir, find)


def test_a_record_does_not_have_the_audit_run_a_model_s_code(
    config: Config, tmp_path: Path
) -> None:
    model = msgspec.structs.replace(config.model, trust_remote_code=True)
    save(msgspec.structs.replace(config, model=model), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code = True: .* add --trust"):
        audit_texts(tmp_path, lambda *_: [])
