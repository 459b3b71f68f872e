"""Checks of a configuration against a model folder's config.json, before an engine loads it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.environments import registry
from actors.policies.engine_keys import block_tokens
from actors.prompt import Prompter, load_tokenizer
from configs import hints
from configs.load import ConfigError
from configs.prompts import SEARCH_R1_PROMPT
from configs.schema import Config
from replay.protocol import Lease, ReplayError
from replay.questions import questions_of
from replay.trajectory import Sampling
from scripts.setup.model_size import (
    Model,
    contexts_bytes,
    experts,
    known_model,
    token_bytes,
    uneven_shares,
)

_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_PROMPTED = ("search_r1", "tool_call", "no_search")  # whose prompt needs a question alone
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_POINTER = b"version https://git-lfs"
_LONG = 128  # characters; some question of a file is shorter


def has_tokenizer(path: Path) -> bool:
    """True where a tokenizer's files lie in the folder."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def folder(config: Config) -> Iterator[str]:
    """Yield what the model folder lacks, and which one may be meant instead."""
    path, field = Path(config.model.path), f"model.path = {config.model.path!r}"
    if not config.model.path:
        yield "model.path is empty: name a Hugging Face folder, or a model on the Hub"
    elif not (path / "config.json").is_file():
        yield f"{field}: {_no_model(path)}"
    elif not any(path.glob("*.safetensors")):
        yield (
            f"{field}: no *.safetensors there; save the model with "
            "save_pretrained(..., safe_serialization=True)"
        )
    elif missing := _missing_weights(path):
        yield f"{field}: {missing}: download it again, hf download NAME --local-dir {path}"
    elif not has_tokenizer(path):
        yield f"{field}: no tokenizer; save it beside the model"


def _no_model(path: Path) -> str:
    """Say what lies where a model's folder should, and which folder may be meant."""
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf"))):
        return "GGUF, which cannot be trained: name the folder with the model's *.safetensors"
    inside = ("model", "checkpoints/best/model", "*", "snapshots/*")
    near = hints.near(path)
    maybe = [*([near] if near else []), *(path.parents[:1] if path.is_file() else [])]
    maybe += [each for pattern in inside for each in sorted(path.glob(pattern)) if path.is_dir()]
    meant = next((each for each in maybe if (each / "config.json").is_file()), None)
    wrong = "no config.json" if path.exists() else "there is nothing"
    return f"{wrong}; " + (f"did you mean {meant}?" if meant else "name a Hugging Face folder")


def _missing_weights(path: Path) -> str:
    """Say which weights are not there, or only a pointer to them; '' for none."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                return f"{file.name} is a pointer of Git LFS, without the weights"
    try:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        files = sorted({*index["weight_map"].values()})
    except (OSError, ValueError, KeyError):
        return ""  # one file holds all
    absent = [name for name in files if not (path / name).is_file()]
    return (
        f"{len(absent)} of {len(files)} files of weights are missing, {absent[0]}" if absent else ""
    )


def limits(config: Config) -> Iterator[str]:
    """Yield what the model folder's config.json does not allow."""
    path, context = Path(config.model.path) / "config.json", config.model.max_model_len
    if not path.is_file():
        return
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:
        yield f"model.path = {config.model.path!r}: config.json is not JSON ({error})"
        return
    named = tree.get("architectures") or []
    if named and not config.model.trust_remote_code and not any(n.endswith(_CAUSAL) for n in named):
        yield (
            f"model.path = {config.model.path!r}: its architectures {named!r} generate no text: "
            "name a causal language model, such as one of Qwen2ForCausalLM"
        )
    if kind := (tree.get("quantization_config") or {}).get("quant_method"):
        yield (
            f"model.path = {config.model.path!r}: its weights are quantised ({kind}), which cannot "
            "be trained: name the model that they were made from"
        )
    tree = tree.get("text_config") or tree
    if (count := experts(tree)) > 1:
        yield (
            f"model.path = {config.model.path!r}: a mixture of {count} experts in each layer: "
            "weights reach a running engine layer by layer as in a dense model only: name a dense "
            "model, such as one of Qwen3ForCausalLM"
        )
    if (limit := tree.get("max_position_embeddings")) and context > limit:
        yield (
            f"model.max_model_len = {context!r}: the model has max_position_embeddings {limit}; "
            "lower model.max_model_len to at most that"
        )
    model = known_model(path.parent)
    yield from _candidates(config, model)
    yield from _adapted(config, model)
    yield from uneven_shares(config, model)
    yield from _cache(config, model)


def _candidates(config: Config, model: Model) -> Iterator[str]:
    """Yield that a KL would be over more tokens than there are."""
    top_k, vocabulary = config.learner.kl_top_k, model.vocabulary
    if vocabulary and top_k > vocabulary:
        yield (
            f"learner.kl_top_k = {top_k!r}: the model's vocabulary has {vocabulary} tokens; lower "
            "learner.kl_top_k to at most that"
        )


def _adapted(config: Config, model: Model) -> Iterator[str]:
    """Yield the layers to adapt that the model has not."""
    lora, there = config.learner.lora, sorted({linear.name for linear in model.linears})
    for name in lora.layers:
        if there and name not in there:
            yield (
                f"learner.lora.layers names {name!r}, which no linear layer of the model's blocks "
                f"is called: they are {', '.join(there)}"
            )


def _cache(config: Config, model: Model) -> Iterator[str]:
    """Yield that an engine's keys and values hold less than one context."""
    has, context = config.actors.kv_cache_bytes, config.model.max_model_len
    if 0 < has < (needed := contexts_bytes(config, model)):
        yield (
            f"actors.kv_cache_bytes = {has!r}: one context of model.max_model_len = {context!r} "
            f"tokens takes {needed} ({token_bytes(config, model)} a token, whole blocks of "
            f"{block_tokens(config)} and one more): raise the former to at least that, or lower "
            "the latter"
        )


def prompts(config: Config) -> Iterator[str]:
    """Yield that not even the shortest question leaves room for a whole action."""
    template = config.questions.prompt or SEARCH_R1_PROMPT
    limit, action = config.model.max_model_len, config.actors.max_action_tokens
    if config.environment.name not in _PROMPTED or limit - action > len(template) + _LONG:
        return  # no tokenizer, which takes seconds to load, makes more tokens than characters
    try:
        prompt = _shortest_prompt(config)
    except (ConfigError, ReplayError, ValueError, OSError):
        return  # what is wrong with the tokenizer or the questions is said elsewhere
    if prompt + action > limit:
        yield (
            f"model.max_model_len = {limit!r}: the prompt of the shortest question takes {prompt} "
            f"tokens and an action up to actors.max_action_tokens = {action!r}: give at least "
            f"{prompt + action}, lower that or shorten questions.prompt"
        )


def _shortest_prompt(config: Config) -> int:
    asked = questions_of(config, "train").questions
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    question = min(asked, key=lambda each: len(each.text))
    lease = Lease(0, 0, "train", question, Sampling(1.0, 0))
    nobody: Any = None  # none of these searches for its prompt
    made = registry.acting(lease, retriever=nobody, prompter=prompter, config=config)

    async def prompted() -> int:
        async with made as environment:
            return len(environment.prompt)

    return asyncio.run(prompted())
