"""The replay process: `python -m replay.worker CONFIG [a.b=c …]`.

Consumes a configuration and its question files; produces `<run_dir>/events.log` and answers at the
run's replay endpoint. Waits for requests. Ends with 0 once the run is over and its peers have left,
or on SIGTERM; with 2, and a message, when its input cannot be used; with 1 on anything else.
"""

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
from replay.log import FILE_NAME, EventLog
from replay.protocol import ReplayError
from replay.questions import Questions, QuestionsError, load_questions
from replay.records import RunStarted, Summary, summarise
from replay.server import ReplayServer
from replay.trajectory import Sampling

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve one run; return the exit code."""
    if not arguments:
        print("usage: python -m replay.worker CONFIG [a.b=c ...]", file=sys.stderr)
        return 2
    try:
        config = load(arguments[0], arguments[1:])
        ledger = make_ledger(config)
        log = make_log(config)
        server = make_server(config, ledger, log)
    except (ConfigError, QuestionsError, ReplayError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    on_stop(server.stop)
    with log:
        server.run()
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


def make_log(config: Config) -> EventLog:
    """The run's new event log, begun with what the run is. Raises ConfigError, LogError."""
    if not config.run_dir:
        raise ConfigError("run_dir = '': name the directory that this run writes to")
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir = {config.run_dir!r}: {error.strerror}") from error
    log = EventLog.create(run_dir / FILE_NAME)
    text = yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, width=1000)
    log.append([RunStarted(time.time(), config.seed, text)])
    return log


def make_server(config: Config, ledger: Ledger, log: EventLog) -> ReplayServer:
    """The bound server. When it cannot be, the log, still empty of events, is removed again."""
    try:
        return ReplayServer(config, ledger, log)
    except ReplayError:
        log.close()
        log.path.unlink()
        raise


def _summary(payload: bytes) -> Summary:
    return summarise(decode_trajectory(payload))


if __name__ == "__main__":
    begin("replay")
    sys.exit(main(sys.argv[1:]))
