"""What an evaluation is of: weights, sets, environments and settings, every one of them checked.

Consumes a command line; produces a plan. Changes nothing, starts nothing, imports no engine.
"""

import argparse
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from actors.environments import searches
from configs.load import ConfigError
from configs.schema import Config
from scripts import eval_model, preflight
from scripts.eval_environments import overrides_of
from scripts.eval_report import asked_of
from scripts.eval_rows import Asked, Rows
from scripts.eval_sets import QuestionSet, load_sets
from scripts.eval_settings import Settings
from scripts.found_model import Found, find
from scripts.overrides import fields_of
from scripts.resolve import with_absolute_paths, with_port

_SAID_ELSEWHERE = {
    "model.path": "MODEL",
    "run_dir": "--out",
    "questions.train": "--sets",
    "questions.eval": "--sets",
}


@dataclass(frozen=True)
class Plan:
    """One evaluation: what is asked, of whom, under which environments, and where it is kept."""

    name: str
    configs: Mapping[str, Config]  # by environment; equal but for that
    sets: tuple[QuestionSet, ...]
    temperature: float
    samples: int
    exact: bool
    settings: Settings
    folder: Path

    @property
    def asked(self) -> dict[str, list[Asked]]:
        """Every rollout, by environment."""
        return asked_of(self.sets, list(self.configs), self.samples)

    @property
    def config(self) -> Config:
        """What all environments share."""
        return next(iter(self.configs.values()))


def planned(given: argparse.Namespace) -> Plan:
    """What the command line asks for. Raises ConfigError, with every check made, before anything
    is started or written.
    """
    _check(given)
    found = find(given.model, given.weights)
    sets = load_sets(given.sets, given.limit)
    base = eval_model.configured(found, given.config, given.overrides)
    configs = _by_environment(found, given, base)
    _check_all(configs)
    shared = _prepared(base, found.folder, given.exact)
    weights = eval_model.digest(found.folder)
    settings = Settings.of(shared, weights, given.temperature, given.exact)
    folder = given.out or Path("evaluations") / f"{found.name}-{_short(settings)}"
    own: dict[str, Any] = {
        "run_dir": str(folder.resolve()),
        "retrieval": with_port(shared.retrieval),
    }
    return Plan(
        name=found.name,
        configs={name: msgspec.structs.replace(each, **own) for name, each in configs.items()},
        sets=sets,
        temperature=given.temperature,
        samples=given.samples,
        exact=given.exact,
        settings=settings,
        folder=folder,
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


def _by_environment(found: Found, given: argparse.Namespace, base: Config) -> dict[str, Config]:
    """The configuration of each environment."""
    configs: dict[str, Config] = {}
    for name, changes in overrides_of(given.environment, base).items():
        config = eval_model.configured(found, given.config, [*given.overrides, *changes])
        configs[name] = _prepared(config, found.folder, given.exact)
    return configs


def _check(given: argparse.Namespace) -> None:
    if given.samples < 1:
        raise ConfigError(f"--samples {given.samples}: give at least 1")
    if given.limit < 0:
        raise ConfigError(f"--limit {given.limit}: give 0 (every question) or more")
    if not 0.0 <= given.temperature < float("inf"):
        raise ConfigError(f"--temperature {given.temperature}: give 0 (greedy) or more")
    if given.samples > 1 and not given.temperature:
        raise ConfigError(
            f"--samples {given.samples} with --temperature 0: greedy samples of a question are all "
            "the same: give --temperature, for example 1, or leave --samples out"
        )
    if not given.sets:
        raise ConfigError("--sets names no file: name questions, JSONL or parquet")
    if given.json and not given.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {str(given.json)!r}: there is no such folder to write it in")
    if given.json and given.json.is_dir():
        raise ConfigError(f"--json {str(given.json)!r}: this is a folder: name a file in it")
    for field in sorted(_SAID_ELSEWHERE.keys() & fields_of(given.overrides)):
        raise ConfigError(f"{field} is what {_SAID_ELSEWHERE[field]} says: drop the override")


def _check_all(configs: Mapping[str, Config]) -> None:
    """Raise ConfigError for what would fail later; who answers searches is looked at once."""
    searching = next((name for name, config in configs.items() if searches(config)), "")
    for name, config in configs.items():
        preflight.check_rollouts(config, searches=name == searching)


def _prepared(config: Config, model: Path, exact: bool) -> Config:
    """The configuration for that model, with nothing in it that is of training; `exact`: with no
    request beside another.
    """
    alone: dict[str, Any] = {"max_num_seqs": 1, "prefix_caching": False} if exact else {}
    replace = msgspec.structs.replace
    return with_absolute_paths(
        replace(
            config,
            model=replace(config.model, path=str(model)),
            questions=replace(config.questions, train="", eval=""),
            actors=replace(config.actors, **alone),
        )
    )


def _short(settings: Settings) -> str:
    known = msgspec.json.encode([settings.weights, settings.values])
    return hashlib.blake2b(known, digest_size=4).hexdigest()
