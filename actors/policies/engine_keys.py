"""The keys of `actors.engine`, checked before an engine starts.

They go to vLLM's AsyncEngineArgs as they are. Which there are, and of which types, is read from the
source of the installed vLLM, which takes ten seconds to import. Refused by name is what Forage sets
itself, and what would part tokens, log-probs, weights or versions from what others take them for.
"""

import ast
import difflib
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from configs.devices import on_cpu
from configs.schema import Config

FIELD = "actors.engine"
_ARGUMENTS = "engine/arg_utils.py"
_BACKENDS = "v1/attention/backends/registry.py"
_SHOWN = 160  # characters of a list of choices

_OURS = {  # the field that sets it
    "model": "model.path",
    "model_weights": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_model_len",
    "dtype": "actors.dtype",
    "seed": "seed",
    "kv_cache_memory_bytes": "actors.kv_cache_bytes",
    "gpu_memory_utilization": "actors.kv_cache_bytes",
    "num_gpu_blocks_override": "actors.kv_cache_bytes",
    "max_num_seqs": "actors.max_num_seqs",
    "max_num_active_seqs": "actors.max_num_seqs",
    "enable_prefix_caching": "actors.prefix_caching",
    "enforce_eager": "actors.enforce_eager",
    "tensor_parallel_size": "actors.tensor_parallel",
    "spec_method": f"{FIELD}.speculative_config.method",
    "spec_model": f"{FIELD}.speculative_config.model",
    "spec_tokens": f"{FIELD}.speculative_config.num_speculative_tokens",
}
_ALONE = "leave it out"
_REFUSED = {  # keys, as a pattern: why not
    "scheduling_policy|scheduler_cls|watermark|async_scheduling": "Forage orders the requests "
    "itself, the probe of new weights first",
    "logprobs_mode": "Forage sets it: log-probs are those after temperature, which is what the "
    "learner corrects by",
    "disable_log_stats|worker_cls|worker_extension_cls|use_tqdm_on_load|shutdown_timeout": "Forage "
    "sets it itself",
    "quantization|quantization_config|allow_deprecated_quantization": "weights arrive as "
    "actors.dtype and are written where they lie, which a quantised model has no place for; keys "
    f"and values may be quantised: {FIELD}.kv_cache_dtype",
    "load_format|config_format|model_loader_extra_config|ignore_patterns|pt_load_map_location|"
    "model_impl|model_class_overrides": "weight sync begins at the weights and layers that vLLM "
    "itself makes of model.path",
    "hf_overrides|hf_config_path|rope|rope_.+": "the learner reads config.json in model.path "
    "alone, and would compute another model: change it there (the head: model.head_dtype)",
    "revision|code_revision|hf_token|download_dir": "model.path is a folder by then",
    "tokenizer.*|skip_tokenizer_init|tokens_only": "prompts are ids of the tokenizer in model.path",
    "generation_config|override_generation_config": "it brings end tokens and defaults of sampling "
    "that the learner would not know",
    "logits_processors|watermark_config|diffusion_config": "tokens would be sampled from another "
    "distribution than the learner computes",
    ".*lora.*": "an engine computes the adapter that learner.lora asks for, and no other",
    "pipeline_parallel_size|data_parallel_.+|prefill_context_parallel_size|"
    "decode_context_parallel_size|dcp_.+|cp_.+|nnodes|node_rank|master_.+|device_ids|"
    "distributed_executor_backend|enable_elastic_ep|elastic_.+": "an engine's processes are those "
    "of actors.tensor_parallel, on this machine; more engines: actors.count",
    "enable_expert_parallel|.*eplb.*|enable_ep_.+|all2all_backend|expert_.+": "a mixture of "
    "experts is not supported yet",
    "kv_transfer_config|kv_events_config|kv_offloading_.+|ec_.+": "an update drops the keys and "
    "values that the engine itself holds; others would be read again under new weights",
    "kv_sharing_fast_prefill": "the probe of new weights needs the log-probs of a prompt",
    "enable_sleep_mode|sleep_.+|enable_cumem_allocator|cpu_offload_.+|offload_.+|"
    "weight_transfer_config": "weights have to stay where weight sync writes them",
    "enable_fault_tolerance|fault_tolerance_config": "an engine that fails is replaced, and gets "
    "verified weights",
    "runner|convert|pooler_config": "an actor's engine generates",
    "max_num_queued_.+": "a request beyond it would fail its rollout: see "
    "actors.rollouts_in_flight",
}
# Whose drafts come from a folder of weights. No update reaches these, those of `mtp` neither, so
# that fewer drafts are accepted as the policy moves; what is sampled and its log-probs remain the
# model's own.
_DRAFTED_BY_WEIGHTS = (
    "draft_model",
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
)
_NO_DRAFTS = {
    "extract_hidden_states": "it drafts nothing",
    "custom_class": "nothing is known of the drafts of a class of one's own",
}


def problems(config: Config) -> Iterator[str]:
    """Yield each key of `actors.engine` that the engine cannot have; none without vLLM."""
    keys, package = config.actors.engine, importlib.util.find_spec("vllm")
    if not keys or package is None or not package.submodule_search_locations:
        return
    source = Source(Path(package.submodule_search_locations[0]))
    for key, value in keys.items():
        field = f"{FIELD}.{key}"
        if remedy := refusal(str(key)):
            yield f"{field} = {value!r}: {remedy}"
        else:
            yield from source.wrong(field, value, source.arguments())
    asked = keys.get("speculative_config")
    if isinstance(asked, Mapping):
        yield from _speculation(asked)
    if on_cpu():
        yield from _of_cpu(config)


def refusal(key: str) -> str:
    """The reason for which a key is refused, with its remedy; '' for others."""
    if key in _OURS:
        return f"{_OURS[key]} sets it: leave it out"
    why = (said for keys, said in _REFUSED.items() if re.fullmatch(keys, key))
    return "".join(f"{said}: {_ALONE}" for said in why)


def token_width(config: Config) -> int:
    """Bytes of an element of keys and values, scales apart; 0 where it is packed with others."""
    kind = config.actors.engine.get("kv_cache_dtype", "auto")
    if kind in ("auto", None):
        return 2 if config.engine_dtype == "bfloat16" else 4
    if kind in ("float16", "bfloat16"):
        return 2
    packed = not str(kind).startswith(("fp8", "int8")) or str(kind).endswith("_mla")
    return 0 if packed else 1


def block_tokens(config: Config) -> int:
    """Tokens of a block of keys and values: as asked for, or vLLM's default here."""
    given = config.actors.engine.get("block_size")
    return given if type(given) is int and given > 0 else 128 if on_cpu() else 16


def _speculation(asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a draft beyond its keys' names and types."""
    field, method, model = f"{FIELD}.speculative_config", asked.get("method"), asked.get("model")
    if method is None and model is None:
        yield f"{field}.method is missing: name one, for example ngram"
    if method in _NO_DRAFTS:
        yield f"{field}.method = {method!r}: {_NO_DRAFTS[str(method)]}: name another, or leave it"
    if method in _DRAFTED_BY_WEIGHTS or (model and not method):
        if not (model and (Path(str(model)) / "config.json").is_file()):
            yield f"{field}.model = {model!r}: no config.json there: name the draft's folder"
    elif method is not None and not asked.get("num_speculative_tokens"):
        yield f"{field}.num_speculative_tokens is missing: give how many a draft has, for example 3"
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        yield f"{field}.method = 'suffix': it needs the package arctic-inference: install that"
    if method == "ngram_gpu" and on_cpu():
        yield f"{field}.method = 'ngram_gpu': there is no GPU here: name ngram"
    for key in ("rejection_sample_method", "synthetic_acceptance_rates"):
        if (value := asked.get(key)) in ("synthetic",) or (key.startswith("syn") and value):
            yield (
                f"{field}.{key} = {value!r}: drafts would be accepted whatever the model says of "
                "them: leave it out"
            )


def _of_cpu(config: Config) -> Iterator[str]:
    """Yield what an engine without a GPU cannot have: see `engine_arguments`."""
    keys, longest = config.actors.engine, config.model.max_model_len
    batch = keys.get("max_num_batched_tokens")
    if keys.get("enable_chunked_prefill"):
        yield (
            f"{FIELD}.enable_chunked_prefill = True: on a CPU vLLM would end in the first prompt "
            "cut in two: leave it out"
        )
    if isinstance(batch, int) and batch < longest:
        yield (
            f"{FIELD}.max_num_batched_tokens = {batch!r}: on a CPU a prompt of "
            f"model.max_model_len = {longest!r} tokens goes whole into a batch: give at least that"
        )


class Allowed(NamedTuple):
    """The values that an annotation allows: of these types, or among these choices."""

    types: frozenset[type] = frozenset()
    choices: tuple[Any, ...] = ()
    anything: bool = False  # what cannot be told from the source
    section: str = ""  # a mapping is the fields of this class

    def __or__(self, other: "Allowed") -> "Allowed":  # type: ignore[override]
        return Allowed(
            self.types | other.types,
            self.choices + other.choices,
            self.anything or other.anything,
            self.section or other.section,
        )

    def admits(self, value: Any) -> bool:
        """True where the value is one of them."""
        number = type(value) is int and float in self.types
        chosen = any(type(value) is type(each) and value == each for each in self.choices)
        return self.anything or type(value) in self.types or number or chosen

    def __str__(self) -> str:
        named = {bool: "true or false", int: "an integer", float: "a number", str: "a text",
                 list: "a list", dict: "a mapping"}  # fmt: skip
        words = [said for kind, said in named.items() if kind in self.types]
        if self.choices:
            listed = ", ".join(map(repr, self.choices))
            words.append(f"one of {textwrap.shorten(listed, _SHOWN, placeholder=' …')}")
        return ", or ".join(words)


_ANYTHING = Allowed(anything=True)
_PLAIN = {"int": int, "bool": bool, "str": str, "float": float, "list": list, "dict": dict}


class Source:
    """What vLLM's arguments are called and take, by its source in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._configs = [folder / _BACKENDS, *sorted((folder / "config").glob("*.py"))]

    def arguments(self) -> dict[str, ast.expr]:
        """The annotations of AsyncEngineArgs, by name."""
        return self._fields("EngineArgs") | self._fields("AsyncEngineArgs")

    def wrong(self, field: str, value: Any, known: Mapping[str, ast.expr]) -> Iterator[str]:
        """Yield that `field`, whose last part is none of the `known`, cannot have this value."""
        prefix, _, key = field.rpartition(".")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {prefix}.{near[0]}?" if near else "see docs/running.md"
            yield f"{field} = {value!r}: vLLM has no such argument: {meant}"
            return
        allowed = self._allowed(known[key])
        if key == "speculative_config":
            allowed |= Allowed(section="SpeculativeConfig")
        if allowed.section and isinstance(value, Mapping):
            inner = self._fields(allowed.section)
            for name, part in value.items():
                yield from self.wrong(f"{field}.{name}", part, inner)
        elif not allowed.admits(value):
            near = difflib.get_close_matches(str(value), map(str, allowed.choices), n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            yield f"{field} = {value!r}: {meant}vLLM takes {allowed}"

    def _fields(self, name: str) -> dict[str, ast.expr]:
        """The annotated fields of a class, but private ones."""
        files = (self._folder / _ARGUMENTS, *self._configs)
        found = next((each for file in files if (each := _definition(file, name))), None)
        body = found.body if isinstance(found, ast.ClassDef) else []
        return {
            each.target.id: each.annotation
            for each in body
            if isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and not each.target.id.startswith("_")
        }

    def _allowed(self, node: ast.expr) -> Allowed:
        match node:
            case ast.Constant(value=None):
                return Allowed(frozenset({type(None)}))
            case ast.Constant(value=str(quoted)):
                return self._allowed(ast.parse(quoted, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._allowed(left) | self._allowed(right)
            case ast.Subscript(value=ast.Name("Literal"), slice=choices):
                each = choices.elts if isinstance(choices, ast.Tuple) else [choices]
                return self._chosen(each)
            case ast.Subscript(value=ast.Name("list" | "dict" as kind)):
                return Allowed(frozenset({_PLAIN[kind]}))
            case ast.Name(name) if name in _PLAIN:
                return Allowed(frozenset({_PLAIN[name]}))
            case ast.Name(name):
                return self._named(name)
        return _ANYTHING

    def _chosen(self, nodes: list[ast.expr]) -> Allowed:
        """The choices of a Literal; a name in it is another's."""
        found = Allowed()
        for node in nodes:
            if isinstance(node, ast.Constant):
                found |= Allowed(choices=(node.value,))
            else:
                found |= self._allowed(node)
        return found

    def _named(self, name: str) -> Allowed:
        """What a name stands for: a Literal, the backends of attention, or a section."""
        for file in self._configs:
            match _definition(file, name):
                case ast.Assign(value=ast.Subscript(value=ast.Name("Literal")) as literal):
                    return self._allowed(literal)
                case ast.ClassDef(name="AttentionBackendEnum", body=body):
                    names = [each.targets[0] for each in body if isinstance(each, ast.Assign)]
                    upper = [each.id for each in names if isinstance(each, ast.Name)]
                    return Allowed(choices=("auto", *upper, *map(str.lower, upper)))
                case ast.ClassDef(body=body) if any(isinstance(e, ast.AnnAssign) for e in body):
                    return Allowed(frozenset({dict}), section=name)
                case ast.AST():
                    return _ANYTHING
        return _ANYTHING


@cache
def _definitions(file: Path) -> dict[str, ast.stmt]:
    """The classes and names that a file defines."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    found: dict[str, ast.stmt] = {}
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            found[each.name] = each
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found[each.targets[0].id] = each
    return found


def _definition(file: Path, name: str) -> ast.stmt | None:
    return _definitions(file).get(name)
