"""Which words of a command line are overrides, and what they set."""

import pytest

from scripts.setup.overrides import fields_of, is_override


@pytest.mark.parametrize(
    ("word", "is_one"),
    [
        *(("actors.max_turns=2", True), ("model.path=/a b", True), ("seed=4", True)),
        *(("actors.max_turn=2", True), ("run_dir=x", True), ("retrieval.recorded=", True)),
        *(("questions=held.jsonl", False), ("model=x", False), ("nq=nq.jsonl", False)),
        *(("E=mc2 was published when?", False), ("1 + 1 = 2?", False), ("seed", False)),
        *(("model.x y = z, why?", False), ("seed = 1?", False), ("nq.dev=nq.jsonl", False)),
    ],
)
def test_an_override_begins_with_a_field(word: str, is_one: bool) -> None:
    assert is_override(word) is is_one


def test_fields_are_named_however_they_are_set() -> None:
    given = ["questions={prompt: x, train: y}", "model.path=z", "seed=1", "questions.eval=[:"]
    fields = ["questions.prompt", "questions.train", "model.path", "seed", "questions.eval"]
    assert fields_of(given) == fields
    assert fields_of(["questions.prompt={question}"]) == ["questions.prompt"]
    assert fields_of(["learner=[:", "learner"]) == ["learner", "learner"]


def test_a_key_of_the_engines_own_sets_one_field() -> None:
    given = ["actors.engine.speculative_config.method=ngram", "actors={engine: {block_size: 16}}"]
    assert fields_of(given) == ["actors.engine"] * 2
