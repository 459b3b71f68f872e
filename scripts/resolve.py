"""What a configuration leaves open, filled in: run directory, retrieval port, absolute paths.

Consumes a loaded configuration; produces the one that a run records. Waits for nothing.
"""

import socket
import time
from pathlib import Path

import msgspec

from configs.schema import Config, RetrievalConfig


def resolve(config: Config, name: str) -> Config:
    """The configuration with nothing left open; a run without a directory is named after `name`."""
    run_dir = config.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = with_absolute_paths(config)
    return msgspec.structs.replace(
        config, run_dir=str(Path(run_dir).resolve()), retrieval=with_port(config.retrieval)
    )


def with_absolute_paths(config: Config) -> Config:
    """The configuration with every input file named absolutely."""
    questions, retrieval, rewards = config.questions, config.retrieval, config.rewards
    return msgspec.structs.replace(
        config,
        keys=_absolute(config.keys),
        model=msgspec.structs.replace(config.model, path=_absolute(config.model.path)),
        questions=msgspec.structs.replace(
            questions, train=_absolute(questions.train), eval=_absolute(questions.eval)
        ),
        retrieval=msgspec.structs.replace(
            retrieval,
            corpus=_absolute(retrieval.corpus),
            index=_absolute(retrieval.index),
            encoder=_absolute(retrieval.encoder),
            recorded=_absolute(retrieval.recorded),
            token_file=_absolute(retrieval.token_file),
        ),
        rewards=msgspec.structs.replace(
            rewards,
            judge=msgspec.structs.replace(
                rewards.judge, key_file=_absolute(rewards.judge.key_file)
            ),
            similarity=msgspec.structs.replace(
                rewards.similarity, model=_absolute(rewards.similarity.model)
            ),
        ),
    )


def with_port(retrieval: RetrievalConfig) -> RetrievalConfig:
    """The section with a free port where none is chosen and a server of ours is started."""
    if retrieval.port or not retrieval.has_own_server:
        return retrieval
    with socket.socket() as probe:
        probe.bind((retrieval.host, 0))
        return msgspec.structs.replace(retrieval, port=probe.getsockname()[1])


def can_listen(retrieval: RetrievalConfig) -> str:
    """Empty when the section's port is free, else why nothing can listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((retrieval.host, retrieval.port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else path
