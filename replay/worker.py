"""The replay process: `python -m replay.worker CONFIG [--resume] [a.b=c …]`.

Consumes a configuration and its question files; produces `<run_dir>/events.log`, in segments, and
answers at the run's replay endpoint. With `--resume` it folds the log that is there and goes on
appending to it. Waits for requests. Ends with 0 once the run is over and its peers have left, or
on SIGTERM; with 2, and a message, when its input cannot be used; with 1 when the log cannot be
written, or on anything else.
"""

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from configs.load import ConfigError, load
from configs.process import begin, on_stop, socket_dir
from configs.schema import Config
from replay.codec import decode_trajectory
from replay.ledger import Ledger
from replay.log import FILE_NAME, EventLog, read_whole
from replay.protocol import LogError, ReplayError
from replay.questions import Questions, QuestionsError, load_questions
from replay.records import RunResumed, RunStarted, Summary, summarise
from replay.server import ReplayServer
from replay.trajectory import Sampling

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve one run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m replay.worker")
    parser.add_argument("config")
    parser.add_argument("--resume", action="store_true", help="go on with the run's event log")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.config, given.overrides)
        ledger = make_ledger(config)
        log = make_log(config, ledger, given.resume)
        server = make_server(config, ledger, log, given.resume)
    except (ConfigError, QuestionsError, ReplayError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    on_stop(server.stop)
    try:
        with log:
            server.run()
    except LogError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    logger.info("run over: %s", ledger.stop_cause)
    with contextlib.suppress(OSError):
        socket_dir(config.run_dir).rmdir()  # only when nobody else has a socket in it
    return 0


def make_ledger(config: Config) -> Ledger:
    """A ledger with the configured questions. Raises ConfigError, QuestionsError."""
    train, evaluation = config.questions.train, config.questions.eval
    if not train:
        raise ConfigError(f"questions.train = {train!r}: name a JSONL file of questions")
    return Ledger(
        config.replay,
        Questions(load_questions(train), config.seed),
        load_questions(evaluation, config.questions.eval_limit) if evaluation else (),
        Sampling(config.actors.temperature, config.seed),
        _summary,
        config.learner.total_steps,
    )


def make_log(config: Config, ledger: Ledger, resume: bool) -> EventLog:
    """The run's log: a new one, or the one that is there, folded. Raises ConfigError, LogError."""
    if not config.run_dir:
        raise ConfigError("run_dir = '': name the directory that this run writes to")
    path = Path(config.run_dir) / FILE_NAME
    if resume:
        log = EventLog.open(
            path, config.replay.segment_bytes
        )  # locked first, so that nobody writes behind what is folded
        try:
            ledger.restore(read_whole(path))
        except LogError:
            log.close()
            raise
        return log
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir = {config.run_dir!r}: {error.strerror}") from error
    return EventLog.create(path, config.replay.segment_bytes)


def make_server(config: Config, ledger: Ledger, log: EventLog, resume: bool) -> ReplayServer:
    """The bound server; what begins with it is on record. A log begun in vain is removed again."""
    try:
        server = ReplayServer(config, ledger, log)
    except ReplayError:
        log.close()
        if not resume:
            log.path.unlink()
        raise
    text = yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, width=1000)
    now = time.time()
    fact = RunResumed(now, text) if resume else RunStarted(now, config.seed, text)
    ledger.restore([fact])
    log.append([fact])
    log.sync()
    return server


def _summary(payload: bytes) -> Summary:
    return summarise(decode_trajectory(payload))


if __name__ == "__main__":
    begin("replay")
    sys.exit(main(sys.argv[1:]))
