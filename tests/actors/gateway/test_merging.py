"""Calls become the sequences that the engine read and sampled, id for id."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from actors.errors import TooManyCalls
from actors.gateway.calls import Call
from actors.gateway.merging import MOST_BYTES, Merging, merged
from actors.policies.base import Completion
from actors.token_audit import require_recorded
from configs.runtime.files import MOST_IDS
from configs.schema import LearnerConfig
from learner.batch import build
from replay.codec import MAX_SEQUENCES, MAX_TURNS, encode_trajectory
from replay.protocol import Batch
from replay.trajectory import Sampling, StopReason, TokenSequence, Trajectory
from tests.actors.gateway.conversations import Program, program, stammerer

STEP = 10  # beyond all versions
TOKENIZERS = ("qwen_tokenizer", "llama_tokenizer", "demo_tokenizer")
Told = tuple[float, int] | None  # of a sampled token: its log-prob and version


@dataclass
class Written:
    """A sequence written out: its ids, what was told of each, and where its turns are malformed."""

    begun: float
    last: int = 0
    ids: list[int] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    malformed: list[bool] = field(default_factory=list)


def naive(calls: Sequence[Call]) -> list[Written]:
    """The rule, a token at a time: the longest that a call's prompt begins with, of equal ones the
    last that was added to; in the order of the first calls' starts."""
    found: list[Written] = []
    for number, call in enumerate(calls):
        prompt, best = call.prompt.tolist(), None
        for each in found:
            if prompt[: len(each.ids)] != each.ids:
                continue
            if best is None or (len(each.ids), each.last) > (len(best.ids), best.last):
                best = each
        if best is None:
            found.append(best := Written(call.started_at))
        read = prompt[len(best.ids) :]
        said = call.completion
        best.ids += read + said.tokens.tolist()
        best.told += [None] * len(read)
        best.told += zip(said.logprobs.tolist(), said.versions.tolist(), strict=True)
        best.malformed.append(call.malformed)
        best.last = number
    return sorted(found, key=lambda each: each.begun)


def written(sequence: TokenSequence) -> Written:
    """The same of a record."""
    found = Written(sequence.turns[0].started_at, ids=sequence.tokens.tolist())
    found.told += [None] * len(sequence.prompt_tokens)
    for turn in sequence.turns:
        sampled = turn.behaviour_logprobs.tolist(), turn.policy_versions.tolist()
        found.told += zip(*sampled, strict=True)
        found.told += [None] * len(turn.observation_tokens)
        found.malformed.append(turn.malformed)
    return found


def check(made: Callable[[int], Program], seeds: range) -> None:
    """Compare, and see that all that can happen did."""
    seen, sizes, several = set[str](), set[int](), 0
    for seed in seeds:
        one = made(seed)
        calls = one.play(14)
        sequences = merged(calls)
        expected = [replace(each, last=0) for each in naive(calls)]
        assert [written(each) for each in sequences] == expected, f"seed {seed}"
        names = ["", *map(str, range(2, len(sequences) + 1))]
        assert [each.name for each in sequences] == names
        require_recorded(sequences, calls)
        seen |= one.seen
        sizes.add(len(sequences))
        several += any(len(each.turns) > 1 for each in sequences)
    ways = {name for name in vars(Program) if name[1:].endswith(("s", "s_on", "s_again"))}
    assert seen == ways and {1, 2, 3} <= sizes and several > len(seeds) // 2


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_conversations_merge_into_what_was_read_and_sampled(
    request: pytest.FixtureRequest, name: str
) -> None:
    check(partial(program, request.getfixturevalue(name)), range(1000 // len(TOKENIZERS)))


def test_so_they_do_where_much_continues_by_chance() -> None:
    check(stammerer, range(400))


def test_the_learner_s_rows_are_what_was_read_and_sampled(demo_tokenizer: Any) -> None:
    """Through the codec, and packed: ids, mask, log-probs and how old each token is."""
    conversations = [program(demo_tokenizer, seed).play(14) for seed in range(40)]
    payloads = tuple(
        encode_trajectory(rollout(sibling, merged(calls)))
        for sibling, calls in enumerate(conversations)
    )
    batch = Batch(STEP, (1,), (0,), (payloads,), {}, {}, ())
    share = build(batch, LearnerConfig(micro_batch_tokens=2000), MOST_IDS)
    expected = [each for calls in conversations for each in naive(calls)]
    seen = []
    for micro in share.micro_batches:
        for row, number in enumerate(micro.row_ids.tolist()):
            own, mask = expected[number], micro.loss_mask[row]
            padding = len(mask) - len(own.ids)
            assert micro.tokens[row].tolist() == own.ids + [0] * padding
            assert mask.tolist() == [each is not None for each in own.told] + [False] * padding
            numbers = micro.behaviour_logprobs[row], STEP - 1 - micro.staleness[row]
            told = zip(*(each[mask].tolist() for each in numbers), strict=True)
            assert list(told) == [each for each in own.told if each is not None]
            seen.append(number)
    assert sorted(seen) == list(range(len(expected))) and len(expected) > len(conversations)


def rollout(sibling: int, sequences: tuple[TokenSequence, ...]) -> Trajectory:
    """One of a group."""
    return Trajectory(
        group_id=1, sibling=sibling, question_id="q", kind="train", actor_id="a",
        sampling=Sampling(), sequences=sequences, stop_reason=StopReason.ANSWERED, answer="x",
        reward=float(sibling % 2),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_so_do_ten_thousand(request: pytest.FixtureRequest, name: str) -> None:
    seeds = range(1000, 1001 + 10_000 // len(TOKENIZERS))
    check(partial(program, request.getfixturevalue(name)), seeds)


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def call(prompt: Sequence[int], *said: int, at: float = 0.0, **fields: Any) -> Call:
    """A call that took a second."""
    completion = Completion(
        ids(*said), np.zeros(len(said), np.float32), np.zeros(len(said), np.int32), "stop"
    )
    return Call(ids(*prompt), completion, at, at + 1.0, **fields)


def shape(*calls: Call) -> list[tuple[list[int], list[tuple[list[int], list[int]]]]]:
    """Each sequence's prompt, and its turns' actions and observations."""
    return [
        (
            each.prompt_tokens.tolist(),
            [
                (turn.action_tokens.tolist(), turn.observation_tokens.tolist())
                for turn in each.turns
            ],
        )
        for each in merged(calls)
    ]


def test_a_call_that_goes_on_is_the_next_turn() -> None:
    found = shape(call([1, 2], 3), call([1, 2, 3, 4, 5], 6), call([1, 2, 3, 4, 5, 6], 7))
    assert found == [([1, 2], [([3], [4, 5]), ([6], []), ([7], [])])]


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 9], [2, 3, 4], [1, 2, 4, 3], [8]])
def test_what_does_not_go_on_begins_a_sequence(prompt: list[int]) -> None:
    assert shape(call([1, 2], 3), call(prompt, 6)) == [([1, 2], [([3], [])]), (prompt, [([6], [])])]


def test_the_longest_that_fits_goes_on() -> None:
    calls = call([1], 2), call([1, 2, 9], 3), call([1], 2), call([1, 2, 9, 3], 4)
    assert [len(turns) for _, turns in shape(*calls)] == [3, 1]


def test_of_two_alike_the_one_that_was_told_last_goes_on() -> None:
    first, second = merged([call([1], 2), call([1], 2, malformed=True), call([1, 2], 5)])
    assert [turn.malformed for turn in second.turns] == [True, False]
    assert len(first.turns) == 1 and (first.name, second.name) == ("", "2")


def test_sequences_come_in_the_order_in_which_they_were_asked_for() -> None:
    """A sub-agent's call may end before the first one's."""
    assert [prompt for prompt, _ in shape(call([7], 8, at=2.0), call([1], 2, at=1.0))] == [[1], [7]]


def test_a_turn_has_what_its_call_had() -> None:
    numbers = np.float32([-1.5, -np.inf]), ids(4, 5)
    said = Completion(ids(8, 9), *numbers, "stop", first_token_at=99.0)
    ((turn,),) = (each.turns for each in merged([Call(ids(1), said, 10.0, 12.0, True)]))
    assert turn.behaviour_logprobs.tolist() == [-1.5, -np.inf] and turn.malformed
    assert turn.policy_versions.tolist() == [4, 5]
    assert (turn.started_at, turn.first_token_at, turn.ended_at) == (10.0, 12.0, 12.0)
    with pytest.raises(ValueError, match="read-only"):
        turn.action_tokens[0] = 1


def test_a_clock_that_was_set_back_ends_no_turn_before_its_start() -> None:
    said = replace(call([1], 2).completion, first_token_at=4.0)
    ((turn,),) = (each.turns for each in merged([Call(ids(1), said, 10.0, 5.0)]))
    assert (turn.started_at, turn.first_token_at, turn.ended_at) == (10.0, 10.0, 10.0)


def test_no_calls_make_no_sequences() -> None:
    assert merged([]) == ()


def test_more_than_a_record_holds_is_refused_by_name() -> None:
    apart = [call([number], 1) for number in range(MAX_SEQUENCES + 1)]
    assert len(merged(apart[:-1])) == MAX_SEQUENCES
    with pytest.raises(TooManyCalls, match=r"257 calls make over 256 sequences.* send a conv"):
        merged(apart)
    one = [call([1] * number, 1) for number in range(1, MAX_TURNS + 2)]
    assert len(merged(one[:-1])[0].turns) == MAX_TURNS
    with pytest.raises(TooManyCalls, match=r"1025 calls make a sequence of over 1024 turns"):
        merged(one)


def test_nor_are_more_bytes() -> None:
    """As many calls as are taken fit a record; one more does not, and is not taken."""
    apart = [call([number] * 30_000, 1) for number in range(131)]
    merging = Merging()
    for each in apart[:-1]:
        merging.require_room(each.prompt)
        merging.take(each)
    held = merging.sequences()
    assert len(encode_trajectory(rollout(0, held))) <= merging.bytes <= MOST_BYTES
    for refuse in (merging.take, lambda each: merging.require_room(each.prompt)):
        with pytest.raises(TooManyCalls, match=r"131 calls make over 15 MiB"):
            refuse(apart[-1])
    assert len(merging.sequences()) == len(held) == 130
    merging.take(call([0] * 30_000 + [1] * 9, 5))  # goes on, and adds little


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ids()}, r"Call.prompt must be int32\[n\], n at least 1, got int32\[0\]"),
        ({"prompt": np.array([1])}, r"must be int32.* got int64\[1\]"),
    ],
)
def test_a_call_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(call([1], 2, at=1.0), **fields)
