"""The learner's process: `python -m learner.worker CONFIG [--resume] [--rank R] [a.b=c …]`.

Consumes batches from replay and the actors' reports of applied weights; produces policy versions,
checkpoints and TensorBoard numbers. Waits, each with a deadline, for actors to join and to verify
weights, then for batches and evaluations; unblocked by them, by Stop, or by SIGTERM/SIGINT, after
which it saves, commits and leaves; after MAKE_WAY it saves and leaves, and the run is not over.
With `--resume` it goes on from the run's newest checkpoint. A rank above 0 only computes: it
follows rank 0.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.keys import Address, Addresses
from configs.load import ConfigError, load
from configs.runtime.files import vocabulary_of
from configs.runtime.process import Exit, announce_ready, begin, leave, make_socket_dir
from configs.runtime.signals import MAKE_WAY, StopRequested, StopSwitch, on_stop
from configs.schema import Config
from learner import checkpoint
from learner.checkpoint import next_incarnation
from learner.errors import BadBatch, BadCheckpoint, BadModel, LearnerError, RankLost
from learner.health.tokens import TokenFiles
from learner.metrics.applications import Applications
from replay.clients.learner import BatchReader
from replay.protocol import ReplayError, ReplayTimeout
from weight_sync.protocol import (
    EngineDiffers,
    PeerFailed,
    SyncTimeout,
    TransportFailed,
    WeightSyncError,
)

if TYPE_CHECKING:  # heavy imports wait until the number of threads is set
    from transformers import PreTrainedTokenizerBase

    from learner.run import Run
    from learner.trainer import Trainer
    from weight_sync.publisher import Publisher

log = logging.getLogger(__name__)
FAULTS_OF_OTHERS = (RankLost, ReplayTimeout, PeerFailed, TransportFailed, SyncTimeout)


def main(arguments: Sequence[str]) -> int:
    """Run the learner to its end; return its `Exit`."""
    parser = argparse.ArgumentParser(prog="python -m learner.worker")
    parser.add_argument("config")
    parser.add_argument("--resume", action="store_true", help="from the run's newest checkpoint")
    parser.add_argument("--rank", type=int, default=0, help="of learner.ranks (default 0)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.config, given.overrides)
        _check(config, given.rank)
        name = f"learner-{given.rank}" if given.rank else "learner"
        begin(name, threads=config.learner.threads)
        make_socket_dir(config.run_dir)
        if given.rank:
            on_stop(lambda cause: log.info("%s: rank 0 says when to leave", cause))
            follow(config, given.rank)
        else:
            stop = StopSwitch()
            on_stop(stop, MAKE_WAY)
            return work(config, stop, given.resume)
    except (ConfigError, BadCheckpoint, BadModel) as error:
        print(f"learner: {error}", file=sys.stderr)
        return Exit.BAD_INPUT
    except (BadBatch, EngineDiffers) as error:  # replay serves the same batch again
        print(f"learner: {error}", file=sys.stderr)
        return Exit.FINAL
    except (LearnerError, ReplayError, WeightSyncError) as error:
        print(f"learner: {type(error).__name__}: {error}", file=sys.stderr)
        return Exit.CONSEQUENCE if isinstance(error, FAULTS_OF_OTHERS) else Exit.FAILED
    return Exit.DONE


def _check(config: Config, rank: int) -> None:
    if not config.run_dir:
        raise ConfigError("run_dir = '': name the run's directory, for example run_dir=runs/try")
    if not 0 <= rank < config.learner.ranks:
        ranks = config.learner.ranks
        raise ConfigError(f"--rank {rank}: learner.ranks = {ranks!r}; give 0 to {ranks - 1}")


def follow(config: Config, rank: int) -> None:
    """Compute along with rank 0 until it leaves."""
    _prepare_torch(config)
    from learner.ranks import leader

    leader.follow(config, rank)


def work(config: Config, stop: StopSwitch, resume: bool) -> Exit:
    """Build the collaborators, train, and end the run in order, or leave it to another learner."""
    found = _checkpoint(config) if resume else None
    known, step = (found.manifest.incarnation, found.manifest.step) if found else (0, 0)
    rollbacks = found.manifest.rollbacks if found else ()
    incarnation = next_incarnation(config.run_dir, known)
    _prepare_torch(config)
    from learner.evaluations import Evaluations
    from learner.health.sentinels import Sentinels
    from learner.metrics.metrics import Metrics
    from learner.run import Run, draw_probe

    addresses = Addresses.of(config)
    with (
        _publisher(config, incarnation, addresses.weight_sync) as publisher,
        _reader(config, incarnation, addresses.replay) as reader,
        Metrics(config.run_dir, step + 1 if resume else None, config) as metrics,
    ):
        trainer, tokenizer = _load(config, found)
        run = Run(
            config=config,
            trainer=trainer,
            tokenizer=tokenizer,
            probe=draw_probe(tokenizer, config.seed, config.weight_sync.probe_tokens),
            reader=reader,
            publisher=publisher,
            metrics=metrics,
            evaluations=Evaluations(config.run_dir, step if resume else None, config.learner.best),
            sentinels=Sentinels(config, step, rollbacks),
            incarnation=incarnation,
            stop=stop,
            step=step,
            saved=step,
            vocabulary=vocabulary_of(config.model.path),
        )
        cause = _train(run, resume)
        run.save()
        code = _finish(config, incarnation, addresses.replay, run.step, cause)
        trainer.close()
        return code


def _checkpoint(config: Config) -> checkpoint.Checkpoint | None:
    if found := checkpoint.newest(config.run_dir):
        checkpoint.check(found, config)
    return found


def _train(run: "Run", resume: bool) -> str:
    from learner.loop import train

    try:
        if resume:
            run.resume()
        else:
            run.start()
        return train(run)
    except StopRequested as request:
        log.info("stopping: %s", request)
        return str(request)


def _prepare_torch(config: Config) -> None:
    # Heavy imports come after `begin` has set the number of threads.
    import torch

    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)


def _load(
    config: Config, found: checkpoint.Checkpoint | None
) -> tuple["Trainer", "PreTrainedTokenizerBase"]:
    """The trainer of all ranks, restored where there is a checkpoint, and the tokenizer."""
    from transformers import AutoTokenizer

    from learner.ranks.leader import lead

    # It has phases of its own: ranks that do not join are named, not taken for a stall here.
    trainer = lead(config)
    with checkpoint.saving(config, "restoring the checkpoint"):
        if found:
            take_up(found, trainer)
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path,
            local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )
    if keep := config.view.keep_steps:
        averages = config.learner.centre == "ema"
        trainer.note = TokenFiles(config.run_dir, keep, averages=averages).write
    announce_ready()
    return trainer, tokenizer


def take_up(found: checkpoint.Checkpoint, trainer: "Trainer") -> None:
    """Have the trainer go on from a checkpoint, at the rates of after its last rollback."""
    trainer.restore(found.folder)
    for made in found.manifest.rollbacks[-1:]:
        trainer.scale_rates(made.scale)


def _finish(config: Config, incarnation: int, replay: Address, step: int, cause: str) -> Exit:
    """End the run, or leave it to another learner."""
    if cause == MAKE_WAY.name:
        log.info("made way after step %d", step)
        return Exit.MADE_WAY
    # A connection of its own: on the other an interrupted wait may still have an answer coming.
    with _reader(config, incarnation, replay) as reader:
        try:
            if step:
                reader.committed(step)
            reader.finish(cause)
        except ReplayError as error:
            if cause == "completed":
                raise
            log.warning("replay did not take the end of the run: %s", error)
    log.info("ended after step %d: %s", step, cause)
    return Exit.DONE


def _publisher(config: Config, incarnation: int, address: Address) -> "Publisher":
    from weight_sync.adapter import adapter_of
    from weight_sync.publisher import Publisher

    return Publisher(
        config.weight_sync,
        config.actors.count,
        incarnation,
        address.endpoint,
        address.keys,
        config.engine_dtype,
        config.run_dir,
        adapter_of(config),
        Applications(config.run_dir).note,
    )


def _reader(config: Config, incarnation: int, replay: Address) -> BatchReader:
    return BatchReader(
        replay.endpoint,
        incarnation,
        config.learner.batch_deadline_s,
        keys=replay.keys,
        restart_deadline_s=config.replay.restart_deadline_s,
    )


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
