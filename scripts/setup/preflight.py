"""Checks of a configuration, made before any process of a run starts.

Each problem is one line that names the field, the value and the remedy.
"""

import asyncio
import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from actors.environments import registry
from actors.errors import Unscorable
from actors.gateway import program
from actors.policies import engine_keys
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import RecordedRetriever
from actors.rewards.judge import KEY_FIELD, KEY_REMEDY
from actors.rewards.scorer import try_own
from actors.user_code import load_entry_point
from configs import hints
from configs.environment import BUILT_IN
from configs.fleet import ClusterConfig
from configs.keys import LEARNER, Addresses
from configs.load import ConfigError, load
from configs.runtime.process import most_descriptors
from configs.schema import Config
from replay.codec import MAX_TRAJECTORY_BYTES, MAX_TURNS
from replay.protocol import ReplayError
from replay.question_files import WANTED
from replay.questions import FIELDS, questions_of, read_questions
from retrieval_server.auth import read_token
from retrieval_server.encoder_settings import require_encoder
from retrieval_server.index.open_index import look
from retrieval_server.protocol import BadIndex, RetrievalError
from scripts.command.terminal import status
from scripts.setup import learning
from scripts.setup.live import live_problems, no_purse
from scripts.setup.machine import lacks, lacks_for_an_engine, record_bytes
from scripts.setup.model_checks import folder, has_tokenizer, limits, prompts
from scripts.setup.overrides import get_field
from scripts.setup.resolve import can_listen, is_run, resolve
from scripts.setup.retrieval import ServerFailed, try_search, with_index_version

OTHER_DESCRIPTORS = 200  # of replay: log, sockets of its own, strangers, console, joining actors
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


def checked(path: str, overrides: Sequence[str], here: bool = True, nodes: bool = False) -> Config:
    """Load, resolve and check a configuration, of this machine alone unless what runs may lie on
    `nodes`. Raises ConfigError before anything is started.
    """
    config = load(path, overrides)
    if not nodes:
        config = msgspec.structs.replace(config, cluster=ClusterConfig())
    config = resolve(config, Path(path).stem)
    with status("checking the configuration"):
        check(config, here=here)
        return with_index_version(config) if here else config


def check(config: Config, resumed: bool = False, here: bool = True) -> None:
    """Raise ConfigError listing every problem found; a resumed run has a directory already. Without
    `here`, what this machine has and reaches now is left out: nothing is started on it. What the
    nodes of a cluster have is checked there (scripts/fleet/node_checks.py).
    """
    mine = (_chosen,) if config.cluster.address else (lacks,)
    now = (_search, _endpoints, _descriptors, *mine) if here else ()
    checks = (*_CHECKS, *now, *(() if resumed else (learning.idle_rollbacks, _run_dir)))
    _refuse(config, checks)


def check_machine(config: Config) -> None:
    """The same of this machine alone, for a task whose files are yet to be made."""
    _refuse(config, (_vllm, engine_keys.problems, lacks, _run_dir))


def check_model(config: Config) -> None:
    """The same of the model alone, for what neither rolls out nor asks questions."""
    _refuse(config, (folder, limits))


def _refuse(config: Config, checks: Iterable[Callable[[Config], Iterator[str]]]) -> None:
    problems = [problem for find in checks for problem in find(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_rollouts(config: Config, searches: bool = True) -> None:
    """`check` of model, engine and, where it `searches`, retrieval. Raises ConfigError."""
    checks = [folder, limits, _environment, _vllm, engine_keys.problems, lacks_for_an_engine]
    _refuse(config, [*checks, _retrieval] if searches else checks)


def _questions(config: Config) -> Iterator[str]:
    for field in FIELDS:
        path = getattr(config.questions, field)
        if not path:
            yield f"questions.{field} is empty: {WANTED}"
        else:
            try:
                questions_of(config, field)
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
        program.check(config)
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
    if config.retrieval.is_live:
        yield from live_problems(config)
    elif not (path or index):
        yield 'retrieval.corpus is empty: name a JSONL or parquet file of {"id", "contents"}'
    else:
        try:
            look(config.retrieval)
        except BadIndex as error:
            yield _fault("retrieval.index", index, error)
        except (RetrievalError, ValueError, OSError) as error:
            near = hints.did_you_mean(Path(path)) if path else ""
            yield ": ".join(filter(None, (_fault("retrieval.corpus", path, error), near)))
    if config.cluster.address:
        return
    if config.retrieval.port and (why := can_listen(config.retrieval.host, config.retrieval.port)):
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
        files, need = config.questions, config.rewards.need_answers
        (question,) = read_questions(files.train, 1, files.columns, need_answers=need).questions
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
            "vllm is not installed: run `make .venv` and use .venv/bin/python (on a machine with "
            "GPUs `make .venv GPU=1`, and .venv-gpu/bin/python)"
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
    above = next(each for each in path.resolve().parents if each.exists())
    if path.exists() and not path.is_dir():
        yield f"run_dir = {config.run_dir!r}: a file, no directory: name another"
    elif is_run(path):
        yield (
            f"run_dir = {config.run_dir!r}: in use by another run, which is kept: name a new one, "
            f"or go on with that one: forage resume {config.run_dir} [--trust]"
        )
    elif there:
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        yield (
            f"run_dir = {config.run_dir!r}: it holds {', '.join(map(repr, there[:3]))}{more}, "
            "which are no run's: name a new or empty directory, or move them away"
        )
    elif why := _unwritable(nearest := path.resolve() if path.is_dir() else above):
        yield f"run_dir = {config.run_dir!r}: {str(nearest)!r} {why}: name another"


def _unwritable(folder: Path) -> str:
    """Why nothing can be made in a folder; '' where a folder made there could be removed again."""
    if not folder.is_dir():
        return "is no directory"
    try:
        with tempfile.TemporaryDirectory(prefix=".forage-", dir=folder):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _keys(config: Config) -> Iterator[str]:
    folder, keys = Path(config.keys), Addresses.of(config).keys
    if config.keys and keys is None and not config.cluster.address:
        yield (
            f"keys = {config.keys!r} acts on nothing without a tcp:// endpoint: leave it empty, or "
            "set replay.endpoint or weight_sync.endpoint to tcp://HOST:PORT"
        )
    elif config.keys and keys is not None and folder.exists():
        yield from _told(keys.check, LEARNER)


def _endpoints(config: Config) -> Iterator[str]:
    """Yield the tcp:// endpoints at which this machine cannot listen."""
    for section in ("replay",) if config.cluster.address else ("replay", "weight_sync"):
        parts = urlsplit(endpoint := getattr(config, section).endpoint)
        if parts.scheme == "tcp" and (why := can_listen(str(parts.hostname), parts.port or 0)):
            yield (
                f"{section}.endpoint = {endpoint!r}: this machine cannot listen there ({why}): "
                "name an address of it, and a free port"
            )


def lacks_descriptors(actors: int) -> str:
    """What this machine lacks of open files for a replay of so many actors, '' where nothing:
    without one left, nobody more is let in.
    """
    needed, most = OTHER_DESCRIPTORS + 2 * actors, most_descriptors()
    if needed <= most:  # two an actor: one that is started again may come before its old one goes
        return ""
    return (
        f"replay then holds up to {needed} sockets and files, and a process here may open {most}: "
        "raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower it"
    )


def _descriptors(config: Config) -> Iterator[str]:
    if why := lacks_descriptors(config.actors.count):
        yield f"actors.count = {config.actors.count!r}: {why}"


def _chosen(config: Config) -> Iterator[str]:
    """Yield what the launcher chooses over several nodes, as the learner may move."""
    for field in ("weight_sync.endpoint", "learner.rendezvous"):
        if value := get_field(config, field):
            yield (
                f"{field} = {value!r}: with cluster.address = {config.cluster.address!r} the "
                "launcher chooses it: leave it out"
            )


def _records(config: Config) -> Iterator[str]:
    """Yield that a rollout may be longer than the record of one that replay takes."""
    if (turns := config.actors.max_turns + 1) > MAX_TURNS:
        yield (
            f"actors.max_turns = {config.actors.max_turns!r}: a record holds {MAX_TURNS} turns, "
            f"and such a rollout has up to {turns}: give at most {MAX_TURNS - 1}"
        )
    if (size := record_bytes(config)) > MAX_TRAJECTORY_BYTES:
        yield (
            f"model.max_model_len = {config.model.max_model_len!r}: the record of so long a "
            f"rollout takes up to {size / (1 << 20):.1f} MiB, and a message holds "
            f"{MAX_TRAJECTORY_BYTES >> 20}: lower it to {MAX_TRAJECTORY_BYTES // 13}"
        )


_CHECKS = (
    folder,
    limits,
    _questions,
    prompts,
    _records,
    *learning.CHECKS,
    _keys,
    _environment,
    _acting,
    _retrieval,
    _rewards,
    _own_reward,
    _vllm,
    engine_keys.problems,
)


def check_parts(
    config: Config, model: bool, retrieval: bool, rewards: bool = False, environment: bool = True
) -> None:
    """`check` of the parts that are asked for. Raises ConfigError."""
    checks = [folder, limits, engine_keys.problems] * model
    checks += [_environment] * environment + [_rewards] * rewards
    _refuse(config, [*checks, _retrieval, no_purse] if retrieval else checks)
