"""The learner's process: `python -m learner.worker CONFIG [a.b=c …]`.

Consumes batches from replay and the actors' word that weights are applied; produces policy
versions, checkpoints and TensorBoard numbers. Waits, each with a deadline, for actors to join and
to verify version 0, then for batches and evaluations; unblocked by them, by Stop, or by
SIGTERM/SIGINT, after which it saves, commits and leaves.
"""

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.load import ConfigError, load, replay_endpoint, weight_sync_endpoint
from configs.process import begin, make_socket_dir, on_stop
from configs.schema import Config
from learner.errors import BadModel, LearnerError
from learner.stopping import StopRequested, StopSwitch
from learner.watchdog import phase
from replay.client import BatchReader
from replay.protocol import ReplayError
from weight_sync.protocol import WeightSyncError

if TYPE_CHECKING:  # heavy imports wait until the number of threads is set
    from learner.metrics import Metrics
    from learner.run import Run
    from weight_sync.publisher import Publisher

log = logging.getLogger(__name__)
INCARNATION = 1
FAILED, BAD_INPUT = 1, 2


def main(arguments: Sequence[str]) -> int:
    """Run the learner to its end; returns the exit code: 0, 2 for bad input, 1 for named errors."""
    if not arguments:
        print("usage: python -m learner.worker CONFIG [a.b=c …]", file=sys.stderr)
        return BAD_INPUT
    try:
        config = load(arguments[0], arguments[1:])
        begin("learner", threads=config.learner.threads)
        if not config.run_dir:
            raise ConfigError(
                "run_dir = '': name the run's directory, for example run_dir=runs/try"
            )
        make_socket_dir(config.run_dir)
        stop = StopSwitch()
        on_stop(stop)
        work(config, stop)
    except (ConfigError, BadModel) as error:
        print(f"learner: {error}", file=sys.stderr)
        return BAD_INPUT
    except (LearnerError, ReplayError, WeightSyncError) as error:
        print(f"learner: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    return 0


def work(config: Config, stop: StopSwitch) -> None:
    """Build the collaborators, train, and end the run in order."""
    # Heavy imports come after `begin` has set the number of threads.
    import torch
    from transformers.utils import logging as transformers_logging

    from learner import loop
    from learner.metrics import Metrics
    from weight_sync.publisher import Publisher

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    endpoint = weight_sync_endpoint(config)
    with (
        Publisher(config.weight_sync, config.actors.count, INCARNATION, endpoint) as publisher,
        _reader(config) as reader,
        Metrics(config.run_dir) as metrics,
    ):
        run = _load(config, reader, publisher, metrics, stop)
        try:
            with stop.interruptible():
                publisher.wait_for_actors(config.weight_sync.join_deadline_s)
            run.publish()
            run.wait_applied()
            reader.resume(run.step)
            cause = loop.train(run)
        except StopRequested as request:
            cause = str(request)
            log.info("stopping: %s", cause)
        run.save()
        _finish(config, run.step, cause)
        run.engine.close()


def _load(
    config: Config,
    reader: BatchReader,
    publisher: "Publisher",
    metrics: "Metrics",
    stop: StopSwitch,
) -> "Run":
    """The model, its optimiser, tokenizer, EMA and probe, with the collaborators they work with."""
    from transformers import AutoTokenizer

    from learner.ema import Ema
    from learner.engine import Engine
    from learner.probe import draw_probe
    from learner.run import Run

    with phase("loading the model", config.learner.step_deadline_s):
        engine = Engine(config)
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path,
            local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )
    probe = draw_probe(tokenizer, config.seed, config.weight_sync.probe_tokens)
    ema = Ema(engine, config.learner.proximal_decay)
    return Run(config, engine, ema, tokenizer, probe, reader, publisher, metrics, stop)


def _finish(config: Config, step: int, cause: str) -> None:
    # A connection of its own: on the other an interrupted wait may still have an answer coming.
    with _reader(config) as reader:
        try:
            if step:
                reader.committed(step)
            reader.finish(cause)
        except ReplayError as error:
            if cause == "completed":
                raise
            log.warning("replay did not take the end of the run: %s", error)
    log.info("ended after step %d: %s", step, cause)


def _reader(config: Config) -> BatchReader:
    return BatchReader(replay_endpoint(config), INCARNATION, config.learner.batch_deadline_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
