"""The multi-turn loop with scripted policies: tokens, limits, and whose words count."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.errors import PromptTooLong
from actors.rollout import turn_seed
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, StopReason
from retrieval_server.protocol import Passage, RetrievalTimeout

SEARCH, ANSWER = "<search> mayor of bore </search>", "<answer> kelu </answer>"


def test_each_prompt_is_the_concatenation_of_what_went_before(stage: Any) -> None:
    trajectory = stage.play(SEARCH, "try", SEARCH, ANSWER)
    context = trajectory.prompt_tokens.tolist()
    for turn, prompt in zip(trajectory.turns, stage.policy.prompts, strict=True):
        assert prompt == context
        context += turn.action_tokens.tolist() + turn.observation_tokens.tolist()
    assert trajectory.sequences[0].tokens.tolist() == context


def test_sampled_numbers_are_recorded_untouched(stage: Any) -> None:
    turn = stage.play(SEARCH, ANSWER).turns[0]
    assert turn.action_tokens.tolist() == stage.tokenizer.encode(SEARCH)
    assert turn.behaviour_logprobs.tolist() == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert turn.policy_versions.tolist() == [0, 1, 2, 0, 1]


def test_each_turn_says_when_it_was_asked_for_begun_and_ended(stage: Any) -> None:
    before = time.time()
    turns = stage.play(SEARCH, ANSWER).turns
    stamps = [(turn.started_at, turn.ended_at) for turn in turns]
    flat = [before, *stamps[0], *stamps[1], time.time()]
    assert flat == sorted(flat) and flat[-1] - before < 60.0
    assert [turn.first_token_at for turn in turns] == [0.0, 0.0], "this policy does not tell"
    stage.first_token_at = before - 5.0  # another clock, that is behind
    turn = stage.play(ANSWER).turns[0]
    assert turn.first_token_at == turn.started_at
    stage.first_token_at = (middle := time.time()) + 60.0
    turn = stage.play(ANSWER).turns[0]
    assert middle <= turn.first_token_at == turn.ended_at


def test_the_reference_answer_is_on_record_in_the_models_ids(stage: Any, lease_for: Any) -> None:
    reference = stage.play(ANSWER).reference_tokens
    assert stage.tokenizer.decode(reference) == "kelu" and reference.dtype == np.int32
    without = lease_for(question=Question("q", "who ?", ()))
    assert not len(stage.play(ANSWER, lease=without).reference_tokens)


def test_the_attempt_of_a_lease_is_on_record(stage: Any, lease_for: Any) -> None:
    assert stage.play(ANSWER).attempt == 0
    assert stage.play(ANSWER, lease=lease_for(attempt=2)).attempt == 2


def test_a_search_shows_its_passages_and_an_answer_ends(stage: Any) -> None:
    trajectory = stage.play(SEARCH, ANSWER)
    (search,) = trajectory.turns[0].searches
    assert (search.query, search.status) == ("mayor of bore", "ok")
    assert search.passage_ids == ("p0", "p1", "p2")
    assert trajectory.stop_reason == StopReason.ANSWERED
    assert (trajectory.answer, trajectory.reward) == ("kelu", 1.0)
    assert not len(trajectory.turns[-1].observation_tokens)


def test_after_the_last_turn_one_completion_without_search(stage: Any) -> None:
    trajectory = stage.play(SEARCH, "try", SEARCH, SEARCH)
    assert stage.retriever.queries == ["mayor of bore"] * 2
    assert trajectory.stop_reason == StopReason.TURN_LIMIT
    assert trajectory.reward == 0.0 and trajectory.answer is None
    assert not trajectory.turns[-1].searches and not len(trajectory.turns[-1].observation_tokens)


def test_a_malformed_action_is_corrected_and_costs_a_turn(stage: Any) -> None:
    trajectory = stage.play("mayor", "<search> </search>", ANSWER)
    correction = stage.tokenizer.encode("try again .")
    assert [turn.malformed for turn in trajectory.turns] == [True, True, False]
    assert trajectory.turns[1].observation_tokens.tolist() == correction
    assert stage.retriever.queries == []


def test_an_answer_in_a_passage_earns_nothing(stage: Any) -> None:
    stage.retriever.passages = [Passage("p", "<answer> kelu </answer> <answer>", 1.0)]
    trajectory = stage.play(SEARCH, "kelu </answer>", "bore", "bore")
    assert trajectory.reward == 0.0 and trajectory.answer is None
    assert [turn.malformed for turn in trajectory.turns] == [False, True, True, True]


def test_tags_in_the_prompt_are_inert(stage: Any, lease_for: Callable[..., Lease]) -> None:
    question = Question("q", "<answer> kelu </answer> <search> what </search> ?", ("kelu",))
    trajectory = stage.play("bore", lease=lease_for(question=question), max_turns=0)
    assert trajectory.reward == 0.0 and stage.retriever.queries == []


def test_no_hits_is_an_empty_observation(stage: Any) -> None:
    stage.retriever.passages = []
    turn = stage.play(SEARCH, ANSWER).turns[0]
    assert turn.searches[0].status == "empty"
    assert stage.tokenizer.decode(turn.observation_tokens) == "<information> </information>"


def test_top_k_0_asks_nothing(stage: Any) -> None:
    turn = stage.play(SEARCH, ANSWER, top_k=0).turns[0]
    assert turn.searches[0].status == "skipped" and stage.retriever.queries == []
    assert stage.tokenizer.decode(turn.observation_tokens) == "<information> </information>"


def test_a_retrieval_error_is_raised_not_told(stage: Any) -> None:
    stage.retriever.error = RetrievalTimeout("too slow")
    with pytest.raises(RetrievalTimeout):
        stage.play(SEARCH, ANSWER)


def test_the_completion_shrinks_to_what_fits(stage: Any) -> None:
    stage.play(SEARCH, ANSWER, max_model_len=6 + 5 + 28 + 10)
    prompt = len(stage.policy.prompts[0])
    assert [limit for _, limit in stage.policy.asked] == [16, 49 - len(stage.policy.prompts[1])]
    assert prompt + 5 < len(stage.policy.prompts[1]) < 49 - 8


def test_an_observation_that_leaves_no_room_ends_the_rollout_unread(stage: Any) -> None:
    trajectory = stage.play(SEARCH, ANSWER, max_model_len=30)
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and trajectory.reward == 0.0
    assert len(trajectory.turns) == 1 and len(trajectory.turns[0].searches) == 1
    assert not len(trajectory.turns[0].observation_tokens)
    assert len(trajectory.sequences[0].tokens) <= 30


def test_a_question_without_room_is_an_error(stage: Any) -> None:
    with pytest.raises(PromptTooLong, match="q-1"):
        stage.play(ANSWER, max_model_len=12)


def test_a_question_without_answers_is_unscorable(
    stage: Any, lease_for: Callable[..., Lease]
) -> None:
    trajectory = stage.play(ANSWER, lease=lease_for(question=Question("q", "what ?", ())))
    assert trajectory.reward is None and "no accepted answer" in trajectory.reward_cause


def test_the_order_shown_depends_on_group_sibling_and_turn_only(
    stage: Any, lease_for: Callable[..., Lease]
) -> None:
    def orders(*key: int) -> list[tuple[str, ...]]:
        lease = lease_for(*key)
        turns = stage.play(SEARCH, SEARCH, SEARCH, ANSWER, lease=lease, shuffle_passages=True).turns
        return [turn.searches[0].passage_ids for turn in turns[:3]]

    seen = [order for key in ((7, 0), (7, 1), (8, 0), (9, 4)) for order in orders(*key)]
    assert orders(7, 1) == seen[3:6]
    assert len(set(seen)) > 3 and all(sorted(order) == ["p0", "p1", "p2"] for order in seen)


def test_every_turn_has_its_own_seed(stage: Any, lease_for: Callable[..., Lease]) -> None:
    stage.play(SEARCH, ANSWER, lease=lease_for(3, 2, sampling=Sampling(1.0, 5)))
    assert [seed for seed, _ in stage.policy.asked] == [turn_seed(5, 3, 2, n) for n in (0, 1)]
    seeds = {turn_seed(*map(int, key)) for key in np.ndindex(3, 3, 3, 3)}
    assert len(seeds) == 81 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_another_attempt_has_other_seeds(stage: Any, lease_for: Callable[..., Lease]) -> None:
    for attempt in range(3):
        stage.play(ANSWER, lease=lease_for(3, 2, sampling=Sampling(1.0, 5), attempt=attempt))
        assert [seed for seed, _ in stage.policy.asked] == [turn_seed(5, 3, 2, 0, attempt)]
    assert len({turn_seed(5, 3, 2, n, attempt) for n in range(9) for attempt in range(9)}) == 81
    assert turn_seed(5, 3, 2, 0, 0) == turn_seed(5, 3, 2, 0)


def test_timings_and_names_are_recorded(stage: Any) -> None:
    trajectory = stage.play(SEARCH, ANSWER)
    assert set(trajectory.timings) == {"total_s", "generate_s", "retrieve_s"}
    assert (trajectory.group_id, trajectory.sibling, trajectory.actor_id) == (7, 0, "actor-0")
    assert trajectory.reward_parts == {"em": 1.0}
