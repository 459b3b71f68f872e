"""Weights inside a real vLLM engine: it computes what Hugging Face computes from the same ones."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from actors.runner import VerifiedVersions
from configs.schema import ActorsConfig, Config, ModelConfig, WeightSyncConfig
from weight_sync.protocol import require_done
from weight_sync.publisher import Publisher
from weight_sync.subscriber import Subscriber

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]
TOLERANCE, PROBE_TOKENS = 1e-4, 64
SYNC = WeightSyncConfig(probe_tolerance=TOLERANCE, bucket_bytes=200_000)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policy(vllm_policy: Any, spoken_model_path: Path) -> AsyncIterator[Any]:
    """The session's engine; its completions do not stop before `max_tokens`."""
    from actors.policies.vllm import VllmPolicy

    endless = {"ignore_eos": True, "detokenize": False}
    policy = VllmPolicy(vllm_policy.engine, lambda _: endless)
    yield policy
    await load_file(policy, spoken_model_path / "model.safetensors", version=0)
    await policy.set_policy_version(0)


@pytest.fixture(scope="module")
def make_model(spoken_model_path: Path) -> Any:
    """make_model(seed): the same architecture with other weights, as the learner would hold it."""
    from transformers import AutoModelForCausalLM

    def make(seed: int) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(spoken_model_path, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(0.7).add_(noise, alpha=0.1)
        return model

    return make


@torch.no_grad()
def hf_logprobs(model: torch.nn.Module, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    """float32[n - 1]: of tokens[1:]."""
    logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def some_tokens(model: torch.nn.Module, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


async def load_snapshot(policy: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    await load_file(policy, path, version=1)


async def load_file(policy: Any, path: Path, version: int) -> None:
    await policy.pause()
    try:
        require_done(await policy.call_workers("load_snapshot", str(path), version))
    finally:
        await policy.resume()


async def test_snapshots_five_times_in_a_row(policy, make_model, tmp_path) -> None:
    scores = []
    for seed in range(5):
        model = make_model(seed)
        await load_snapshot(policy, tmp_path, dict(model.named_parameters()))
        tokens = some_tokens(model, 64, 0)
        scores.append((await policy.score(tokens))[0])
        assert np.abs(scores[-1] - hf_logprobs(model, tokens)).max() <= TOLERANCE
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.pairwise(scores))


async def test_the_tied_head_follows_the_embedding(policy, make_model, tmp_path) -> None:
    """Only the tied tensor changes: a head left stale would be far off."""
    model = make_model(1)
    await load_snapshot(policy, tmp_path, dict(model.named_parameters()))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1.5)
    await load_snapshot(policy, tmp_path, dict(model.named_parameters()))
    tokens = some_tokens(model, 64, 1)
    assert np.abs((await policy.score(tokens))[0] - hf_logprobs(model, tokens)).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), r"'model.norm.weight': .* has none, actor float32"),
        (lambda t: t.update(extra=torch.zeros(1)), r"'extra': .* float32\[1\], actor has none"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}),
            r"bfloat16\[96\], actor float32\[96\]",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 96)},
            ),
            r"k_proj.weight': .* float32\[64, 96\], actor float32\[96, 96\]",
        ),
    ],
)
async def test_other_tensors_are_refused_whole(policy, make_model, tmp_path, change, said) -> None:
    model = make_model(2)
    await load_snapshot(policy, tmp_path, dict(model.named_parameters()))
    other = dict(make_model(3).named_parameters())
    change(other)
    with pytest.raises(Exception, match=said):
        await load_snapshot(policy, tmp_path, other)
    tokens = some_tokens(model, 32, 2)
    assert np.abs((await policy.score(tokens))[0] - hf_logprobs(model, tokens)).max() <= TOLERANCE


async def test_updates_under_load(policy, make_model, tmp_path) -> None:
    """32 requests in flight over 5 updates: none lost, and every token is its version's own."""
    models = {version: make_model(10 + version) for version in range(16)}
    prompts = [some_tokens(models[0], 8 + i, i) for i in range(32)]
    endpoint = f"ipc://{tmp_path}/weights"
    subscriber = Subscriber("actor-0", endpoint, policy, SYNC)
    following = asyncio.create_task(subscriber.run())
    with Publisher(SYNC, 1, 0, endpoint) as publisher:
        await update(publisher, models, 0)
        for first in (1, 6, 11):  # where this process stands still, all may end between two
            completions = asyncio.gather(
                *(
                    policy.complete(p, temperature=1.0, seed=i, max_tokens=160, stops=())
                    for i, p in enumerate(prompts)
                )
            )
            for version in range(first, first + 5):
                # In the same batches: by its end, every completion has gone on by as many tokens.
                await policy.complete(prompts[0], temperature=1.0, seed=99, max_tokens=12, stops=())
                await update(publisher, models, version)
            done = await asyncio.wait_for(completions, 100)
            assert all(len(completion.tokens) == 160 for completion in done)
            for prompt, completion in zip(prompts, done, strict=True):
                assert (np.diff(completion.versions) >= 0).all()
                check_logprobs(models, prompt, completion)
            if several := sum(len(set(completion.versions)) > 2 for completion in done) > 16:
                break
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert several


async def test_caches_that_are_kept_are_read_by_nobody_who_begins_later(
    policy, make_model, tmp_path
) -> None:
    """Requests in flight go on from what older weights cached; whoever begins anew does not."""
    from actors.policies.vllm import VllmPolicy

    endless = {"ignore_eos": True, "detokenize": False}
    keeping = VllmPolicy(policy.engine, lambda _: endless, keep=True)
    models = {version: make_model(30 + version) for version in range(6)}
    prompt, endpoint = some_tokens(models[0], 96, 5), f"ipc://{tmp_path}/weights"
    subscriber = Subscriber("actor-0", endpoint, keeping, SYNC)
    following = asyncio.create_task(subscriber.run())
    with Publisher(SYNC, 1, 0, endpoint) as publisher:
        await update(publisher, models, 0)
        for version in range(1, 6):  # where this process stands still, it may end before an update
            asked = keeping.complete(prompt, temperature=1.0, seed=1, max_tokens=128, stops=())
            old = asyncio.create_task(asked)
            await keeping.complete(prompt, temperature=1.0, seed=99, max_tokens=12, stops=())
            assert behind(keeping) == 0.0
            await update(publisher, models, version)
            oldest = behind(keeping)
            new = await keeping.complete(prompt, temperature=1.0, seed=2, max_tokens=24, stops=())
            mixed = await asyncio.wait_for(old, 60)
            if len(set(mixed.versions)) > 1 and oldest:
                break
    assert oldest == 1.0
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert behind(keeping) == 0.0
    before = version - 1
    assert set(new.versions.tolist()) == {version}
    assert set(mixed.versions.tolist()) == {before, version}
    check_logprobs(models, prompt, new)
    first = mixed.versions == before
    expected = hf_logprobs(models[before], [*prompt, *mixed.tokens.tolist()])[len(prompt) - 1 :]
    assert np.abs(mixed.logprobs[first] - expected[first]).max() <= TOLERANCE
    with pytest.raises(AssertionError):  # its later tokens saw keys of the version before
        check_logprobs(models, prompt, mixed)


class Crowd:
    """Rollouts of three turns, four times as many in flight as the engine has seats; where one has
    ended, another begins. Each is checked as an actor checks it.
    """

    SEATS, TURNS = 48, 3

    def __init__(self, policy: Any, subscriber: Subscriber) -> None:
        self.over, self.versions = asyncio.Event(), VerifiedVersions(subscriber.serving)
        subscriber.on_verified, subscriber.on_loaded = self.versions.add, self.versions.forget
        self.ended: list[set[int]] = []  # the versions in each rollout
        self.open: list[int] = []  # how many had begun and not ended as each ended
        self._policy, self._numbers, self._begun = policy, itertools.count(), 0
        self.tasks = [asyncio.create_task(self.play()) for _ in range(4 * self.SEATS)]

    async def play(self) -> None:
        """One rollout after the other, until it is over. Raises UnverifiedWeights."""
        while not self.over.is_set():
            begun, number, turns = self.versions.loads, next(self._numbers), []
            context = [number % 50 + 3, number // 50 % 50 + 3] * 10
            for turn in range(self.TURNS):
                done = await self._policy.complete(
                    context,
                    temperature=1.0,
                    seed=number,
                    max_tokens=40,
                    stops=(),
                    priority=number,
                )
                turns.append(SimpleNamespace(policy_versions=done.versions))
                self._begun += not turn
                context += [*done.tokens.tolist(), *range(20, 32)]
            self.ended.append({int(each) for turn in turns for each in turn.policy_versions})
            self.open.append(self._begun - len(self.ended))
            rollout: Any = SimpleNamespace(turns=turns)
            await self.versions.check(rollout, begun, 60.0)

    async def until(self, ended: int) -> None:
        """Until so many have ended. Raises what a rollout raised."""
        while len(self.ended) < ended:
            await asyncio.sleep(0.01)
            for task in self.tasks:
                if task.done():
                    task.result()


async def test_updates_amid_four_rollouts_a_seat(
    vllm_policy, policy, make_model, tmp_path, monkeypatch
) -> None:
    """The probe is answered before all that waits, the oldest rollouts end first, and no token is
    of a version that has not verified.
    """
    steps, resumed = noted(vllm_policy.statistics, policy, monkeypatch)
    models = {version: make_model(50 + version) for version in range(4)}
    endpoint = f"ipc://{tmp_path}/weights"
    subscriber = Subscriber("actor-0", endpoint, policy, SYNC)
    following = asyncio.create_task(subscriber.run())
    with Publisher(SYNC, 1, 0, endpoint) as publisher:
        await update(publisher, models, 0)
        await subscriber.serving.wait()
        crowd = Crowd(policy, subscriber)
        crowd.versions.add(*subscriber.verified)
        for version in (1, 2, 3):
            await crowd.until(len(crowd.ended) + Crowd.SEATS)
            await update(publisher, models, version)
        await crowd.until(len(crowd.ended) + Crowd.SEATS)
        crowd.over.set()
        await asyncio.wait_for(asyncio.gather(*crowd.tasks), 100)
        assert publisher.gauges()["sync/refits"] == 0.0
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    for begun in resumed[1:]:  # a batch of before may be told of after it
        first = steps[begun : begun + 2]
        assert any(PROBE_TOKENS in step.ended for step in first)
        assert max(step.waiting for step in first) > Crowd.SEATS
    assert set.union(*crowd.ended) == {0, 1, 2, 3}
    assert sum(len(each) > 1 for each in crowd.ended) >= Crowd.SEATS
    assert np.median(crowd.open) <= 2 * Crowd.SEATS  # served as they come: nearly all in flight


class Step(NamedTuple):
    """How many requests wait after a step of the engine; the prompts' lengths of those it ended."""

    waiting: int
    ended: list[int]


def noted(told: Any, policy: Any, monkeypatch: Any) -> tuple[list[Step], list[int]]:
    """The engine's steps from now on, and how many there were at each resumption."""
    steps: list[Step] = []
    resumed: list[int] = []
    record, resume = told.record, policy.resume

    def note(scheduler_stats: Any, iteration_stats: Any, **others: Any) -> None:
        if scheduler_stats is not None:
            ended = iteration_stats.finished_requests if iteration_stats else ()
            lengths = [each.num_prompt_tokens for each in ended]
            steps.append(Step(scheduler_stats.num_waiting_reqs, lengths))
        record(scheduler_stats, iteration_stats, **others)

    async def note_resumption() -> None:
        resumed.append(len(steps))
        await resume()

    monkeypatch.setattr(told, "record", note)
    monkeypatch.setattr(policy, "resume", note_resumption)
    return steps, resumed


async def test_drafts_leave_log_probs_and_versions_as_they_are(
    make_model, spoken_model_path, tmp_path
) -> None:
    """Drafts by n-grams, of an engine of its own: a random model takes some of them."""
    from actors.policies.vllm import VllmPolicy

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    engine = {"speculative_config": drafts, "block_size": 64, "max_num_batched_tokens": 512}
    started = await VllmPolicy.start(
        Config(
            model=ModelConfig(path=str(spoken_model_path), dtype="float32", max_model_len=256),
            actors=ActorsConfig(max_num_seqs=8, kv_cache_bytes=64 << 20, engine=engine),
        )
    )
    try:
        await drafting_over_an_update(started, make_model, tmp_path)
        assert started.engine.vllm_config.cache_config.block_size == 64
        assert 0.0 < started.gauges()["actor/accepted_drafts"] < 1.0
    finally:
        started.close()


async def drafting_over_an_update(started: Any, make_model: Any, folder: Path) -> None:
    """Twelve completions of each temperature, some of them begun before a version, ended after."""
    from actors.policies.vllm import VllmPolicy

    endless = {"ignore_eos": True, "detokenize": False}
    policy = VllmPolicy(started.engine, lambda _: endless, statistics=started.statistics)
    models = {version: make_model(40 + version) for version in range(6)}
    prompt, endpoint = some_tokens(models[0], 4, 7) * 6, f"ipc://{folder}/weights"
    subscriber = Subscriber("actor-0", endpoint, policy, SYNC)
    following = asyncio.create_task(subscriber.run())
    with Publisher(SYNC, 1, 0, endpoint) as publisher:
        await update(publisher, models, 0)
        for version in range(1, 6):  # where this process stands still, all may end before it
            temperatures = [1.0, 0.7, 0.0] * 4
            asked = asyncio.gather(
                *(
                    policy.complete(prompt, temperature=each, seed=n, max_tokens=120, stops=())
                    for n, each in enumerate(temperatures)
                )
            )
            await policy.complete(prompt, temperature=0.0, seed=99, max_tokens=12, stops=())
            await update(publisher, models, version)
            done = await asyncio.wait_for(asked, 100)
            for temperature, completion in zip(temperatures, done, strict=True):
                assert len(completion.tokens) == 120 and (np.diff(completion.versions) >= 0).all()
                check_logprobs(models, prompt, completion, temperature or 1.0)
            if any(len(set(completion.versions)) > 1 for completion in done):
                break
        assert publisher.gauges()["sync/refits"] == 0.0
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert any(len(set(completion.versions)) > 1 for completion in done)


def behind(policy: Any) -> float:
    """By how many versions the oldest cache in use lies behind."""
    return float(policy.gauges()["actor/oldest_kv_versions"])


async def update(publisher: Publisher, models: dict[int, torch.nn.Module], version: int) -> None:
    probe = some_tokens(models[version], PROBE_TOKENS, 99)
    expected = hf_logprobs(models[version], probe).tolist()
    publisher.publish(version, models[version].named_parameters(), probe, expected)
    await asyncio.to_thread(publisher.wait_applied, version, 60)


def check_logprobs(
    models: dict[int, torch.nn.Module],
    prompt: list[int],
    completion: Any,
    temperature: float = 1.0,
) -> None:
    """The cache is recomputed at every update, so a token's log-prob is wholly its version's."""
    tokens = [*prompt, *completion.tokens.tolist()]
    for version in set(completion.versions.tolist()):
        mine = completion.versions == version
        expected = hf_logprobs(models[version], tokens, temperature)[len(prompt) - 1 :][mine]
        assert np.abs(completion.logprobs[mine] - expected).max() <= TOLERANCE
