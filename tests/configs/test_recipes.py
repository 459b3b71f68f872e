"""The recipes: what they say is what was published, and fits the GPUs they name."""

import re
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from configs.load import load, parse
from configs.rewards import RewardWeights
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.setup.gpu_memory import GIB, HEADROOM
from scripts.setup.machine import gpus_wanted
from scripts.setup.memory import MemoryOptions, Reckoned, reckon

PER_BATCH = 10  # optimiser steps on each of Search-R1's batches: 512 x 5 rollouts in parts of 256
SEARCH_R1 = {  # scripts/nq_hotpotqa/v0.2/train_grpo.sh
    "model.max_model_len": 4096 + 500,
    "retrieval.top_k": 3,
    "retrieval.device": "cuda",
    "retrieval.index_device": "cuda",
    "actors.max_turns": 4,
    "actors.max_action_tokens": 500,
    # wiki-18's titles stand in quotes, and there they are shown with them
    "actors.passage_template": 'Doc {rank}(Title: "{title}") {text}\n',
    "actors.temperature": 1.0,
    "replay.groups_per_step": 512 // PER_BATCH,
    "replay.group_size": 5,
    "replay.max_staleness": PER_BATCH - 1,
    "learner.total_steps": 1005 * PER_BATCH,
    "learner.eval_every": 100 * PER_BATCH,
    "learner.checkpoint_every": 100 * PER_BATCH,
    "learner.objective": "grpo",
    "learner.proximal": "behaviour",
    "learner.clip_high": 0.2,
    "learner.kl_coef": 0.001,
    "learner.kl_estimator": "k3",
    "learner.anchor": "frozen",
    "learner.entropy_coef": 0.001,
    "learner.advantage_std": "group",
    "learner.lr": 1e-6,
    "learner.lr_schedule": "constant",
    "learner.warmup_steps": int(0.285 * 1005) * PER_BATCH,
    "learner.betas": (0.9, 0.999),
    "learner.weight_decay": 0.01,
    "learner.max_grad_norm": 1.0,
}
OVER_NODES = SEARCH_R1 | {  # the same, with an index on each node's CPU
    "retrieval.index_device": "cpu",
    "cluster.address": "auto",
    "learner.checkpoint_every": 100,  # more nodes fail more often
}
PPO_STEPS = 2  # on a batch of 512 x 1 rollouts
PPO = SEARCH_R1 | {  # scripts/nq_hotpotqa/v0.2/train_ppo.sh, and verl's ppo_trainer.yaml
    "replay.groups_per_step": 512 // PPO_STEPS,
    "replay.group_size": 1,
    "replay.max_staleness": PPO_STEPS - 1,
    "learner.total_steps": 1005 * PPO_STEPS,
    "learner.eval_every": 100 * PPO_STEPS,
    "learner.checkpoint_every": 100 * PPO_STEPS,
    "learner.baseline": "critic",
    "learner.critic.lr": 1e-5,
    "learner.critic.warmup_steps": int(0.015 * 1005) * PPO_STEPS,
    "learner.critic.alone_steps": 0,
    "learner.critic.gamma": 1.0,
    "learner.critic.gae_lambda": 1.0,
    "learner.advantage_std": "whiten",
    "learner.kl_in": "reward",
    "learner.kl_estimator": None,
    "learner.warmup_steps": int(0.285 * 1005) * PPO_STEPS,
}
EMA_PG = SEARCH_R1 | {  # search/train_grpo_ema_pg.sh
    "learner.eval_every": 50 * PER_BATCH,
    "learner.checkpoint_every": 50 * PER_BATCH,
    "learner.clip_high": None,  # grpo's own: .28
    "learner.kl_estimator": None,
    "learner.kl_top_k": 32,
    "learner.anchor": "ema",
    "learner.anchor_tau": 0.9,
    "learner.anchor_period": 10 * PER_BATCH,
    "learner.entropy_coef": 0.0,
    "learner.betas": (0.9, 0.95),
}
LLDS = SEARCH_R1 | {  # train_grpo_nqhot.sh
    "actors.max_turns": 3,
    "learner.eval_every": 50 * PER_BATCH,
    "learner.checkpoint_every": 50 * PER_BATCH,
    "learner.guard": "action",
    "learner.guard_coef": 0.2,
}
ASEARCHER = {  # ASearcher/configs/asearcher_local.yaml
    "model.max_model_len": 12000,
    "retrieval.top_k": 5,
    "retrieval.device": "cuda",
    "retrieval.index_device": "cuda",
    "rewards.mode": "strict",
    "rewards.weights": RewardWeights(em=0.0, f1=1.0),
    "actors.max_turns": 32 - 1,
    "actors.max_action_tokens": 1024,
    "actors.temperature": 1.0,
    "rewards.weights.em": 0.0,
    "rewards.weights.f1": 1.0,
    "replay.groups_per_step": 128,
    "replay.group_size": 16,
    "replay.max_staleness": 4,
    "replay.drop_no_signal": True,
    "learner.total_steps": 10 * (35_000 // 128),
    "learner.proximal": "start_of_update",
    "learner.clip_low": None,  # theirs, .4, acts on nothing
    "learner.clip_high": None,
    "learner.behaviour_weight": "mask",
    "learner.behaviour_level": "token",
    "learner.behaviour_cap": 5.0,
    "learner.kl_coef": 0.0,
    "learner.advantage_std": "batch",
    "learner.lr": 5e-6,
    "learner.lr_schedule": "constant",
    "learner.warmup_steps": int(0.001 * 10 * (35_000 // 128)),
    "learner.betas": (0.9, 0.999),
    "learner.weight_decay": 0.01,
    "learner.max_grad_norm": 1.0,
}
OF_THE_TASK = (  # whatever is trained
    "retrieval.top_k",
    "actors.max_turns",
    "actors.max_action_tokens",
    "actors.passage_template",
    "actors.temperature",
    "replay.group_size",
    "learner.objective",
    "learner.clip_high",
    "learner.kl_coef",
    "learner.kl_estimator",
    "learner.anchor",
    "learner.advantage_std",
)
LORA = {name: SEARCH_R1[name] for name in OF_THE_TASK} | {
    "learner.lora.rank": 16,
    "learner.lora.layers": (),
    "learner.lora.publish": "adapter",
}
RECIPES: dict[str, dict[str, Any]] = {
    "search_r1_3b_grpo": SEARCH_R1,
    "search_r1_7b_grpo": SEARCH_R1,
    "search_r1_7b_4x8": OVER_NODES,
    "search_r1_3b_ppo": PPO,
    "search_r1_7b_ppo": PPO,
    "search_r1_3b_lora": LORA,
    "ema_pg_3b": EMA_PG,
    "llds_3b": LLDS,
    "asearcher_7b": ASEARCHER,
}
FREE_OF_80, FREE_OF_24 = 79.0, 22.0  # GiB that CUDA shows of GPUs of 80 and of 24 GB
CASES = {  # configuration, model, GPUs, GiB of each
    "search_r1_3b_grpo": ("search_r1_3b_grpo", "Qwen2.5-3B", 8, FREE_OF_80),
    "search_r1_7b_grpo": ("search_r1_7b_grpo", "Qwen2.5-7B", 8, FREE_OF_80),
    "search_r1_7b_4x8": ("search_r1_7b_4x8", "Qwen2.5-7B", 32, FREE_OF_80),
    "search_r1_3b_ppo": ("search_r1_3b_ppo", "Qwen2.5-3B", 8, FREE_OF_80),
    "search_r1_7b_ppo": ("search_r1_7b_ppo", "Qwen2.5-7B", 8, FREE_OF_80),
    "search_r1_3b_lora": ("search_r1_3b_lora", "Qwen2.5-3B", 1, FREE_OF_24),
    "ema_pg_3b": ("ema_pg_3b", "Qwen2.5-3B", 8, FREE_OF_80),
    "llds_3b": ("llds_3b", "Qwen2.5-3B", 8, FREE_OF_80),
    "asearcher_7b": ("asearcher_7b", "Qwen2.5-7B", 8, FREE_OF_80),
    "one_gpu": ("one_gpu", "Qwen2.5-0.5B", 1, FREE_OF_24),
    "base, 0.5B on one": ("base", "Qwen2.5-0.5B", 1, FREE_OF_24),
    "base, 3B on one": ("base", "Qwen2.5-3B", 1, FREE_OF_80),
    "base, 3B on eight": ("base", "Qwen2.5-3B", 8, FREE_OF_80),
    "base, 7B on eight": ("base", "Qwen2.5-7B", 8, FREE_OF_80),
    "base, 14B on eight": ("base", "Qwen2.5-14B", 8, FREE_OF_80),
}
MOST_ANEW = 0.2  # of an engine's time, for what new weights took from its cache


def recipe(name: str) -> Config:
    return load(REPOSITORY / "configs" / f"{name}.yaml")


def value(config: Config, field: str) -> Any:
    return attrgetter(field)(config)


@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_are_those_published(name: str) -> None:
    config, published = recipe(name), RECIPES[name]
    assert {field: value(config, field) for field in published} == published


def reckoned(case: str, *overrides: str) -> Reckoned:
    name, model, gpus, gib = CASES[case]
    path = str(REPOSITORY / "configs" / f"{name}.yaml")
    return reckon(MemoryOptions(path, (f"model.path={model}", *overrides), gpus, gib))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_asks_for_the_gpus_that_it_is_for(name: str) -> None:
    _, _, gpus, _ = CASES[name]
    assert gpus_wanted(recipe(name)) == gpus


def unfit(found: Reckoned) -> dict[str, tuple[float, float]]:
    """Each number that does not follow from the model and the GPUs: what it is, and its bound."""
    config, pace = found.config, found.pace
    actors, replay, learner = config.actors, config.replay, config.learner
    group = replay.group_size * config.model.max_model_len
    fullest = max(sum(map(sum, (n.values() for n in each.values()))) for each in found.gpus)
    at_most = {
        "bytes of a GPU": (fullest, found.total * (1 - HEADROOM)),
        "first contexts": (pace.in_flight * pace.context_tokens, pace.kv_tokens),
        "contexts made anew": (pace.anew_share, MOST_ANEW),
        "publish_every": (config.weight_sync.publish_every, replay.max_staleness + 1),
    }
    at_least = {
        "a group's context": (pace.kv_tokens, group),
        "a group in flight": (pace.in_flight, replay.group_size),
        "rollout_deadline_s": (actors.rollout_deadline_s, 2 * pace.rollout_s),
        "group_deadline_s": (replay.group_deadline_s, 2 * actors.rollout_deadline_s),
        "batch_deadline_s": (learner.batch_deadline_s, pace.first_batch_s),
        "step_deadline_s": (learner.step_deadline_s, pace.longest_step_s),
    }
    wrong = {name: pair for name, pair in at_most.items() if pair[0] > pair[1]}
    return wrong | {name: pair for name, pair in at_least.items() if pair[0] < pair[1]}


def sizes(found: Reckoned) -> str:
    """What a recipe says of its sizes."""
    used = [sum(map(sum, (n.values() for n in each.values()))) for each in found.gpus]
    whose = [f"the GPU {used[0] / GIB:.1f}"]
    if len(used) > 1:
        ranks = found.config.learner.ranks
        whose = [f"a learner's GPU {max(used[:ranks]) / GIB:.1f}"]
        whose.append(f"an actor's {max(used[ranks:]) / GIB:.1f}")
    pace, count = found.pace, found.config.actors.count
    return (
        f"{whose[0]} of {found.total / GIB:.0f} GiB, {', '.join([*whose[1:], 'of which'])} "
        f"{found.config.actors.kv_cache_bytes / GIB:.1f} for {pace.kv_tokens:,} tokens of keys and "
        f"values; {count} x {pace.in_flight} rollouts in flight, each of at most "
        f"{pace.rollout_s:.0f} s; a step {pace.step_s:.0f} s; new weights every "
        f"{pace.publish_s:.0f} s, which cost {100 * pace.anew_share:.0f} % of an engine's time"
    )


@pytest.mark.parametrize("case", CASES)
def test_its_numbers_follow_from_the_model_and_the_gpus(case: str) -> None:
    assert unfit(reckoned(case)) == {}


@pytest.mark.parametrize(
    ("case", "override", "said"),
    [
        ("search_r1_7b_grpo", "learner.micro_batch_tokens=16384", "bytes of a GPU"),
        ("search_r1_7b_grpo", "learner.zero_stage=1", "bytes of a GPU"),
        ("search_r1_3b_ppo", "learner.zero_stage=0", "bytes of a GPU"),
        ("search_r1_7b_ppo", "learner.offload=none", "bytes of a GPU"),
        ("search_r1_3b_grpo", f"actors.kv_cache_bytes={57 << 30}", "bytes of a GPU"),
        ("one_gpu", f"actors.kv_cache_bytes={12 << 30}", "bytes of a GPU"),
        ("base, 14B on eight", "learner.offload=none", "bytes of a GPU"),
        ("search_r1_7b_grpo", f"actors.kv_cache_bytes={1 << 30}", "a group's context"),
        ("asearcher_7b", f"actors.kv_cache_bytes={5 << 30}", "a group's context"),
        ("search_r1_7b_grpo", f"actors.kv_cache_bytes={400 << 20}", "first contexts"),
        ("search_r1_3b_grpo", "weight_sync.publish_every=4", "contexts made anew"),
        ("search_r1_7b_grpo", "weight_sync.publish_every=1", "contexts made anew"),
        ("search_r1_3b_grpo", "actors.max_num_seqs=512", "contexts made anew"),
        ("base, 7B on eight", "weight_sync.publish_every=3", "contexts made anew"),
        ("search_r1_7b_grpo", "actors.rollout_deadline_s=240", "rollout_deadline_s"),
        ("asearcher_7b", "actors.rollout_deadline_s=1200", "rollout_deadline_s"),
        ("base, 7B on eight", "actors.rollout_deadline_s=300", "rollout_deadline_s"),
        ("ema_pg_3b", "replay.group_deadline_s=900", "group_deadline_s"),
        ("asearcher_7b", "learner.batch_deadline_s=2000", "batch_deadline_s"),
        ("asearcher_7b", "learner.step_deadline_s=1800", "step_deadline_s"),
        ("search_r1_7b_grpo", "replay.groups_per_step=102", "step_deadline_s"),
    ],
)
def test_a_number_that_does_not_is_found(case: str, override: str, said: str) -> None:
    assert said in unfit(reckoned(case, override))


def row(case: str) -> str:
    """A row of the manual's table."""
    name, model, gpus, gib = CASES[case]
    found, used = reckoned(case), []
    for each in found.gpus:
        used.append(sum(map(sum, (needs.values() for needs in each.values()))) / GIB)
    pace, ranks = found.pace, found.config.learner.ranks
    cells = (
        f"`{name}`, {model.removeprefix('Qwen2.5-')}",
        f"{gpus} x {gib:.0f}",
        f"{max(used[:ranks]):.1f}",
        f"{max(used[ranks:] or used):.1f}",
        f"{sum(found.host.values()) / GIB:.0f}",
        f"{found.config.actors.count} x {pace.in_flight}",
        *(f"{seconds:.0f} s" for seconds in (pace.rollout_s, pace.step_s, pace.publish_s)),
        f"{100 * pace.anew_share:.0f} %",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("case", [case for case in CASES if case != "base, 0.5B on one"])
def test_the_manual_s_table_is_what_is_reckoned(case: str) -> None:
    assert row(case) in (REPOSITORY / "docs" / "running.md").read_text().splitlines()


@pytest.mark.parametrize("name", [*RECIPES, "one_gpu"])
def test_the_comment_says_what_is_reckoned(name: str) -> None:
    text = (REPOSITORY / "configs" / f"{name}.yaml").read_text()
    said = " ".join(text.replace("\n#", " ").split())
    _, model, _, gib = CASES[name]
    size = f" --gib {gib:.0f}" if gib != MemoryOptions("").gib else ""
    command = f"Sizes by `forage memory configs/{name}.yaml model.path={model}{size}` ("
    assert command in said and f": {sizes(reckoned(name))}." in said


@pytest.mark.parametrize(
    "taken_back",
    [
        {"anchor": "frozen", "anchor_period": 10},
        {"kl_top_k": 0, "kl_estimator": "k3"},
        {"clip_high": 0.2},
        {"betas": (0.9, 0.999)},
        {"entropy_coef": 0.001},
    ],
)
def test_each_change_of_ema_pg_can_be_taken_back_alone(taken_back: dict[str, Any]) -> None:
    plain, changed = recipe("search_r1_3b_grpo").learner, recipe("ema_pg_3b").learner
    different = {n for n in plain.__struct_fields__ if getattr(plain, n) != getattr(changed, n)}
    cadence = {"anchor_period", "eval_every", "checkpoint_every"}
    changes = {"anchor", "kl_top_k", "kl_estimator", "clip_high", "betas", "entropy_coef"}
    assert different - cadence == changes
    overrides = [
        f"learner.{field}={list(value) if isinstance(value, tuple) else value}"
        for field, value in taken_back.items()
    ]
    config = load(REPOSITORY / "configs" / "ema_pg_3b.yaml", overrides)
    assert config.learner == msgspec.structs.replace(changed, **taken_back)


def methods() -> dict[str, str]:
    """The switches of each method in the manual's table, a row without a name being the rest."""
    text = (REPOSITORY / "docs" / "algorithms.md").read_text()
    table = text.partition("## Recipes: a method by its switches")[2].partition("\n## ")[0]
    rows, name = {}, ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "method":
            name = cells[0] or name
            rows[name] = f"{rows.get(name, '')} {cells[1]}"
    return rows


@pytest.mark.parametrize(("method", "cell"), methods().items())
def test_each_method_of_the_manual_is_what_its_switches_say(method: str, cell: str) -> None:
    spans = [span for span in re.findall(r"`([^`]+)`", cell) if "=" in span]
    assert spans, method
    switches = [f"learner.{switch}" for span in spans for switch in span.split()]
    changed = msgspec.structs.asdict(parse("", switches, method).learner)
    assert len(switches) == len({switch.partition("=")[0] for switch in switches})
    for switch in switches:
        name, _, text = switch.removeprefix("learner.").partition("=")
        assert str(changed[name]) == text or float(changed[name]) == float(text)


@pytest.mark.parametrize("name", RECIPES)
def test_paths_are_left_to_whoever_runs_it(name: str) -> None:
    config = recipe(name)
    paths = (config.model.path, config.questions.train, config.questions.eval, config.run_dir)
    assert not any(paths) and not config.retrieval.corpus and not config.retrieval.index
