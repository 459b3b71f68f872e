"""Everything that must hold before a run goes on: its directory (configuration, event log,
checkpoints) and the changes that the user wants agree.

Changes nothing in the directory. Waits, with a deadline, for what a killed launcher left behind.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import yaml

from configs import devices, trust
from configs.load import (
    CHANGEABLE_FIELDS,
    MAY_DIFFER,
    ConfigError,
    differences,
    leaves,
    load,
    recorded_config,
)
from configs.retrieval import shown_urls
from configs.runtime import strict_yaml
from configs.runtime.libyaml import SafeLoader
from configs.runtime.process import socket_dir
from configs.schema import Config
from configs.section import Section
from learner import checkpoint
from learner.checkpoint import last_incarnation
from learner.errors import BadCheckpoint
from learner.evaluations import Evaluations
from replay.ledger.ledger import Ledger
from replay.ledger.state import LedgerState
from replay.log.compaction import is_compacted
from replay.log.event_log import FILE_NAME, read_whole, refuse_writer
from replay.log.records import RunResumed, RunStarted
from replay.log.segments import exists, segments
from replay.protocol import LogError
from replay.question_files import QuestionsError
from replay.restoring import restore
from replay.worker import make_ledger
from scripts.command.options import refusing
from scripts.command.terminal import status
from scripts.fleet import guardian
from scripts.setup import preflight
from scripts.setup.fit import fitted
from scripts.setup.hub import with_hub_paths
from scripts.setup.overrides import fields_of, get_field, with_fields
from scripts.setup.resolve import (
    can_listen,
    run_config,
    run_directory,
    with_absolute_paths,
    with_port,
)
from scripts.setup.retrieval import with_index_version

SWEEP_DEADLINE_S = 15.0
# The fields that may, in words: all of a section by its name.
_CHANGEABLE = ", ".join(
    dict.fromkeys(re.sub(r"^(sentinels)\..*", r"\1.*", f) for f in CHANGEABLE_FIELDS)
)


class Progress(msgspec.Struct, frozen=True):
    """Counts of the reports and evaluations in a run's log, the newest step of these, and whether
    trajectories were compacted away; `log` is False where there is none.
    """

    log: bool = False
    reports: int = 0
    evaluations: int = 0
    step: int = -1
    compacted: bool = False


def checked(
    run_dir: str,
    path: str | None,
    overrides: Sequence[str],
    here: bool = True,
    trusted: bool = False,
) -> tuple[Config, Progress]:
    """The configuration to go on with, and what was shown already; `trusted`: its record may
    decide all of it (configs/trust.py). Raises ConfigError."""
    folder = run_directory(Path(run_dir)).resolve()
    recorded = load(run_config(folder))
    trust.require(
        recorded,
        source=str(folder / "config.yaml"),
        trust=trusted,
        given={*_fields_in(path), *trust.given(overrides)},
    )
    trust.require_inside(folder, trust=trusted)
    _refuse_living(folder, Path(recorded.run_dir))
    _refuse_writer(folder)
    config = merged(recorded, path, overrides, folder)
    if not config.cluster.address:
        config = fitted(config)
    with status("checking what is on record"):
        preflight.check(config, resumed=True, here=here)
        config = with_index_version(config) if here else config
        return config, _progress(config, recorded)


def merged(recorded: Config, path: str | None, overrides: Sequence[str], folder: Path) -> Config:
    """The recorded configuration with the changes that may be made. Raises ConfigError."""
    given = with_absolute_paths(with_hub_paths(load(path or folder / "config.yaml", overrides)))
    named = _given_fields(path, overrides)  # a section without a line in it sets nothing
    fields = [field for field in named if not isinstance(get_field(given, field), Section)]
    problems = [
        f"{field} = {get_field(given, field)!r}: the run was started with "
        f"{get_field(recorded, field)!r}; only {_CHANGEABLE} may change in a run "
        "that goes on: leave it out, or "
        f"start a new run with model.path={folder}/checkpoints/step-N/model"
        for field in fields
        if field not in MAY_DIFFER and get_field(given, field) != get_field(recorded, field)
    ]
    urls = given.retrieval.url, recorded.retrieval.url
    if "retrieval.url" in fields and bool(urls[0]) != bool(urls[1]):
        problems.append(
            f"retrieval.url = {shown_urls(urls[0])}: the run was started with "
            f"{shown_urls(urls[1])}: other servers may take the place of such, not of its own, "
            "nor the reverse: leave it out"
        )
    places = [Path(place).resolve() for place in (folder, recorded.run_dir)]
    if given.run_dir and Path(given.run_dir).resolve() not in places:
        problems.append(
            f"run_dir = {given.run_dir!r}: the run goes on in {folder}: leave it out, or move the "
            "run's directory first"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    changes = {field: get_field(given, field) for field in fields if field in MAY_DIFFER}
    try:
        config: Config = with_fields(recorded, changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    retrieval = config.retrieval
    if not ("retrieval.port" in fields and retrieval.port):
        retrieval = msgspec.structs.replace(retrieval, port=recorded.retrieval.port)
        chooses = retrieval.has_own_server and not config.cluster.address
        if chooses and (not retrieval.port or can_listen(retrieval.host, retrieval.port)):
            retrieval = with_port(msgspec.structs.replace(retrieval, port=0))
    return msgspec.structs.replace(config, run_dir=str(folder), retrieval=retrieval)


def _given_fields(path: str | None, overrides: Sequence[str]) -> Iterator[str]:
    yield from _fields_in(path)
    yield from fields_of(overrides)


def _fields_in(path: str | None) -> list[str]:
    """The fields that a configuration of the user's says; none where no file is named."""
    if path is None:
        return []
    load(path)  # says what is wrong with it
    tree = yaml.load(Path(path).read_text(), SafeLoader) or {}
    return [field for field, _ in leaves(tree) if field != devices.KEY]


def _refuse_living(folder: Path, recorded: Path) -> None:
    """Raise ConfigError while a launcher of this run lives; end what a killed one left behind."""
    places = {folder} if recorded.exists() else {folder, recorded}  # it was moved
    for directory in (socket_dir(str(place)) for place in places):
        pid = guardian.launcher_of(directory)
        if pid is None:
            continue
        if guardian.lives(pid, directory):
            raise ConfigError(
                f"RUN = {str(folder)!r}: it is still running (launcher {pid}): stop it first "
                f"(Ctrl-C there, or kill {pid})"
            )
        guardian.sweep(f"{directory.name}-{pid}")
        if left := guardian.wait_gone(directory, SWEEP_DEADLINE_S):
            raise ConfigError(
                f"RUN = {str(folder)!r}: what its last launcher left is still being ended by "
                f"process {left}: try again in a moment"
            )


def _refuse_writer(folder: Path) -> None:
    if exists(path := folder / FILE_NAME):
        with refusing(LogError):
            refuse_writer(path)


def _restore(ledger: Ledger, path: Path, written: Config) -> None:
    """Restore a ledger, and compare what the run's last start on record was given with what is
    written in config.yaml. Raises ConfigError, LogError.
    """
    try:
        # Replay says which snapshots it passes over, and reads what it may be asked for.
        restore(ledger, path, lambda place, why: None, payloads=False)
    except LogError:
        with suppress(LogError):  # perhaps it was folded under what somebody has changed
            _check_record(path, written, _recorded(path))
        raise
    if ledger.state.facts:
        _check_record(path, written, ledger.state.recorded)


def _recorded(path: Path) -> str:
    starts = (r for r in read_whole(path) if isinstance(r, RunStarted | RunResumed))
    return deque(starts, maxlen=1)[0].config


def _check_record(path: Path, written: Config, text: str) -> None:
    """Raise ConfigError unless config.yaml is what the run's last start on record was given."""
    folder = path.parent
    try:
        recorded = recorded_config(strict_yaml.read(text))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: the configuration on record cannot be read: {error}: go on with the program "
            f"that wrote it, or start a new run with model.path={folder}/checkpoints/step-N/model"
        ) from error
    problems = [
        f"{folder}/config.yaml: {field} = {here!r}: the event log has {there!r}: put that back"
        for field, (there, here) in differences(recorded, written).items()
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _progress(config: Config, written: Config) -> Progress:
    """Read the newest snapshot and what was recorded since: what was shown, and whether the run can
    go on. Raises ConfigError.
    """
    path = Path(config.run_dir) / FILE_NAME
    with refusing(BadCheckpoint, LogError, QuestionsError):
        ledger = make_ledger(config)
        if there := exists(path):
            _restore(ledger, path, written)
        found = checkpoint.newest(config.run_dir)
        if found:
            checkpoint.check(found, config)
        last_incarnation(config.run_dir)
        Evaluations(config.run_dir, resumed_after=0)
        oldest = segments(path)[0] if there else None  # compaction begins with it
        compacted = oldest is not None and oldest.closed and is_compacted(oldest)
    state = ledger.state
    _check_steps(config, state, found.manifest.step if found else 0)
    steps = [report.step for report in state.reports.kept]
    newest = max([*steps, *(result.step for result in state.results.kept)], default=-1)
    return Progress(there, state.reports.count, state.results.count, newest, compacted)


def _check_steps(config: Config, state: LedgerState, saved: int) -> None:
    total, done = config.learner.total_steps, max(state.last_sampled, saved)
    if saved < state.committed:
        raise ConfigError(
            f"{config.run_dir}/checkpoints: the newest is of step {saved}, but step "
            f"{state.committed} was saved and its batches are let go: put checkpoints/"
            f"step-{state.committed} back"
        )
    if total < done:
        raise ConfigError(
            f"learner.total_steps = {total!r}: the run has come to step {done}: give at least that"
        )
    if state.stop_cause == "completed" and total == done:
        raise ConfigError(
            f"RUN = {config.run_dir!r}: nothing to continue: it completed its {done} steps; raise "
            "learner.total_steps to train on"
        )
