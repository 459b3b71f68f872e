"""The transformers policy against plain forward passes, alone and in a batch."""

import asyncio
import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.environments.search_r1 import STOP_TAGS
from actors.errors import GenerationFailed
from actors.policies.base import Completion
from actors.policies.transformers import TransformersPolicy, multiply_head

PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12], [20, 21], [9] * 30]


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_path).eval()


@pytest.fixture
def policy(model: Any, word_tokenizer: Any) -> TransformersPolicy:
    return TransformersPolicy(model, word_tokenizer, version=3)


@torch.no_grad()
def logprobs(model: Any, prompt: Sequence[int], sampled: Any, temperature: float) -> np.ndarray:
    tokens = torch.tensor([[*prompt, *sampled.tolist()]])
    scores = (model(tokens).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return scores[range(len(sampled)), tokens[0, len(prompt) :]].numpy()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], stops: set[int], most: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


async def together(
    policy: TransformersPolicy,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    most: int = 12,
    stops: tuple[str, ...] = STOP_TAGS,
) -> list[Completion]:
    asked = (
        policy.complete(
            prompt, temperature=temperature, seed=seed, max_tokens=most + seed, stops=stops
        )
        for seed, prompt in enumerate(prompts)
    )
    return await asyncio.gather(*asked)


async def two_turns(
    policy: TransformersPolicy, prompts: Sequence[Sequence[int]]
) -> list[tuple[list[int], Completion]]:
    firsts = await together(policy, prompts, 1.0)
    contexts = [
        [*prompt, *first.tokens.tolist(), 5, *[7] * number]
        for number, (prompt, first) in enumerate(zip(prompts, firsts, strict=True))
    ]
    return list(zip(contexts, await together(policy, contexts, 1.0), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_are_those_of_a_plain_forward_after_temperature(
    policy: TransformersPolicy, model: Any, temperature: float
) -> None:
    done = await together(policy, PROMPTS, temperature)
    for prompt, one in zip(PROMPTS, done, strict=True):
        expected = logprobs(model, prompt, one.tokens, temperature)
        np.testing.assert_allclose(one.logprobs, expected, atol=2e-5)


async def test_a_completion_says_when_its_first_token_was_there(policy: TransformersPolicy) -> None:
    before = time.time()
    done = await together(policy, PROMPTS, 1.0)
    assert all(before <= one.first_token_at <= time.time() for one in done)


async def test_a_second_turn_continues_from_what_the_first_computed(
    policy: TransformersPolicy, model: Any
) -> None:
    for context, one in await two_turns(policy, PROMPTS * 4):
        expected = logprobs(model, context, one.tokens, 1.0)
        np.testing.assert_allclose(one.logprobs, expected, atol=2e-5)


async def test_greedy_is_naive_generation_whoever_shares_the_batch(
    policy: TransformersPolicy, model: Any, word_tokenizer: Any
) -> None:
    stops = set(word_tokenizer.convert_tokens_to_ids(["</search>", "</answer>", "[EOS]"]))
    for seed, one in enumerate(await together(policy, PROMPTS, 0.0)):
        assert one.tokens.tolist() == greedy(model, PROMPTS[seed], stops, 12 + seed)


async def test_a_rollout_samples_the_same_alone_and_in_a_batch(policy: TransformersPolicy) -> None:
    batched = await together(policy, PROMPTS, 1.0)
    for seed, prompt in enumerate(PROMPTS):
        alone = await policy.complete(
            prompt, temperature=1.0, seed=seed, max_tokens=12 + seed, stops=STOP_TAGS
        )
        assert alone.tokens.tolist() == batched[seed].tokens.tolist()


async def test_sampling_follows_the_model_s_distribution(
    policy: TransformersPolicy, model: Any
) -> None:
    asked = (
        policy.complete([5, 6, 7], temperature=1.0, seed=seed, max_tokens=1, stops=STOP_TAGS)
        for seed in range(4000)
    )
    first = [int(one.tokens[0]) for one in await asyncio.gather(*asked)]
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).numpy()
    counted = np.bincount(first, minlength=len(expected)) / len(first)
    assert np.abs(counted - expected).max() < 0.03


async def test_it_stops_at_tags_and_end_and_says_which_weights(
    policy: TransformersPolicy, word_tokenizer: Any
) -> None:
    stops = word_tokenizer.convert_tokens_to_ids(["</search>", "</answer>", "[EOS]"])
    for one in await together(policy, PROMPTS * 8, 1.0):
        stopped = bool(np.isin(one.tokens[-1], stops))
        assert not np.isin(one.tokens[:-1], stops).any()
        assert one.finish_reason == ("stop" if stopped else "length")
        assert set(one.versions.tolist()) == {3}


async def test_without_tags_to_stop_at_only_the_end_token_does(
    model: Any, word_tokenizer: Any
) -> None:
    policy = TransformersPolicy(model, word_tokenizer)
    end, tag = word_tokenizer.eos_token_id, word_tokenizer.convert_tokens_to_ids("</search>")
    done = await together(policy, PROMPTS * 8, 1.0, 40, ())
    assert any(tag in one.tokens[:-1] for one in done)
    for one in done:
        assert end not in one.tokens[:-1]
        assert one.finish_reason == ("stop" if one.tokens[-1] == end else "length")


async def test_each_request_ends_at_its_own_stops(policy: TransformersPolicy) -> None:
    apart = [await together(policy, PROMPTS * 8, 1.0, 40, stops) for stops in (STOP_TAGS, ())]
    mixed = await asyncio.gather(
        *(together(policy, PROMPTS * 8, 1.0, 40, stops) for stops in (STOP_TAGS, ()))
    )
    said = [[[one.tokens.tolist() for one in each] for each in both] for both in (apart, mixed)]
    assert said[0] == said[1] and said[0][0] != said[0][1]


@pytest.mark.slow
async def test_tags_of_several_tokens_stop_by_their_text(
    spoken_model_path: Path, bpe_tokenizer: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(spoken_model_path)
    policy = TransformersPolicy(model, bpe_tokenizer)
    prompt = bpe_tokenizer.encode("what is")
    one = await policy.complete(prompt, temperature=0.0, seed=0, max_tokens=60, stops=STOP_TAGS)
    text = bpe_tokenizer.decode(one.tokens.tolist())
    assert text == " <search> mayor of bore </search>"
    assert one.finish_reason == "stop"


async def test_every_token_is_told_when_it_is_sampled(model: Any, word_tokenizer: Any) -> None:
    told: list[list[int]] = [[] for _ in PROMPTS]
    policy = TransformersPolicy(
        model, word_tokenizer, heard=lambda place, token: told[place].append(token)
    )
    done = await together(policy, PROMPTS, 1.0)
    assert told == [one.tokens.tolist() for one in done]
    assert len({len(one.tokens) for one in done}) > 1  # some end before others


def test_an_interrupt_ends_all_without_waiting_for_the_completion(
    model: Any, word_tokenizer: Any
) -> None:
    told, left = [], []

    def interrupted(*what: int) -> None:
        told.append(what)
        raise KeyboardInterrupt

    async def ask() -> None:
        try:
            policy = TransformersPolicy(model, word_tokenizer, heard=interrupted)
            await policy.complete(
                PROMPTS[0], temperature=1.0, seed=0, max_tokens=12, stops=STOP_TAGS
            )
        finally:
            left.append(True)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(ask())
    assert (len(told), left) == (1, [True])


@torch.no_grad()
def test_a_head_in_float32_rounds_no_logit(tiny_model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16).eval()
    tokens = torch.tensor([[5, 6, 7]])
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    whole = hidden.float() @ model.get_output_embeddings().weight.float().t()
    assert not torch.equal(multiply_head(model, "")(tokens).logits.float(), whole)
    torch.testing.assert_close(multiply_head(model, "float32")(tokens).logits, whole)


async def test_other_weights_are_used_and_labelled(policy: TransformersPolicy, model: Any) -> None:
    own = {name: weight.clone() for name, weight in model.named_parameters()}
    before = await together(policy, PROMPTS, 0.0)
    policy.load({name: -weight for name, weight in own.items()}, 4)
    after = await together(policy, PROMPTS, 0.0)
    expected = logprobs(model, PROMPTS[1], after[1].tokens, 1.0)
    policy.load(own, 3)
    assert set(after[0].versions.tolist()) == {4}
    assert [a.tokens.tolist() for a in after] != [b.tokens.tolist() for b in before]
    np.testing.assert_allclose(after[1].logprobs, expected, atol=2e-5)


async def test_a_model_that_fails_is_named_to_everybody(policy: TransformersPolicy) -> None:
    asked = (
        policy.complete([t], temperature=1.0, seed=0, max_tokens=4, stops=STOP_TAGS)
        for t in (5, 10**6)
    )
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(result, GenerationFailed) for result in results)


async def test_a_fault_of_the_program_reaches_those_who_wait(
    policy: TransformersPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_batch", lambda requests, _: requests[0].nothing)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it is reported there too
    with pytest.raises(AttributeError, match="nothing"):
        await asyncio.wait_for(
            policy.complete([5], temperature=1.0, seed=0, max_tokens=4, stops=STOP_TAGS), 5.0
        )


def test_an_attention_that_adds_its_mask_is_refused(model: Any, bpe_tokenizer: Any) -> None:
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attention 'eager': load the model with"):
        TransformersPolicy(other, bpe_tokenizer)
