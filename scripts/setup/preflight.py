"""Checks of a configuration, made before any process of a run starts.

Each problem is one line that names the field, the value and the remedy.
"""

import asyncio
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.environments import registry
from actors.errors import Unscorable
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import RecordedRetriever
from actors.rewards.judge import KEY_FIELD, KEY_REMEDY
from actors.rewards.scorer import try_own
from actors.user_code import load_entry_point
from configs.environment import BUILT_IN
from configs.load import ConfigError, load
from configs.schema import Config
from replay.protocol import ReplayError
from replay.questions import question_files, read_questions
from retrieval_server.auth import read_token
from retrieval_server.encoder_settings import require_encoder
from retrieval_server.index.open_index import look
from retrieval_server.protocol import BadIndex, RetrievalError
from scripts.setup.machine import lacks
from scripts.setup.model_checks import limits, prompts
from scripts.setup.resolve import can_listen, is_run, resolve
from scripts.setup.retrieval import ServerFailed, try_search

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


def checked(path: str, overrides: Sequence[str], here: bool = True) -> Config:
    """Load, resolve and check a configuration. Raises ConfigError before anything is started."""
    config = resolve(load(path, overrides), Path(path).stem)
    check(config, here=here)
    return config


def check(config: Config, resumed: bool = False, here: bool = True) -> None:
    """Raise ConfigError listing every problem found; a resumed run has a directory already. Without
    `here`, what this machine has and reaches now is left out: nothing is started on it.
    """
    checks = (*_CHECKS, *(_OF_HERE if here else ()), *(() if resumed else (_run_dir,)))
    _refuse(config, checks)


def check_machine(config: Config) -> None:
    """The same of this machine alone, for a task whose files are yet to be made."""
    _refuse(config, (_vllm, lacks, _run_dir))


def check_model(config: Config) -> None:
    """The same of the model alone, for what neither rolls out nor asks questions."""
    _refuse(config, (_model, limits))


def _refuse(config: Config, checks: Iterable[Callable[[Config], Iterator[str]]]) -> None:
    problems = [problem for find in checks for problem in find(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_rollouts(config: Config, searches: bool = True) -> None:
    """`check` of model, engine and, where it `searches`, retrieval. Raises ConfigError."""
    checks = [_model, limits, _environment, _vllm]
    _refuse(config, [*checks, _retrieval] if searches else checks)


def _model(config: Config) -> Iterator[str]:
    path = Path(config.model.path)
    if not config.model.path:
        yield "model.path is empty: name a Hugging Face folder, or a model on the Hub"
    elif not (path / "config.json").is_file():
        yield f"model.path = {config.model.path!r}: no config.json; name a Hugging Face folder"
    elif not any(path.glob("*.safetensors")):
        yield (
            f"model.path = {config.model.path!r}: no *.safetensors there; save the model with "
            "save_pretrained(..., safe_serialization=True)"
        )
    elif not has_tokenizer(path):
        yield f"model.path = {config.model.path!r}: no tokenizer; save it beside the model"


def has_tokenizer(folder: Path) -> bool:
    """True where a tokenizer's files lie in the folder."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _questions(config: Config) -> Iterator[str]:
    for field in ("train", "eval"):
        path = getattr(config.questions, field)
        wanted = 'name a JSONL or parquet file of {"question", "answers"}'
        if not path:
            yield f"questions.{field} is empty: {wanted}"
        elif not all(file.is_file() for file in question_files(Path(path))):
            yield f"questions.{field} = {path!r}: no file there: {wanted}"
        else:
            try:
                read_questions(path, columns=config.questions.columns)
            except (ReplayError, ValueError, OSError) as error:
                yield _fault(f"questions.{field}", path, error)


def _fault(field: str, path: str, error: Exception) -> str:
    """`field = path: …`, from an error that names the path, or a line of it, once more."""
    text = re.sub(rf"{re.escape(path)}:(?=\d)", "line ", str(error))
    text = re.sub(rf"^'?{re.escape(path)}'?:? ", "", text)
    return f"{field} = {path!r}: {text}"


def _environment(config: Config) -> Iterator[str]:
    try:
        registry.check(config)
        path, trusted = config.model.path, config.model.trust_remote_code
        if registry.needs_chat_template(config) and path and has_tokenizer(Path(path)):
            prompter = Prompter(load_tokenizer(path, trusted), config.questions, config.actors)
            registry.check(config, prompter)
    except ConfigError as error:
        yield str(error)
    except (OSError, ValueError) as error:
        yield f"model.path = {config.model.path!r}: no usable tokenizer there: {error}"


def _told(check: Callable[..., object], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except (ConfigError, ServerFailed) as error:
        yield str(error)


def _acting(config: Config) -> Iterator[str]:
    return _told(registry.require_acting, config)


def _retrieval(config: Config) -> Iterator[str]:
    yield from _told(read_token, config.retrieval.token_file)
    if config.retrieval.recorded:
        yield from _told(RecordedRetriever.open, config)
    if not config.starts_retrieval_server:
        return
    path, index = config.retrieval.corpus, config.retrieval.index
    if not (path or index):
        yield 'retrieval.corpus is empty: name a JSONL or parquet file of {"id", "contents"}'
    else:
        try:
            look(config.retrieval)
        except BadIndex as error:
            yield _fault("retrieval.index", index, error)
        except (RetrievalError, ValueError, OSError) as error:
            yield _fault("retrieval.corpus", path, error)
    if config.retrieval.port and (why := can_listen(config.retrieval)):
        yield (
            f"retrieval.port = {config.retrieval.port!r}: cannot listen on "
            f"{config.retrieval.host} ({why}); stop what uses it, or set it to 0"
        )


def _search(config: Config) -> Iterator[str]:
    if config.retrieval.url and registry.searches(config):
        yield from _told(try_search, config)


def _rewards(config: Config) -> Iterator[str]:
    asked, limit_s = config.rewards, config.actors.rollout_deadline_s
    try:
        read_token(asked.judge.key_file, KEY_FIELD, KEY_REMEDY)
        if asked.custom:
            load_entry_point("rewards.custom", asked.custom)
    except ConfigError as error:
        yield str(error)
    if asked.similarity.model:
        try:
            require_encoder(Path(asked.similarity.model))
        except BadIndex as error:
            yield _fault("rewards.similarity.model", asked.similarity.model, error)
    for field, used, timeout_s in (
        ("judge.timeout_s", asked.judge.url, asked.judge.timeout_s),
        ("similarity.timeout_s", asked.similarity.model, asked.similarity.timeout_s),
        ("custom_timeout_s", asked.custom, asked.custom_timeout_s),
    ):
        twice = field == "custom_timeout_s"  # it waits as long for its turn
        if used and timeout_s * (1 + twice) >= limit_s:
            yield (
                f"rewards.{field} = {timeout_s!r}{' twice' * twice}: a rollout is given up after "
                f"actors.rollout_deadline_s = {limit_s!r}, its reward included: lower the former "
                "or raise the latter"
            )


def _own_reward(config: Config) -> Iterator[str]:
    name = config.rewards.custom
    if not name or config.environment.name not in BUILT_IN:
        return  # of what another environment's rollouts look like nothing is known
    try:
        question = read_questions(Path(config.questions.train), limit=1).questions[0]
        asyncio.run(try_own(config.rewards, question))
    except Unscorable as error:
        yield (
            f"rewards.custom = {name!r}: tried on a made-up rollout, {error}: mend it, and see it "
            "score a rollout of yours: forage try CONFIG"
        )
    except (ConfigError, ReplayError, ValueError, OSError):
        return  # said elsewhere


def _vllm(config: Config) -> Iterator[str]:
    if importlib.util.find_spec("vllm") is None:
        yield (
            "vllm is not installed: run `make .venv` (with GPU=1 on a machine with GPUs) and use "
            ".venv/bin/python"
        )
        return
    torch_version = importlib.metadata.version("torch")
    for name in BROKEN_BESIDE_CPU_TORCH:
        if importlib.util.find_spec(name) is None:
            continue
        if "+cpu" in torch_version and "+cpu" not in importlib.metadata.version(name):
            yield (
                f"{name} {importlib.metadata.version(name)} is a CUDA build beside torch "
                f"{torch_version} "
                f"and breaks vLLM's imports: pip uninstall -y {' '.join(BROKEN_BESIDE_CPU_TORCH)}"
            )


def _run_dir(config: Config) -> Iterator[str]:
    path = Path(config.run_dir)
    there = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    if path.exists() and not path.is_dir():
        yield f"run_dir = {config.run_dir!r}: a file, no directory: name another"
    elif is_run(path):
        yield (
            f"run_dir = {config.run_dir!r}: in use by another run, which is kept: name a new one, "
            f"or go on with that one: forage resume {config.run_dir}"
        )
    elif there:
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        yield (
            f"run_dir = {config.run_dir!r}: it holds {', '.join(map(repr, there[:3]))}{more}, "
            "which are no run's: name a new or empty directory, or move them away"
        )


def _signal(config: Config) -> Iterator[str]:
    if config.replay.group_size == 1 and config.learner.total_steps:
        yield (
            "replay.group_size = 1: an advantage is a reward less the mean of its group's, which "
            "is always 0 in a group of one, and nothing would be learned: give 2 or more"
        )


_CHECKS = (
    _model,
    limits,
    _questions,
    prompts,
    _signal,
    _environment,
    _acting,
    _retrieval,
    _rewards,
    _own_reward,
    _vllm,
)
_OF_HERE = (_search, lacks)


def check_parts(config: Config, model: bool, retrieval: bool, rewards: bool = False) -> None:
    """`check` of the environment and, where asked, of the other parts. Raises ConfigError."""
    checks = [_model, limits] if model else []
    checks += [_environment, _rewards] if rewards else [_environment]
    _refuse(config, [*checks, _retrieval] if retrieval else checks)
