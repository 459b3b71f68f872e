"""The replay process: `python -m replay.worker CONFIG [--resume | --restart] [a.b=c …]`.

Consumes a configuration and its question files; produces `<run_dir>/events.log`, in segments, and
answers at the run's replay endpoint. With `--resume` or `--restart` it folds the log that is there
and goes on appending to it: `--resume` for a run of which nothing runs any more, `--restart` where
replay alone was killed and learner and actors live on (before it had begun a log, the run begins
here). Waits for requests. Ends with 0 once the run is over and its peers have left,
or on SIGTERM; with 2, and a message, when its input cannot be used; with 1 when the log cannot be
written, or on anything else.
"""

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from configs.load import MAY_DIFFER, ConfigError, dump, leaves, load
from configs.runtime.files import vocabulary_of
from configs.runtime.process import (
    Exit,
    announce_ready,
    begin,
    keep_no_freed_blocks,
    socket_dir,
)
from configs.runtime.signals import on_stop
from configs.schema import Config
from replay.ledger.ledger import Ledger
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import Record, ReplayRestarted, RunResumed, RunStarted
from replay.log.snapshots import set_aside as aside
from replay.log.summary import Sampled, summarise_payload
from replay.log.tail import End
from replay.protocol import LogError, ReplayError
from replay.question_files import QuestionsError
from replay.questions import QuestionFile, Questions, questions_of
from replay.restoring import restore as restored
from replay.server.reception import Reception
from replay.server.server import ReplayServer
from replay.trajectory import Sampling

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve one run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m replay.worker")
    parser.add_argument("config")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with a run that has ended")
    again.add_argument("--restart", action="store_true", help="learner and actors live on")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.config, given.overrides)
        ledger = make_ledger(config, logger.warning)
        reception = Reception(config)
        with contextlib.ExitStack() as stack:
            stack.callback(reception.close)
            log, recorded = make_log(config, ledger, given.resume, given.restart, reception)
            server = make_server(config, ledger, log, recorded, given.restart, reception)
            stack.pop_all()  # the server closes it
    except (ConfigError, QuestionsError, ReplayError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return Exit.BAD_INPUT
    on_stop(server.stop)
    try:
        with log:
            announce_ready()
            server.run()
    except LogError as error:
        print(f"replay: {error}", file=sys.stderr)
        return Exit.FAILED
    logger.info("run over: %s", ledger.stop_cause)
    with contextlib.suppress(OSError):
        socket_dir(config.run_dir).rmdir()  # only when nobody else has a socket in it
    return Exit.DONE


def make_ledger(config: Config, tell: Callable[[str], None] | None = None) -> Ledger:
    """Make a ledger; `tell` is told what rows are left out. Raises ConfigError, QuestionsError."""
    files = config.questions
    if not files.train:
        raise ConfigError(f"questions.train = {files.train!r}: name a JSONL file of questions")
    train = questions_of(config, "train")
    evaluation = questions_of(config, "eval") if files.eval else QuestionFile(())
    for field, file in ("train", train), ("eval", evaluation):
        if tell and file.unusable:
            for line in file.told(), *file.faults[1:]:
                tell(f"questions.{field}: left out: {line}")
    sampled = Sampled(vocabulary_of(config.model.path), config.actors.temperature)
    return Ledger(
        config.replay,
        Questions(train.questions, config.seed),
        evaluation.questions,
        Sampling(config.actors.temperature, config.seed),
        partial(summarise_payload, sampled=sampled),
        config.learner.total_steps,
        config.learner.eval_temperatures,
    )


def make_log(
    config: Config,
    ledger: Ledger,
    resume: bool,
    restart: bool,
    reception: Reception | None = None,
) -> tuple[EventLog, str | None]:
    """Create the run's log, or open the one that is there and restore the ledger from it, while
    `reception` says how far that is; return it and the configuration on record: None of a new log,
    empty where nothing is. Raises ConfigError, ReplayError.
    """
    if not config.run_dir:
        raise ConfigError("run_dir = '': name the directory that this run writes to")
    path = Path(config.run_dir) / FILE_NAME
    segment_bytes = config.replay.segment_bytes
    if resume or (restart and path.exists()):

        def read_to_end(path: Path) -> End:
            if reception is None:
                return restored(ledger, path, _set_aside)
            reception.open()  # nobody else has the log: the socket is nobody else's either
            return restored(ledger, path, _set_aside, reception.look)

        return EventLog.open(path, segment_bytes, read_to_end), ledger.state.recorded
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir = {config.run_dir!r}: {error.strerror}") from error
    return EventLog.create(path, segment_bytes), None


def make_server(
    config: Config,
    ledger: Ledger,
    log: EventLog,
    recorded: str | None,
    restart: bool,
    reception: Reception | None = None,
) -> ReplayServer:
    """Bind the server and put its beginning on record. A log begun in vain is removed again.

    Raises ConfigError where the configuration is not what a restarted run has on record, and
    ReplayError.
    """
    try:
        fact = _beginning(config, recorded, restart, max(time.time(), ledger.latest))
        ledger.restore([fact])
        server = ReplayServer(config, ledger, log, reception)
    except (ConfigError, ReplayError):
        log.close()
        if recorded is None:
            log.path.unlink()
        raise
    log.append([fact])
    log.sync()
    return server


def _set_aside(place: Path, why: str) -> None:
    logger.warning("%s: set aside as %s: older records are read instead", why, aside(place).name)


def _beginning(config: Config, recorded: str | None, restart: bool, now: float) -> Record:
    text = dump(config)
    if recorded is None or (restart and not recorded):
        return RunStarted(now, config.seed, text)
    if not restart:
        return RunResumed(now, text)
    if recorded != text and (
        wrong := _changes(yaml.safe_load(recorded), msgspec.to_builtins(config))
    ):
        raise ConfigError(wrong)
    return ReplayRestarted(now)


def _changes(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    there, here = dict(leaves(recorded)), dict(leaves(given))
    return "\n".join(
        f"--restart: {field} = {here.get(field)!r}: the event log has {there.get(field)!r}: put "
        "that back, or stop the run and go on with --resume"
        for field in sorted(here.keys() | there.keys())
        if field not in MAY_DIFFER and here.get(field) != there.get(field)
    )


if __name__ == "__main__":
    begin("replay")
    keep_no_freed_blocks()
    sys.exit(main(sys.argv[1:]))
