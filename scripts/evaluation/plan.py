"""The plan of an evaluation: sets, model, environments and settings, all checked.

`OUT/settings.json` records what the numbers depend on, before the first row; the folder then
belongs to those settings alone. Sets, environments, their limit and the number of samples may
change: each rollout has its own row and seed. Rows of a file that name their `data_source` form a
set of that name; others, and all rows of NAME=FILE, are one set.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from actors.environments.registry import searches
from configs import hints
from configs.load import ConfigError, leaves
from configs.runtime.files import write_json
from configs.schema import Config, QuestionColumns
from configs.trust import EVALUATING, TRUSTING
from replay.question_files import QuestionsError, question_files
from replay.questions import load_questions
from replay.trajectory import Question
from scripts.command.options import Options, argument, option, overrides
from scripts.evaluation.model_files import digest
from scripts.evaluation.rows import Asked, QuestionSet, Rows, asked_of
from scripts.setup import gpu_memory, hub, model_source, preflight
from scripts.setup.fit import fitted_alone
from scripts.setup.model_source import Found, find
from scripts.setup.overrides import fields_of
from scripts.setup.resolve import with_absolute_paths, with_port

SETTINGS = "settings.json"
_SECTIONS = ("model", "questions", "retrieval", "actors", "environment")
# Where things lie or run, how long is waited, and what training alone reads.
_WITHOUT_EFFECT = {
    "model.path",
    "questions.train",
    "questions.eval",
    "questions.eval_limit",
    *(f"questions.columns.{name}" for name in QuestionColumns.__struct_fields__),  # rows show it
    "retrieval.host",
    "retrieval.port",
    "retrieval.token_file",
    "retrieval.timeout_s",
    "retrieval.retries",
    "retrieval.max_connections",
    "retrieval.cache_queries",
    "retrieval.max_waiting_queries",
    "retrieval.request_deadline_s",
    "retrieval.drain_notice_s",
    "retrieval.threads",
    "retrieval.map_index",
    "actors.count",
    "actors.tensor_parallel",
    "actors.rollouts_in_flight",
    "actors.temperature",
    "actors.kv_cache_bytes",
    "actors.starting_deadline_s",
    "actors.engine_deadline_s",
    "actors.rollout_deadline_s",
    "actors.drain_deadline_s",
    "environment.name",  # a row says it
}
# A run's own port may be in use, by that run; its recorded searches answer no others.
_NOT_INHERITED = ("retrieval.port=0", "retrieval.recorded=")
_SET_BY = {
    "model.path": "MODEL",
    "run_dir": "--out",
    "questions.train": "--sets",
    "questions.eval": "--sets",
}


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Options of `forage evaluate`. Raises ConfigError for a value out of its range."""

    model: str = argument("a run, a checkpoint or a Hugging Face folder")
    sets: tuple[str, ...] = option(
        "JSONL or parquet, or NAME=FILE", default=MISSING, metavar="FILE"
    )
    overrides: tuple[str, ...] = overrides()
    weights: Literal["model", "ema"] = option("ema: their average", default="model")
    config: str | None = option("instead of the run's or checkpoint's own", metavar="FILE")
    trust: bool = option(TRUSTING, default=False)
    environment: tuple[str, ...] = option(
        "default: the configuration's", default=(), metavar="NAME"
    )
    temperature: float = option("default 0: greedy", default=0.0)
    samples: int = option("of each question: Avg@k and Pass@k", default=1, metavar="N", least=1)
    limit: int = option("only the first N questions of each set", default=0, metavar="N")
    exact: bool = option("one rollout at a time: the same numbers to the bit", default=False)
    against: str | None = option("compare with it, or an evaluation's folder", metavar="MODEL")
    engines: int = option("default: one, on GPUs as many as they hold", default=0, metavar="N")
    out: Path | None = option("default: one in evaluations/, by the settings", metavar="FOLDER")
    json: Path | None = option("write the report there too", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engines < 0:
            raise ConfigError(f"--engines {self.engines}: give 0 (as many as fit) or more")
        if self.limit < 0:
            raise ConfigError(f"--limit {self.limit}: give 0 (every question) or more")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature {self.temperature}: give 0 (greedy) or more")
        if self.samples > 1 and not self.temperature:
            raise ConfigError(
                f"--samples {self.samples} with --temperature 0: greedy samples of a question are "
                "all the same: give --temperature, for example 1, or leave --samples out"
            )
        if not self.sets:
            raise ConfigError("--sets names no file: name questions, JSONL or parquet")
        for field in sorted(_SET_BY.keys() & fields_of(self.overrides)):
            raise ConfigError(f"{field} is what {_SET_BY[field]} says: drop the override")


class Settings(msgspec.Struct, frozen=True):
    """The facts that the numbers depend on; `weights`: a digest of the model folder's contents."""

    model: str
    weights: str
    values: dict[str, Any]

    @classmethod
    def of(cls, config: Config, weights: str, temperature: float, exact: bool) -> Self:
        """The settings of an evaluation that begins now."""
        tree = msgspec.json.decode(msgspec.json.encode(config))  # lists and numbers as read again
        values = {
            name: value
            for name, value in leaves({key: tree.get(key, {}) for key in _SECTIONS})
            if name not in _WITHOUT_EFFECT
        }
        for field in ("corpus", "index"):
            values[f"retrieval.{field} (bytes)"] = _size(getattr(config.retrieval, field))
        values |= {"seed": config.seed, "--temperature": temperature, "--exact": exact}
        return cls(config.model.path, weights, values)

    def differences(self, other: Self) -> list[str]:
        """The fields in which `other`, the settings on record, differs."""
        ours = self.values | {f"weights of {self.model}": self.weights}
        theirs = other.values | {f"weights of {self.model}": other.weights}
        return [
            f"{name} = {theirs.get(name)!r} there, {ours.get(name)!r} here"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]


@dataclass(frozen=True)
class Plan:
    """One evaluation: questions, model, environments, sampling, and the folder of its rows."""

    name: str
    configs: Mapping[str, Config]  # by environment; equal but for that
    sets: tuple[QuestionSet, ...]
    temperature: float
    samples: int
    exact: bool
    settings: Settings
    folder: Path
    engines: int = 1  # 0: as many as fit

    @property
    def asked(self) -> dict[str, list[Asked]]:
        """Every rollout, by environment."""
        return asked_of(self.sets, list(self.configs), self.samples)

    @property
    def config(self) -> Config:
        """The configuration of the first environment; the others differ in that alone."""
        return next(iter(self.configs.values()))


def planned(options: EvaluateOptions) -> Plan:
    """Make the plan, with every check that needs no engine. Raises ConfigError."""
    found = find(options.model, options.weights)
    base = configured(found, options.config, options.overrides, options.trust)
    sets = load_sets(options.sets, options.limit, base.questions.columns)
    configs = _by_environment(found, options, base)
    searching = next((name for name, config in configs.items() if searches(config)), "")
    for name, config in configs.items():  # the source of passages is checked once
        preflight.check_rollouts(config, searches=name == searching)
    shared = _prepared(base, found.folder, options.exact)
    _require_gpus(options.engines, shared)
    weights = digest(found.folder)
    settings = Settings.of(shared, weights, options.temperature, options.exact)
    known = msgspec.json.encode([settings.weights, settings.values])
    short = hashlib.blake2b(known, digest_size=4).hexdigest()
    folder = options.out or Path("evaluations") / f"{found.name}-{short}"
    run_dir, retrieval = str(folder.resolve()), with_port(shared.retrieval)
    return Plan(
        name=found.name,
        configs={
            name: msgspec.structs.replace(each, run_dir=run_dir, retrieval=retrieval)
            for name, each in configs.items()
        },
        sets=sets,
        temperature=options.temperature,
        samples=options.samples,
        exact=options.exact,
        settings=settings,
        folder=folder,
        engines=options.engines,
    )


def check_rows(plan: Plan, rows: Rows) -> None:
    """Raise ConfigError where a row is of another question than the set has under that id."""
    for each in plan.sets:
        now = {question.id: question for question in each.questions}
        for asked, row in rows.by_rollout.items():
            question = now.get(asked.id) if asked.set == each.name else None
            if question and (question.text, question.answers) != (row.question, row.gold):
                raise ConfigError(
                    f"--out {str(plan.folder)!r}: {each.name} question {asked.id!r} was "
                    f"{row.question!r} {list(row.gold)!r} there and is {question.text!r} "
                    f"{list(question.answers)!r} in {each.path}: name another folder"
                )


def _by_environment(found: Found, options: EvaluateOptions, base: Config) -> dict[str, Config]:
    configs: dict[str, Config] = {}
    for name in options.environment or [base.environment.name]:
        changed = [*options.overrides, f"environment.name={name}"]
        config = configured(found, options.config, changed, options.trust)
        configs[name] = _prepared(config, found.folder, options.exact)
    return configs


def _prepared(config: Config, model: Path, exact: bool) -> Config:
    replace, actors = msgspec.structs.replace, config.actors
    if exact:
        actors = replace(actors, max_num_seqs=1, prefix_caching=False)
    prepared = replace(
        config,
        model=replace(config.model, path=str(model)),
        questions=replace(config.questions, train="", eval=""),
        actors=actors,
    )
    prepared = with_absolute_paths(hub.with_hub_paths(prepared, ("retrieval.encoder",)))
    return fitted_alone(prepared)


def _require_gpus(engines: int, config: Config) -> None:
    gpus, workers = len(gpu_memory.totals()), config.actors.tensor_parallel
    if gpus and engines > (most := gpus // workers):
        raise ConfigError(
            f"--engines {engines}: each takes actors.tensor_parallel = {workers} of {gpus} GPUs "
            f"here: give at most {most}"
        )


def agree(folder: Path, settings: Settings) -> None:
    """Record the folder's settings, or check them against its record. Raises ConfigError."""
    path, out = folder / SETTINGS, f"--out {str(folder)!r}"
    try:
        if path.exists():
            if unequal := settings.differences(recorded(path)):
                raise ConfigError(
                    f"{out} holds another evaluation: {'; '.join(unequal)}: give back what it was "
                    "begun with, or name another folder"
                )
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{out} holds something else than an evaluation: name a new folder")
        write_json(path, settings)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}: name a folder that can be written") from error


def recorded(path: Path) -> Settings:
    """The settings that a folder was begun with. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: the settings of an evaluation cannot be read: {error}: name another --out"
        ) from error


def _size(given: str) -> int:
    path = Path(given)
    if not given or not path.exists():
        return 0
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


def load_sets(
    given: Sequence[str], limit: int = 0, columns: QuestionColumns | None = None
) -> tuple[QuestionSet, ...]:
    """Read every set, or its first `limit` questions (0: all). Raises ConfigError."""
    sets: dict[str, QuestionSet] = {}
    for each in given:
        for found in _sets_of(each, columns or QuestionColumns()):
            if found.name in sets:
                raise ConfigError(
                    f"--sets {each}: a set named {found.name!r} is in {sets[found.name].path} too: "
                    f"give this one another name: --sets OTHER={found.path}"
                )
            sets[found.name] = found
    return tuple(
        QuestionSet(each.name, each.path, each.questions[: limit or None]) for each in sets.values()
    )


def _sets_of(given: str, columns: QuestionColumns) -> Iterator[QuestionSet]:
    name, path, otherwise = _named(given)
    if not all(file.is_file() for file in question_files(path)):
        wanted = "name questions, JSONL or parquet, as FILE or NAME=FILE"
        remedy = hints.did_you_mean(path) or wanted
        raise ConfigError(f"--sets {given}: {str(path)!r}: no file there: {remedy}")
    sets: dict[str, list[Question]] = {}
    try:
        for question in load_questions(path, columns=columns):
            sets.setdefault(name or question.source or otherwise, []).append(question)
    except QuestionsError as error:
        raise ConfigError(f"--sets {given}: {error}") from error
    for found, questions in sets.items():
        yield QuestionSet(found, path, tuple(questions))


def _named(given: str) -> tuple[str, Path, str]:
    """The name that it gives, the path, and the name of rows that say no `data_source`."""
    name, separator, value = given.partition("=")
    if not separator or Path(given).exists():
        name, value = "", given
    local = hub.questions("--sets", value)
    otherwise = Path(local).stem if local == value else re.split("[/:@]", value)[1]
    return name, Path(local), otherwise


def configured(
    found: Found, config_path: str | None, changes: Sequence[str], trusted: bool = False
) -> Config:
    """The configuration to evaluate with: `--config`, else the recorded. Raises ConfigError."""
    applied = [*_NOT_INHERITED, *changes]
    return model_source.configured(
        found.given, found.record, config_path, applied, trusted=trusted, reads=EVALUATING
    )
