"""Scenarios of configurations: what their fields, their model and their machine come to."""

from dataclasses import dataclass
from typing import Any

from actors.policies.capacity import AIM, MOST
from actors.policies.engine_keys import block_tokens
from configs.schema import Config
from scripts.plan import hardware
from scripts.plan.hardware import Gpu
from scripts.plan.scenario import (
    Decode,
    Engines,
    Learner,
    Machine,
    Rules,
    Scenario,
    Sync,
)
from scripts.plan.workload import Latency, Means, Workload
from scripts.setup.model_size import Model, sent_elements, token_bytes, width_of
from scripts.setup.pace import PROMPT_TOKENS, Pace

COMPLETION = 0.4  # of actors.max_action_tokens, where nothing is said: Search-R1's 200 of 500
SEARCHES = 1.5
NOTHING_FOUND = 1 << 40  # tokens of a block that no context fills
NO_SIGNAL = 0.5  # of groups, where they are dropped


@dataclass(frozen=True)
class Asked:
    """What is said of the rollouts; None: what the configuration suggests."""

    searches: float | None = None
    completion_tokens: float | None = None
    observation_tokens: int | None = None
    prompt_tokens: int | None = None
    latency: Latency | None = None
    no_signal: float | None = None


def workload_of(config: Config, asked: Asked, seed: int = 0) -> Workload:
    """The rollouts of a configuration, as far as it tells."""
    actors, longest = config.actors, config.model.max_model_len
    no_search = config.environment.name == "no_search"
    searches = 0.0 if no_search else SEARCHES if asked.searches is None else asked.searches
    passages = config.retrieval.top_k * actors.max_passage_tokens
    means = Means(
        prompt=asked.prompt_tokens or min(PROMPT_TOKENS, longest // 8),
        searches=searches,
        most_searches=actors.max_turns,
        action=asked.completion_tokens or max(1.0, COMPLETION * actors.max_action_tokens),
        most_action=actors.max_action_tokens,
        observation=passages if asked.observation_tokens is None else asked.observation_tokens,
        longest=longest,
        block=cache_block(config),
    )
    dropped = NO_SIGNAL if asked.no_signal is None else asked.no_signal
    return Workload(
        means.shapes(seed),
        asked.latency or Latency(0.2, 2.0),
        dropped if config.replay.drop_no_signal else 0.0,
    )


def cache_block(config: Config) -> int:
    """Tokens of a block of the engines' caches, in which a turn finds what was taken in before."""
    return block_tokens(config) if config.actors.prefix_caching else NOTHING_FOUND


def rules_of(config: Config) -> Rules:
    """The fields that replay and weight sync go by."""
    replay, sync = config.replay, config.weight_sync
    return Rules(
        replay.groups_per_step,
        replay.group_size,
        replay.max_staleness,
        sync.publish_every,
        sync.in_flight == "recompute",
    )


def capacity_of(config: Config, kv_tokens: int, workload: Workload) -> int:
    """Rollouts in flight of an actor: as many contexts as its keys and values hold, each with a
    seat; at least a group, and no more than `actors.rollouts_in_flight` where that is set.
    """
    actors, least = config.actors, config.replay.group_size
    most = actors.rollouts_in_flight or min(actors.max_num_seqs, MOST)
    held = int(AIM * kv_tokens / workload.held_tokens) if kv_tokens else most
    return max(least, min(held, most))


def on_gpus(config: Config, model: Model, gpu: Gpu, gpus: int, workload: Workload) -> Scenario:
    """A run on so many GPUs of a kind; learner and engines share them where they are too few."""
    pace = Pace(config, model, gpu.total, gpus)
    workers, ranks = config.actors.tensor_parallel, config.learner.ranks
    shares = 1 + (ranks + config.actors.count * workers > gpus)
    moved, done = workers * gpu.moved / shares, workers * gpu.done / shares
    width = width_of(config.engine_dtype)
    read, sent = width * model.parameters, width * sum(sent_elements(config, model))
    token_s = 2 * model.parameters / done
    held_bytes = workload.held_tokens * token_bytes(config, model)
    engines = Engines(
        count=config.actors.count,
        capacity=capacity_of(config, pace.kv_tokens, workload),
        seats=config.actors.max_num_seqs,
        decode=Decode(hardware.LAUNCH_S, read / moved, held_bytes / moved, token_s),
        prefill_s=token_s,
        block=cache_block(config),
    )
    learnt_s = 2 * model.parameters * pace.passes / (ranks * gpu.done / shares)
    copied_s = 2 * sent / (gpu.moved / shares)
    transport = "cuda_ipc" if gpus == 1 else "nccl"
    return Scenario(
        workload,
        engines,
        Learner(token_s=learnt_s, publish_s=copied_s + hardware.LAUNCH_S),
        rules_of(config),
        Sync(transfer_s(config, sent, transport), hardware.PAUSE_S + copied_s / workers),
        delivery_s=1 / hardware.replay_per_s(config.actors.count, workload.tokens),
    )


def transfer_s(config: Config, sent: int, auto: str) -> float:
    """Seconds of a version on its way, its digest included; `auto`: the transport chosen here."""
    named = config.weight_sync.transport
    kind = auto if named == "auto" else named
    digest_s = 0.0 if kind == "cuda_ipc" else sent / hardware.DIGEST_BYTES_PER_S
    return sent / hardware.SENT_BYTES_PER_S[kind] + digest_s


@dataclass(frozen=True)
class Cores:
    """What a model costs a CPU: measured (`forage bench plan`), or reckoned from its size."""

    decode: Decode
    prefill_s: float
    learner: Learner
    sync: Sync
    engine_cores: float
    beside: float
    queued: float

    @classmethod
    def of_size(cls, config: Config, model: Model) -> "Cores":
        """Reckon it: as far as a model of that size, and a core like those measured, goes."""
        rate = hardware.CORE_OPERATIONS_PER_S
        own, learner = config.actors.threads, config.learner.threads
        sampled_s = 2 * model.parameters / (own * rate[config.engine_dtype])
        passes = Pace(config, model, 0, 0).passes
        trained_s = 2 * model.parameters * passes / (learner * rate[config.model.dtype])
        sent = width_of(config.engine_dtype) * sum(sent_elements(config, model))
        sequence_s = hardware.CORE_SEQUENCE_S + sampled_s
        return cls(
            Decode(hardware.CORE_LAUNCH_S, 0.0, sequence_s),
            sampled_s,
            Learner(token_s=hardware.CORE_TOKEN_S + trained_s, cores=learner),
            Sync(transfer_s(config, sent, "gloo"), hardware.CORE_PAUSE_S),
            own + hardware.FRONTEND_CORES,
            hardware.CORE_BESIDE,
            hardware.CORE_QUEUED,
        )

    @classmethod
    def measured(cls, tree: dict[str, Any]) -> "Cores":
        """From what the benchmark has written. Raises KeyError, TypeError for anything else."""
        return cls(
            Decode(tree["launch_s"], 0.0, tree["sequence_s"]),
            tree["prefill_s"],
            Learner(token_s=tree["learn_token_s"], publish_s=tree["publish_s"],
                    cores=tree["learner_cores"]),
            Sync(tree["transfer_s"], tree["pause_s"]),
            tree["engine_cores"],
            tree["beside"],
            tree["queued"],
        )  # fmt: skip


def on_cores(
    config: Config, model: Model, cores: float, costs: Cores, workload: Workload
) -> Scenario:
    """A run whose processes share a machine's cores."""
    token = token_bytes(config, model)
    kv_tokens = config.actors.kv_cache_bytes // token if token else 0
    engines = Engines(
        count=config.actors.count,
        capacity=capacity_of(config, kv_tokens, workload),
        seats=config.actors.max_num_seqs,
        decode=costs.decode,
        prefill_s=costs.prefill_s,
        cores=costs.engine_cores,
        block=cache_block(config),
    )
    return Scenario(
        workload,
        engines,
        costs.learner,
        rules_of(config),
        costs.sync,
        Machine(cores, costs.beside, costs.queued, hardware.LEARNER_FAVOUR),
        1 / hardware.replay_per_s(config.actors.count, workload.tokens),
    )
