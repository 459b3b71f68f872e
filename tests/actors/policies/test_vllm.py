"""The real engine: ids, log-probs, stops, seeds and versions are what they are said to be."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from actors.environments.search_r1 import STOP_TAGS
from actors.errors import BadCompletion, EngineDead, EngineUnusable
from actors.policies.base import Completion
from actors.policies.engine import stop_arguments
from actors.policies.outputs import first_token_at, own_logprobs, token_versions
from actors.policies.vllm import VllmPolicy
from configs.schema import ActorsConfig, Config, ModelConfig
from weight_sync.protocol import require_done

engine = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]


def with_engine(test: Any) -> Any:
    for mark in engine:
        test = mark(test)
    return test


@pytest.fixture(scope="session")
def hf_model(spoken_model_path: Path) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(spoken_model_path).eval()


@torch.no_grad()
def hf_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    """float32[n - 1]: log-probs of tokens[1:]."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def never_stops(policy: VllmPolicy) -> VllmPolicy:
    return VllmPolicy(policy.engine, lambda _: {"stop_token_ids": [0], "detokenize": False})


async def sample(policy: Any, prompt: list[int], **changes: Any) -> Completion:
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "stops": STOP_TAGS} | changes
    return await policy.complete(prompt, **settings)


@with_engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_an_hf_forward_after_temperature(
    vllm_policy: Any, hf_model: Any, temperature: float
) -> None:
    for seed in range(4):
        prompt = [40 + seed, 50, 60, 70]
        done = await sample(never_stops(vllm_policy), prompt, seed=seed, temperature=temperature)
        expected = hf_logprobs(hf_model, prompt + done.tokens.tolist(), temperature)[3:]
        assert np.abs(done.logprobs - expected).max() <= 1e-4


@with_engine
async def test_the_engine_tells_when_the_first_token_was_there(vllm_policy: Any) -> None:
    before = time.time()
    done = await sample(never_stops(vllm_policy), [40, 50, 60], max_tokens=8)
    assert before <= done.first_token_at <= time.time()


def test_without_statistics_nobody_tells_when_the_first_token_was_there() -> None:
    told = SimpleNamespace(arrival_time=100.0, first_token_latency=0.5)
    assert first_token_at(told) == 100.5
    told.first_token_latency = 0.0
    assert first_token_at(told) == first_token_at(None) == 0.0


@with_engine
async def test_greedy_takes_the_likeliest_token(vllm_policy: Any, hf_model: Any) -> None:
    prompt = [40, 50, 60, 70]
    done = await sample(never_stops(vllm_policy), prompt, temperature=0.0)
    with torch.no_grad():
        logits = hf_model(input_ids=torch.tensor([prompt + done.tokens.tolist()])).logits[0]
    assert done.tokens.tolist() == logits[3:-1].argmax(-1).tolist()


@with_engine
async def test_a_tag_of_one_token_stops_and_is_kept(
    vllm_policy: Any, tagged_tokenizer: Any
) -> None:
    policy = VllmPolicy(vllm_policy.engine, partial(stop_arguments, tagged_tokenizer))
    done = await sample(policy, tagged_tokenizer.encode("try again"), temperature=0.0)
    expected = tagged_tokenizer.encode(" <search> mayor of bore </search>")
    assert done.tokens.tolist() == expected and done.finish_reason == "stop"
    assert len(expected) == len(done.logprobs) and done.tokens[-1] == expected[-1]


@with_engine
async def test_a_tag_of_several_tokens_stops_and_is_kept(
    vllm_policy: Any, bpe_tokenizer: Any, hf_model: Any
) -> None:
    arguments = partial(stop_arguments, bpe_tokenizer)
    assert "stop_token_ids" not in arguments(STOP_TAGS)
    policy = VllmPolicy(vllm_policy.engine, arguments)
    prompt = bpe_tokenizer.encode("what is")
    done = await sample(policy, prompt, temperature=0.0)
    assert done.tokens.tolist() == bpe_tokenizer.encode(" <search> mayor of bore </search>")
    expected = hf_logprobs(hf_model, prompt + done.tokens.tolist())[len(prompt) - 1 :]
    assert np.abs(done.logprobs - expected).max() <= 1e-4 and done.finish_reason == "stop"


@with_engine
async def test_the_end_token_stops_and_is_kept(vllm_policy: Any, bpe_tokenizer: Any) -> None:
    done = await sample(vllm_policy, bpe_tokenizer.encode("invalid ,"), temperature=0.0)
    expected = [*bpe_tokenizer.encode(" try"), bpe_tokenizer.eos_token_id]
    assert done.tokens.tolist() == expected and done.finish_reason == "stop"


@with_engine
async def test_a_limit_ends_a_completion_by_length(vllm_policy: Any) -> None:
    done = await sample(never_stops(vllm_policy), [40, 50], max_tokens=3)
    assert len(done.tokens) == 3 and done.finish_reason == "length"


@with_engine
async def test_a_stream_tells_the_completion_as_it_comes(
    vllm_policy: Any, tagged_tokenizer: Any
) -> None:
    prompt = tagged_tokenizer.encode("what is")
    policy = VllmPolicy(vllm_policy.engine, partial(stop_arguments, tagged_tokenizer))
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "stops": ("</search>", "bore")}
    whole = await policy.complete(prompt, **asked)
    parts = [delta async for delta in policy.stream(prompt, **asked)]
    assert len(parts) > 2 and [part.done is not None for part in parts[:-1]].count(True) == 0
    for name in ("tokens", "logprobs", "versions"):
        assert np.array_equal(getattr(parts[-1].done, name), getattr(whole, name))
    for name in ("tokens", "logprobs"):
        told = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(told, getattr(whole, name))
    assert all(part.versions == {0} for part in parts)


@with_engine
async def test_a_stream_that_is_left_is_given_up(vllm_policy: Any) -> None:
    policy = never_stops(vllm_policy)
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 200, "stops": ()}
    stream = policy.stream([40, 50], **asked)
    assert len((await anext(stream)).tokens) < 200
    await stream.aclose()
    assert not policy._begun
    while vllm_policy.engine.output_processor.has_unfinished_requests():
        await asyncio.sleep(0.01)


@with_engine
async def test_seeds_reproduce_and_differ(vllm_policy: Any) -> None:
    policy = never_stops(vllm_policy)
    seeds = [7, 7, 8, 2**63 - 1]
    alone = [(await sample(policy, [40, 50], seed=seed)).tokens.tolist() for seed in seeds]
    crowd = await asyncio.gather(*(sample(policy, [40, 50], seed=seed) for seed in seeds * 4))
    assert alone[0] == alone[1] != alone[2] != alone[3]
    assert [done.tokens.tolist() for done in crowd] == alone * 4


@with_engine
async def test_a_crowd_larger_than_a_batch_is_served(vllm_policy: Any) -> None:
    """Prefills cut in two would rewind a CPU generator and kill the engine."""
    policy, prompt = never_stops(vllm_policy), list(range(20, 220))
    done = await asyncio.gather(
        *(sample(policy, [seed, *prompt], seed=seed, max_tokens=4) for seed in range(60))
    )
    assert len(done) == 60


@with_engine
async def test_scores_are_an_hf_forwards_twice(vllm_policy: Any, hf_model: Any) -> None:
    tokens = list(range(30, 94))
    expected = hf_logprobs(hf_model, tokens)
    for _ in range(2):  # the second could come from the prefix cache
        assert np.abs((await vllm_policy.score(tokens))[0] - expected).max() <= 1e-4


@with_engine
async def test_versions_tell_which_weights_sampled_each_token(
    vllm_policy: Any, hf_model: Any, spoken_model_path: Path, tmp_path: Path
) -> None:
    """Weights change amid completions: each token's log-prob is of the version it is labelled with,
    given everything before it."""
    from transformers import Qwen2ForCausalLM

    policy = never_stops(vllm_policy)
    newer = Qwen2ForCausalLM.from_pretrained(spoken_model_path)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(0.9)
    newer.save_pretrained(tmp_path)
    prompts = [[40 + n, 50] for n in range(8)]
    for _ in range(3):  # where this process stands still, they may end before the weights change
        streamed = asyncio.create_task(streamed_versions(policy, [90, 50]))
        running = [
            asyncio.create_task(sample(policy, prompt, seed=n, max_tokens=200))
            for n, prompt in enumerate(prompts)
        ]
        await sample(policy, [60, 50], max_tokens=20)  # in the same batches: all begin before it
        await swap(policy, tmp_path, 17)
        done = await asyncio.gather(*running)
        told, sampled = await streamed
        await swap(policy, spoken_model_path, 0)
        if all(len(set(each.versions.tolist())) > 1 for each in done):
            break
    assert all(set(each.versions.tolist()) == {0, 17} for each in done)
    for may, version in zip(told, sampled, strict=True):  # of each token that a stream tells
        assert version in may
    for prompt, each in zip(prompts, done, strict=True):
        tokens = prompt + each.tokens.tolist()
        by_version = {0: hf_logprobs(hf_model, tokens)[1:], 17: hf_logprobs(newer, tokens)[1:]}
        expected = np.where(each.versions == 0, by_version[0], by_version[17])
        assert np.abs(each.logprobs - expected).max() <= 1e-4
        assert (np.diff(each.versions) >= 0).all()


async def streamed_versions(
    policy: VllmPolicy, prompt: list[int]
) -> tuple[list[frozenset[int]], list[int]]:
    """For each token of a stream: the versions that may have sampled it, and the one that did."""
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 200, "stops": ()}
    parts = [part async for part in policy.stream(prompt, **asked)]
    return [part.versions for part in parts for _ in part.tokens], parts[-1].done.versions.tolist()


async def swap(policy: VllmPolicy, folder: Path, version: int) -> None:
    await policy.pause()
    require_done(
        await policy.call_workers("load_snapshot", str(folder / "model.safetensors"), version)
    )
    await policy.set_policy_version(version)
    await policy.resume()


class Crowd:
    """Rollouts of three turns, four times as many in flight as the engine has seats."""

    SEATS, TURNS = 48, 3

    def __init__(self, policy: VllmPolicy) -> None:
        self.policy = policy
        self.turns = 0  # completions
        self.tasks = [asyncio.create_task(self.roll(n)) for n in range(4 * self.SEATS)]

    async def roll(self, number: int) -> None:
        context = [number % 50 + 3, number // 50 + 3] * 10
        for _ in range(self.TURNS):
            done = await sample(self.policy, context, seed=number, priority=number)
            self.turns += 1
            context += [*done.tokens.tolist(), *range(20, 40)]

    async def until(self, turns: int) -> None:
        while self.turns < turns:
            await asyncio.sleep(0.002)


def crowded(policy: VllmPolicy) -> Crowd:
    never = {"stop_token_ids": [0], "detokenize": False}
    own = VllmPolicy(policy.engine, lambda _: never, statistics=policy.statistics)
    return Crowd(own)


@with_engine
async def test_in_a_crowd_the_oldest_are_served_first(vllm_policy: Any) -> None:
    ended: list[int] = []

    async def ask(number: int) -> None:
        await sample(vllm_policy, [number % 50 + 3, number // 50 + 3] * 10, priority=number)
        ended.append(number)

    vllm_policy.statistics.take_load()
    await vllm_policy.pause()
    tasks = [asyncio.create_task(ask(number)) for number in reversed(range(4 * Crowd.SEATS))]
    await asyncio.sleep(1.0)  # they wait in the engine, the youngest first
    await vllm_policy.resume()
    await asyncio.gather(*tasks)
    half = 2 * Crowd.SEATS
    assert sum(number < half for number in ended[:half]) > 0.9 * half  # as they come: none
    assert vllm_policy.statistics.kv_tokens > 10_000
    load = vllm_policy.statistics.take_load()
    assert load.queued_steps > load.steps / 2 and 0.0 < load.peak_use < 1.0


@with_engine
async def test_in_a_crowd_the_probe_is_in_the_first_batch_after_an_update(vllm_policy: Any) -> None:
    told, before = vllm_policy.statistics, vllm_policy.statistics.preemptions
    again = told.gauges()["sync/prefilled_again_tokens_total"]
    crowd = crowded(vllm_policy)
    for turns in (30, 120, 210):
        await crowd.until(turns)
        await crowd.policy.pause()
        probing = asyncio.create_task(crowd.policy.score(list(range(3, 67))))
        await asyncio.sleep(1.0)  # what ended before is heard of, and the probe waits
        ended = crowd.turns
        await crowd.policy.resume()
        await probing
        assert crowd.turns - ended < 2 * crowd.SEATS  # behind the queue: 3 seats' worth
    await asyncio.gather(*crowd.tasks)
    assert told.gauges()["sync/prefilled_again_tokens_total"] - again > 3 * crowd.SEATS * 20
    assert told.preemptions == before  # updates preempted, and nothing else


def span(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


def test_spans_become_one_version_per_token() -> None:
    spans = [span("0", 0, 2), span("17", 2, 5)]
    assert token_versions(spans, 5).tolist() == [0, 0, 17, 17, 17]


@pytest.mark.parametrize(
    "spans", [None, [span("default", 0, 5)], [span("0", 0, 4)], [span("0", 1, 5)]]
)
def test_unlabelled_tokens_are_an_error(spans: Any) -> None:
    with pytest.raises(BadCompletion):
        token_versions(spans, 5)


class Flat(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.start_indices)


def test_each_positions_first_logprob_is_the_tokens_own() -> None:
    flat = Flat(start_indices=[0, 2], token_ids=[5, 9, 6, 9], logprobs=[-1.0, -0.1, -2.0, -0.2])
    ids = np.array([5, 6], np.int32)
    assert own_logprobs(flat, ids).tolist() == [-1.0, -2.0]
    with pytest.raises(BadCompletion):
        own_logprobs(flat, ids + 1)
    with pytest.raises(BadCompletion):
        own_logprobs(flat, ids[:1])


async def watch(ask: Callable[[], Awaitable[object]], errored: bool = False) -> None:
    """As VllmPolicy watches an engine that is asked thus."""
    engine = SimpleNamespace(errored=errored)
    await VllmPolicy.watch(SimpleNamespace(engine=engine, _deadline_s=0.05, _ask=ask))


async def test_an_engine_is_dead_when_it_says_so_or_says_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr("actors.policies.vllm.WATCH_EVERY_S", 0.01)
    with pytest.raises(EngineDead, match=r"has not answered for 0.05 s"):
        await watch(asyncio.Event().wait)
    with pytest.raises(EngineDead, match="the engine's process is gone"):
        await watch(asyncio.Event().wait, errored=True)


async def test_an_engine_that_answers_is_watched_on(monkeypatch: Any) -> None:
    monkeypatch.setattr("actors.policies.vllm.WATCH_EVERY_S", 0.01)
    answered: list[None] = []

    async def answer() -> None:
        answered.append(None)

    watching = asyncio.ensure_future(watch(answer))
    while len(answered) < 20 and not watching.done():  # many times the deadline
        await asyncio.sleep(0.01)
    assert watching.cancel()


@with_engine
async def test_arguments_that_vllm_refuses_together_are_named(spoken_model_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    lookup = {"prompt_lookup_min": 4, "prompt_lookup_max": 2}
    config = Config(
        model=ModelConfig(path=str(spoken_model_path), dtype="float32", max_model_len=256),
        actors=ActorsConfig(engine={"speculative_config": drafts | lookup}),
    )
    with pytest.raises(
        EngineUnusable, match=r"(?s)with actors\.engine = .* prompt_lookup_min=4 must"
    ):
        await VllmPolicy.start(config)


def engines() -> set[psutil.Process]:
    """The processes of engines that this one has started."""
    children = psutil.Process().children(recursive=True)
    return {each for each in children if "EngineCore" in each.name()}


@with_engine
async def test_an_engine_with_another_head_than_asked_for_serves_nobody(
    spoken_model_path: Path,
) -> None:
    path, other = str(spoken_model_path), "tests.weight_sync.stale_worker.OtherHeadWorker"
    config = Config(
        model=ModelConfig(path=path, dtype="float32", max_model_len=256, head_dtype="float32"),
        actors=ActorsConfig(kv_cache_bytes=64 << 20),
    )
    before = engines()
    with pytest.raises(EngineUnusable, match=r"model\.head_dtype = 'float32': .* \['bfloat16'\]"):
        await VllmPolicy.start(config, worker_extension=other)
    assert not psutil.wait_procs(engines() - before, timeout=30)[1]


@with_engine
async def test_an_engine_that_hangs_is_named(vllm_policy: Any) -> None:
    """It lives, but works no more; nothing else would ever tell."""
    (child,) = vllm_policy.engine.engine_core.resources.engine_manager.processes
    patient = VllmPolicy(vllm_policy.engine, lambda _: {}, deadline_s=2.0)
    await patient._ask()
    os.kill(child.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineDead, match=r"has not answered for 2 s \(actors.engine_deadline"):
            await asyncio.wait_for(patient.watch(), 60.0)
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert len((await sample(vllm_policy, [40, 50, 60])).tokens) > 0
