"""The token audit passes what went through the policy, and names each way in which a record does
not say that."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from actors.errors import TokenMismatch
from actors.gateway.calls import Call
from actors.gateway.merging import merged
from actors.policies.base import Completion, FinishReason, Policy
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from actors.token_audit import AuditedPolicy, StopCheck, TokenAudit
from replay.trajectory import TokenSequence, Trajectory, Turn

SEARCH, ANSWER = "<search> mayor of bore </search>", "<answer> kelu </answer>"
STOPS = ("</search>", "</answer>")


@dataclass
class Says:
    """Says these ids, whatever is asked; each completion ends for the reason given."""

    turns: Sequence[Sequence[int]]
    reason: FinishReason = "stop"
    asked: int = 0

    async def complete(self, tokens: Sequence[int], **_: Any) -> Completion:
        ids = np.array(self.turns[self.asked], np.int32)
        self.asked += 1
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros_like(ids), self.reason)


@dataclass
class Between:
    """Stands between a rollout and the policy that it hears, and changes what passes: `ask` the
    prompt of turn 1, `say` the completion of turn `at`."""

    policy: Policy
    ask: Callable[[list[int]], list[int]] = list
    say: Callable[[Completion], Completion] = lambda completion: completion
    at: int = 0
    turn: int = 0

    async def complete(self, tokens: Sequence[int], **how: Any) -> Completion:
        turn, self.turn = self.turn, self.turn + 1
        given = self.ask(list(tokens)) if turn == 1 else tokens
        completion = await self.policy.complete(given, **how)
        return self.say(completion) if turn == self.at else completion


def spelt(tokenizer: Any, *texts: str) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def parts(stage: Any, config: Any) -> dict[str, Any]:
    """Return a rollout's collaborators, but for its policy."""
    prompter = stage.prompter(config)
    named = {"retriever": stage.retriever, "prompter": prompter, "config": config}
    return {**named, "rewards": Rewards.open(config), "actor_id": "actor-0"}


async def played(
    stage: Any, config: Any, lease: Any, said: Sequence[Sequence[int]], **faults: Any
) -> tuple[AuditedPolicy, Trajectory]:
    """A rollout whose policy was heard, with `faults` between the two."""
    stops = StopCheck(stage.prompter(config).decode, ())
    heard = AuditedPolicy(Says(said), stops)
    trajectory = await rollout(lease, policy=Between(heard, **faults), **parts(stage, config))
    heard.check(trajectory)
    return heard, trajectory


def other(completion: Completion) -> Completion:
    """With another id in the second place."""
    tokens = completion.tokens.copy()
    tokens[1] += 1
    return replace(completion, tokens=tokens)


def shorter(completion: Completion) -> Completion:
    """Without its stop tag."""
    kept = (each[:-1] for each in (completion.tokens, completion.logprobs, completion.versions))
    return Completion(*kept, completion.finish_reason)


async def test_a_sound_rollout_passes(stage: Any, config_for: Any, lease_for: Any) -> None:
    config = config_for()
    audit = TokenAudit(stage.prompter(config), config)
    policy = Says(spelt(stage.tokenizer, SEARCH, SEARCH, ANSWER))
    trajectory = await audit.rollout(lease_for(), policy=policy, **parts(stage, config))
    assert len(trajectory.turns) == 3 and trajectory.reward == 1.0
    assert audit.gauges() == {"actor/token_mismatch": 0.0}


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"say": other}, r"turn 1: prompt and what went before differ from position 8 on: \[\d+, "),
        ({"say": other, "at": 1}, "turn 1: trained and sampled ids differ from position"),
        ({"say": shorter}, "turn 1: prompt and what went before differ from position 11 on"),
        ({"ask": lambda ids: ids[:-1]}, "turn 0: observation on record and as read differ"),
        ({"ask": lambda ids: [*ids, 5]}, "turn 0: observation on record and as read differ"),
        ({"ask": lambda ids: ids[1:]}, "turn 1: prompt and what went before .* position 0 on"),
        ({"ask": lambda ids: ids[-20:]}, "turn 1: prompt and what went before .* position 0 on"),
    ],
)
async def test_what_changes_on_its_way_is_named(
    stage: Any, config_for: Any, lease_for: Any, faults: dict[str, Any], words: str
) -> None:
    said = spelt(stage.tokenizer, SEARCH, ANSWER)
    with pytest.raises(TokenMismatch, match=words):
        await played(stage, config_for(), lease_for(), said, **faults)


async def test_a_prompt_that_was_tokenised_again_is_named(
    stage: Any, bpe_tokenizer: Any, config_for: Any, lease_for: Any
) -> None:
    """The policy spelt its query letter by letter; the tokenizer would not."""
    stage.tokenizer = bpe_tokenizer
    before, query, after = "<search> ", "mayor", " </search>"
    torn = list(chain.from_iterable(spelt(bpe_tokenizer, before, *query, after)))
    said = [torn, *spelt(bpe_tokenizer, ANSWER)]
    settings = config_for(max_action_tokens=60, max_model_len=400)
    _, trajectory = await played(stage, settings, lease_for(), said)
    at = len(trajectory.prompt_tokens)
    with pytest.raises(TokenMismatch, match="turn 1: prompt and what went before") as raised:
        await played(
            stage,
            settings,
            lease_for(),
            said,
            ask=lambda ids: bpe_tokenizer.encode(bpe_tokenizer.decode(ids)),
        )
    position = int(str(raised.value).partition("position ")[2].split()[0])
    assert at - 1 <= position < at + len(torn)


def only(prompt: Any, turns: tuple[Turn, ...], trajectory: Trajectory) -> Trajectory:
    """The same with another sequence."""
    return replaced(trajectory, sequences=(TokenSequence(prompt, turns),))


def changed(trajectory: Trajectory, number: int, **fields: Any) -> Trajectory:
    """The same, but for one turn."""
    turns = list(trajectory.turns)
    turns[number] = replaced(turns[number], **fields)
    return only(trajectory.prompt_tokens, tuple(turns), trajectory)


def dropped(trajectory: Trajectory) -> Trajectory:
    """Without the last token of its first observation."""
    return changed(trajectory, 0, observation_tokens=trajectory.turns[0].observation_tokens[:-1])


def torn(trajectory: Trajectory) -> Trajectory:
    """Its second turn stands in a sequence of its own."""
    first, second = ((turn,) for turn in trajectory.turns)
    parts = (TokenSequence(trajectory.prompt_tokens, turns) for turns in (first, second))
    return replaced(trajectory, sequences=tuple(parts))


def untrained_stop(trajectory: Trajectory) -> Trajectory:
    """Its first turn's stop tag was moved from what is trained to what was read."""
    turn = trajectory.turns[0]
    names = ("action_tokens", "behaviour_logprobs", "policy_versions")
    kept = {name: getattr(turn, name)[:-1] for name in names}
    read = np.concatenate([turn.action_tokens[-1:], turn.observation_tokens])
    return changed(trajectory, 0, **kept, observation_tokens=read)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dropped, "turn 0: observation on record and as read"),
        (lambda t: changed(t, 1, action_tokens=t.turns[1].action_tokens[::-1]), "turn 1: trained"),
        (lambda t: only(t.prompt_tokens[1:], t.turns, t), "prompt on record"),
        (lambda t: only(t.prompt_tokens, t.turns[:1], t), "turns: 1 are on record, 2 were"),
        (untrained_stop, "turn 0: trained and sampled ids differ from position 11 on"),
        (torn, "sequences: 2 are on record, one went through the policy"),
    ],
)
async def test_a_record_of_something_else_is_named(
    stage: Any, config_for: Any, lease_for: Any, change: Any, words: str
) -> None:
    said = spelt(stage.tokenizer, SEARCH, ANSWER)
    heard, trajectory = await played(stage, config_for(), lease_for(), said)
    with pytest.raises(TokenMismatch, match=words):
        heard.check(change(trajectory))


async def test_a_buffer_that_is_used_again_is_noticed(
    stage: Any, config_for: Any, lease_for: Any
) -> None:
    """The first turn's record points at a buffer that changes under it."""
    kept: list[np.ndarray] = []

    def reuse(ids: list[int]) -> list[int]:
        kept[0][0] += 1
        return ids

    def keep(completion: Completion) -> Completion:
        kept.append(completion.tokens)
        return completion

    said = spelt(stage.tokenizer, SEARCH, ANSWER)
    with pytest.raises(TokenMismatch, match=r"turn 0: trained and sampled ids .* position 7 on"):
        await played(stage, config_for(), lease_for(), said, ask=reuse, say=keep)


async def test_a_stop_tag_that_is_missing_is_named_and_counted(
    stage: Any, config_for: Any, lease_for: Any
) -> None:
    """As of an engine that does not keep what it stops at."""
    config = config_for()
    audit = TokenAudit(stage.prompter(config), config)
    said = spelt(stage.tokenizer, SEARCH, "<answer> kelu")
    with pytest.raises(TokenMismatch, match=r"turn 1: stop: .* at position \d+ are none"):
        await audit.rollout(lease_for(), policy=Says(said), **parts(stage, config))
    assert audit.gauges() == {"actor/token_mismatch": 1.0}


async def test_a_completion_that_was_cut_needs_no_stop(
    stage: Any, config_for: Any, lease_for: Any
) -> None:
    config = config_for(max_turns=0)
    audit = TokenAudit(stage.prompter(config), config)
    policy = Says(spelt(stage.tokenizer, "<answer> kelu"), "length")
    trajectory = await audit.rollout(lease_for(), policy=policy, **parts(stage, config))
    assert trajectory.answer is None and audit.mismatches == 0


@pytest.mark.parametrize(
    ("name", "text", "ends"),
    [
        ("word_tokenizer", ANSWER, True),
        ("bpe_tokenizer", ANSWER, True),
        ("qwen_tokenizer", ANSWER, True),
        ("llama_tokenizer", "<answer>北京</answer>", True),
        ("qwen_tokenizer", "<search>x</search>.", True),  # its last token is ">."
        ("qwen_tokenizer", "</answer> kelu", False),
        ("word_tokenizer", f"{ANSWER} kelu", False),
        ("qwen_tokenizer", "<answer> kelu </answer", False),
        ("qwen_tokenizer", "x", False),
    ],
)
def test_a_stop_is_what_the_last_token_completes(
    request: pytest.FixtureRequest, name: str, text: str, ends: bool
) -> None:
    tokenizer = request.getfixturevalue(name)
    stops = StopCheck(lambda ids: tokenizer.decode(ids.tolist()), ())
    assert stops.end(np.array(tokenizer.encode(text), np.int32), STOPS) == ends


def test_an_end_token_is_a_stop(qwen_tokenizer: Any) -> None:
    said = np.array(qwen_tokenizer.encode("kelu<|im_end|>"), np.int32)
    decode = lambda ids: qwen_tokenizer.decode(ids.tolist())  # noqa: E731
    assert StopCheck(decode, {qwen_tokenizer.eos_token_id}).end(said, ())
    assert not StopCheck(decode, ()).end(said, ())


async def test_an_end_token_of_the_model_folder_ends_a_completion(
    stage: Any, config_for: Any, lease_for: Any, tmp_path: Path
) -> None:
    said = spelt(stage.tokenizer, "mayor of bore")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said[0][-1]}))
    config = config_for(max_turns=0)
    config = replaced(config, model=replaced(config.model, path=str(tmp_path)))
    audit = TokenAudit(stage.prompter(config), config)
    await audit.rollout(lease_for(), policy=Says(said), **parts(stage, config))
    assert audit.mismatches == 0


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def call(prompt: Sequence[int], *said: int) -> Call:
    """A call of a program; each of its tokens has numbers of its own."""
    logprobs, versions = -np.arange(len(said), dtype=np.float32), ids(*range(len(said)))
    return Call(ids(*prompt), Completion(ids(*said), logprobs, versions, "stop"), 0.0, 1.0)


CALLS = (
    call([1, 2], 3, 4),
    call([1, 2, 3, 4, 5], 6, 7),
    call([8, 9], 3, 4),
    call([8, 9], 3, 4),  # again, alike
)


def told(number: int, turn: int, **fields: Any) -> tuple[TokenSequence, ...]:
    """The calls merged, but for one turn of one sequence."""
    sequences = list(merged(CALLS))
    turns = list(sequences[number].turns)
    turns[turn] = replaced(turns[turn], **fields)
    sequences[number] = replaced(sequences[number], turns=tuple(turns))
    return tuple(sequences)


def asked(prompt: Any) -> tuple[TokenSequence, ...]:
    """The calls merged, but for the second sequence's prompt."""
    first, second, third = merged(CALLS)
    return first, replaced(second, prompt_tokens=prompt), third


def test_a_programs_calls_pass_once_each(stage: Any, config_for: Any) -> None:
    audit = TokenAudit(stage.prompter(config := config_for()), config)
    sequences = merged(CALLS)
    assert [len(each.turns) for each in sequences] == [2, 1, 1]
    audit.check(sequences, CALLS)
    audit.check(sequences[::-1], CALLS[::-1])
    audit.check(told(0, 1, observation_tokens=ids(9)), CALLS)  # which nobody read
    assert audit.gauges() == {"actor/token_mismatch": 0.0}


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        (merged(CALLS)[:2], r"calls: 1 of 4 stand in no sequence, .* sampled \[3, 4\]"),
        ((*merged(CALLS), merged(CALLS)[1]), r"sequence 4, turn 0: trained ids \[3, 4\] were"),
        (told(0, 1, action_tokens=ids(6, 8)), r"sequence 1, turn 1: trained ids \[6, 8\] were s"),
        (
            told(0, 0, observation_tokens=ids(6)),
            r"sequence 1, turn 1: what stands before it and as read differ from position 4 on: "
            r"\[6\] and \[5\]",
        ),
        (told(0, 0, observation_tokens=ids()), "sequence 1, turn 1: what .* from position 4 on"),
        (asked(ids(8, 1)), r"sequence 2, turn 0: what .* position 1 on: \[1\] and \[9\]"),
        (asked(ids(8, 9, 9)), r"sequence 2, turn 0: what .* position 2 on: \[9\] and \[\]"),
        (asked(ids(1, 2)), r"sequence 2, turn 0: what .* position 0 on: \[1, 2\] and \[8, 9\]"),
        (told(0, 0, policy_versions=ids(0, 9)), "sequence 1, turn 0: log-probs or versions on"),
        (told(1, 0, behaviour_logprobs=np.float32([0, 1])), "sequence 2, turn 0: log-probs or ver"),
    ],
)
def test_sequences_of_anything_else_are_named_and_counted(
    stage: Any, config_for: Any, sequences: tuple[TokenSequence, ...], words: str
) -> None:
    audit = TokenAudit(stage.prompter(config := config_for()), config)
    with pytest.raises(TokenMismatch, match=words):
        audit.check(sequences, CALLS)
    assert audit.gauges() == {"actor/token_mismatch": 1.0}
