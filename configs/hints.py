"""Hints for a mistaken name: the field, the configuration or the file that was probably meant.

Other trainers' names of our fields are known, and what they have and this one lacks.
"""

import difflib
import re
import textwrap
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.runtime.process import REPOSITORY

LINE = 80  # characters of a hint: one line of a terminal
_ELSEWHERE = {
    "learner.lr": ("learning_rate", "actor_lr", "policy_lr"),
    "learner.total_steps": ("max_steps", "num_steps", "steps", "train_steps", "iterations"),
    "learner.eval_every": ("eval_steps", "eval_interval", "test_freq"),
    "learner.checkpoint_every": ("save_steps", "save_every", "save_interval", "save_freq"),
    "learner.max_grad_norm": ("grad_clip", "clip_grad", "gradient_clip"),
    "learner.kl_coef": ("beta", "kl_coeff", "kl_loss_coef", "kl_beta", "kl"),
    "learner.objective": ("algorithm", "algo", "loss", "loss_type", "adv_estimator"),
    "learner.critic.lr": ("critic_lr", "value_lr", "learning_rate_critic"),
    "learner.critic.coef": ("vf_coef", "value_loss_coef", "critic_coef"),
    "learner.critic.gae_lambda": ("lam", "lmbda"),
    "learner.critic.gamma": ("discount", "discount_factor"),
    "learner.critic.value_clip": ("cliprange_value", "vf_clip_param"),
    "learner.clip_high": ("epsilon", "clip_ratio", "clip_range", "cliprange", "clip_eps"),
    "learner.ranks": ("world_size", "nproc_per_node"),
    "learner.micro_batch_tokens": (
        "micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps",
    ),
    "replay.groups_per_step": ("batch_size", "train_batch_size", "rollout_batch_size"),
    "replay.group_size": (
        "num_generations", "rollout_n", "n_samples", "num_samples", "n_samples_per_prompt",
    ),
    "replay.max_staleness": ("max_lag", "max_off_policy_steps", "staleness"),
    "actors.tensor_parallel": ("tp", "tp_size", "gpus_per_engine", "num_gpus_per_engine"),
    "actors.count": ("num_actors", "num_workers", "num_engines", "workers"),
    "actors.max_action_tokens": (
        "max_tokens", "max_new_tokens", "max_completion_length", "max_response_length",
    ),
    "actors.max_turns": ("max_searches", "num_turns", "turns"),
    "actors.kv_cache_bytes": ("gpu_memory_utilization", "kv_cache", "cache_size"),
    "actors.engine": ("engine_args", "engine_kwargs", "vllm", "vllm_args", "vllm_kwargs"),
    "learner.best": ("metric_for_best_model", "best_metric", "monitor"),
    "learner.lora.alpha": ("lora_alpha",),
    "learner.lora.layers": ("target_modules", "lora_target_modules", "lora_layers"),
    "learner.trackers": ("report_to", "logger", "loggers", "tracking"),
    "learner.lora.rank": ("lora", "lora_r", "lora_rank", "peft"),
    "model.max_model_len": ("max_length", "max_len", "max_seq_len", "max_seq_length", "context"),
    "model.path": ("model", "model_name", "model_name_or_path", "model_path", "pretrained"),
    "questions.train": ("dataset", "data", "train_file", "train_files", "train_data"),
    "questions.eval": ("eval_file", "val_files", "eval_data", "eval_dataset", "test_file"),
    "retrieval.url": (
        "urls", "servers", "search_url", "retriever_url", "retrieval_service_url",
    ),
    "retrieval.top_k": ("topk", "k", "num_passages"),
    "rewards.weights.em": ("exact_match", "accuracy"),
    "rewards.custom": ("reward_fn", "reward_func", "reward_function", "reward_funcs"),
    "run_dir": ("output_dir", "out_dir", "save_dir", "log_dir", "logging_dir", "out"),
}  # fmt: skip
# Arguments of vLLM's that are often given by name.
_OF_ENGINE = (
    "attention_backend", "block_size", "kv_cache_dtype", "max_num_batched_tokens",
    "speculative_config",
)  # fmt: skip
_OURS = {theirs: field for field, names in _ELSEWHERE.items() for theirs in names}
_NOT_YET = {
    ("wandb", "trackio"): "set learner.trackers=[tensorboard,wandb], or trackio in its place",
    ("mlflow", "comet", "neptune"): (
        "not supported yet: leave it out; curves: tensorboard --logdir runs, forage plot"
    ),
    ("pipeline", "pp"): "engines share a model out by tensors alone: see actors.tensor_parallel",
    ("quantization", "quantize", "4bit", "8bit", "qlora"): (
        "quantised weights are not supported yet: leave it out, see model.dtype"
    ),
}
_DATA = (".jsonl", ".parquet", ".gz", ".csv", ".tsv")
_OF_A_MODEL = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def field(key: str, value: Any, known: Collection[str], prefix: str, fields: Iterable[str]) -> str:
    """The hint for `prefix + key` = value, which is none of the section's `known` names: what is
    not supported, else one to three of the dotted `fields`, else some of the known. One line.
    """
    if without := _not_yet(key, value):
        return without
    if value is None and (spaced := unspaced(key)):
        return spaced
    if key.lower() in known:
        return f"did you mean {prefix + key.lower()!r}?"
    ours = f"actors.engine.{key}" if key in _OF_ENGINE else _OURS.get(key.lower())
    named = _named(key, fields)
    like = difflib.get_close_matches(key, known, n=3, cutoff=0.85 if ours else 0.6)
    like = like or ([] if ours else difflib.get_close_matches(key, known, 1, 0.5))
    if meant := [*([ours] if ours else []), *named, *(prefix + each for each in like)][:3]:
        shown = meant if len("".join(meant)) < 50 else meant[:2]
        return f"did you mean {' or '.join(map(repr, shown))}?"
    return textwrap.shorten(f"known: {', '.join(known)}", LINE, placeholder=" …")


def _named(name: str, fields: Iterable[str]) -> list[str]:
    """The dotted fields of this name, without those of a section within another's: `learner.lr`
    hides `learner.critic.lr`.
    """
    found = [each for each in fields if each.endswith(f".{name}")]
    sections = [each.removesuffix(name) for each in found]
    return [
        each for each in found if not any(each.startswith(s) and each != s + name for s in sections)
    ]


def unspaced(text: str) -> str:
    """The remedy for `key:value`, which YAML reads as one text; '' for other texts."""
    key, colon, value = text.partition(":")
    remedy = f"write `{key}: {value}`, with a space after the colon"
    return remedy if colon and value and re.fullmatch(r"\w+", key) else ""


def _not_yet(key: str, value: Any) -> str:
    """Say so where key, or value, asks for what other trainers have."""
    inner = value if isinstance(value, dict) else [value] if isinstance(value, str) else []
    asked = {*re.split(r"[^a-z0-9]+", key.lower()), *(str(each).lower() for each in inner)}
    return next((said for words, said in _NOT_YET.items() if asked & {*words}), "")


def option(word: str, fields: Iterable[str]) -> str:
    """The field that `--word` may mean, as it is written: `learner.lr=VALUE`; '' for none."""
    fields, name = list(fields), word.lower().replace("-", "_")
    if name in _OURS or name in fields:
        return f"{_OURS.get(name, name)}=VALUE"
    named = _named(name, fields)
    return f"{named[0]}=VALUE" if len(named) == 1 else ""


def configuration(path: Path) -> str:
    """The remedy for a configuration's path where nothing that could be one lies."""
    is_model = path.suffix in _OF_A_MODEL or path.name == "config.json"
    folder = path.parent if is_model else path
    if is_model or (path / "config.json").is_file():
        return f"a model is named behind CONFIG: configs/base.yaml model.path={folder}"
    if path.suffix in _DATA:
        return f"data are named behind CONFIG: configs/base.yaml questions.train={path}"
    if "=" in str(path):
        return f"CONFIG comes before the fields: configs/base.yaml {path}"
    there = [*(REPOSITORY / "configs").glob("*.yaml"), *path.parent.glob("*.yaml")]
    stems = {each.stem: each for each in there}
    near = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.75)
    return f"did you mean {shown(stems[near[0]])}?" if near else "name one of configs/*.yaml"


def is_of_another_kind(path: Path) -> bool:
    """True for a file that is no configuration by its name."""
    return path.suffix in (*_DATA, *_OF_A_MODEL) or path.name == "config.json"


def near(path: Path) -> Path | None:
    """What a path that leads to nothing may mean: the same below the likest name that is there."""
    for missing in (path, *path.parents):
        if not missing.parent.is_dir():
            continue
        with suppress(OSError):
            there = [each.name for each in missing.parent.iterdir()]
            for name in difflib.get_close_matches(missing.name, there, n=3):
                meant = missing.with_name(name) / path.relative_to(missing)
                if meant.exists() and _alike(missing.stem, Path(name).stem):
                    return meant
        return None
    return None


def _alike(one: str, other: str) -> bool:
    """False where names are alike by their endings alone."""
    return difflib.SequenceMatcher(None, one, other).ratio() >= 0.5


def did_you_mean(path: Path) -> str:
    """The remedy that names what a path to nothing may mean; '' for none."""
    meant = None if path.exists() else near(path)
    return f"did you mean {meant}?" if meant else ""


def shown(path: Path) -> str:
    """A path as one writes it here: relative to the working directory where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
