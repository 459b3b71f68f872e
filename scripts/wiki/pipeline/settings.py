"""The settings of the wiki task: those of the start, those of the run, and what names each."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from configs.devices import on_cpu
from configs.load import CHANGEABLE_FIELDS, ConfigError, leaves, load, marked
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from configs.section import OF_THE_MACHINE
from scripts.setup.overrides import fields_of
from scripts.wiki.wiki import WikiFiles

CONFIG = REPOSITORY / "configs" / "wiki.yaml"
QUICK = ("questions.eval_limit=64", "learner.total_steps=6")
# Those that multiply bfloat16: of x86, and of ARM.
BF16 = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
FLOAT32 = ("model.dtype=float32",)
SLOW = (
    "this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16): everything is computed in "
    "float32, in about three times the minutes and 30 % more memory; --quick takes fewer steps"
)
# Of the start as of the run, because they say what fits this machine; the others are training's.
_FITTING = tuple(
    f"learner.{name}"
    for name in (
        *("threads", "micro_batch_tokens", "logprob_chunk_bytes", "gradient_checkpointing"),
        *("step_deadline_s", "batch_deadline_s", "eval_deadline_s"),
    )
)
_OF_TRAINING = ("learner", "replay", "weight_sync", "rewards", "run_dir", "keys")
_NOT_IN_DIGEST = {*CHANGEABLE_FIELDS, *marked(OF_THE_MACHINE), "run_dir", "keys"}
# The task makes these itself.
OF_TASK = (
    "model.path",
    "questions.train",
    "questions.eval",
    "retrieval.corpus",
    "retrieval.index",
)
# Of a warm start: above the run's learning rate, without averages, one checkpoint at a time.
OF_WARM_START = (
    "learner.lr=2e-4",
    "learner.warmup_steps=2",
    "learner.proximal=start_of_update",
    "learner.checkpoint_every=2",
    "learner.keep_checkpoints=1",
)


@dataclass(frozen=True)
class WikiOptions:
    """`steps` None: the configuration's; `quick`: fewer steps, and fewer questions."""

    seed: int = 0
    dense: bool = False
    quick: bool = False
    steps: int | None = None
    overrides: tuple[str, ...] = ()


def refuse_other_files(overrides: Sequence[str]) -> None:
    """Raise ConfigError where a file is named that the task makes itself."""
    given = fields_of(overrides)
    if field := next((each for each in OF_TASK if each in given), ""):
        raise ConfigError(
            f"{field} is the wiki task's own: drop the override; a model, text and questions of "
            "your own are what docs/quickstart.md is about"
        )


def of_run(options: WikiOptions, files: WikiFiles | None = None) -> tuple[str, ...]:
    """The overrides of the run, those of the command last. Without `files`, no paths."""
    steps = [] if options.steps is None else [f"learner.total_steps={options.steps}"]
    quick = QUICK if options.quick else ()
    return (*_shared(options, files), *quick, *steps, *options.overrides)


def of_start(options: WikiOptions, files: WikiFiles) -> tuple[str, ...]:
    """The overrides of the start: the run's, without those of training alone."""
    shared = [each for each in options.overrides if not _is_of_training(each)]
    return (*_shared(options, files), *shared, *OF_WARM_START)


def digest(overrides: Sequence[str], *more: object) -> str:
    """A name of these settings, without those that may change while one goes on."""
    tree = msgspec.to_builtins(load(CONFIG, overrides))
    values = [(name, value) for name, value in leaves(tree) if name not in _NOT_IN_DIGEST]
    known = msgspec.json.encode([sorted(values), [str(each) for each in more]])
    return hashlib.blake2b(known, digest_size=5).hexdigest()


def differing(one: Config, other: Config) -> list[tuple[str, object, object]]:
    """The fields that differ, with their values, of those that may not change while a run goes on:
    the seed and the questions first.
    """
    values, others = (dict(leaves(msgspec.to_builtins(each))) for each in (one, other))
    names = dict.fromkeys(("seed", "questions.train", *values, *others))
    found = [(name, values.get(name), others.get(name)) for name in names]
    return [each for each in found if each[1] != each[2] and each[0] not in _NOT_IN_DIGEST]


def settings(overrides: Sequence[str]) -> dict[str, object]:
    """The values that a result depends on, by field: without the task's paths, the seed, and what
    fits a machine.
    """
    without = {*_NOT_IN_DIGEST, *_FITTING, *OF_TASK, "seed"}
    tree = msgspec.json.decode(msgspec.json.encode(load(CONFIG, overrides)))  # as a file has it
    of_machine = ("_deadline_s", ".threads")
    return {k: v for k, v in leaves(tree) if k not in without and not k.endswith(of_machine)}


def lacks_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True for a CPU that would have to emulate bfloat16."""
    if not on_cpu() or not cpuinfo.exists():
        return False
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Feat"))]
    return bool(flags) and not BF16 & {*flags[0]}


def is_slow(config: Config) -> bool:
    """True where the configuration is in float32 because of this machine."""
    return config.model.dtype == "float32" and lacks_bf16()


def _shared(options: WikiOptions, files: WikiFiles | None) -> list[str]:
    found = [f"seed={options.seed}"]
    if lacks_bf16():
        found += FLOAT32
    if files:
        found += [
            f"model.path={files.model}",
            f"questions.train={files.train}",
            f"questions.eval={files.eval}",
            f"retrieval.index={files.index}",
        ]
    return found


def _is_of_training(override: str) -> bool:
    fields = fields_of([override])
    return any(f.partition(".")[0] in _OF_TRAINING and f not in _FITTING for f in fields)
