"""Checks of searches of the live web, made before any process of a run starts."""

from collections.abc import Iterator

from configs.load import ConfigError
from configs.schema import Config
from retrieval_server.app.live import opening


def live_problems(config: Config) -> Iterator[str]:
    """Yield why the live web cannot be searched with this configuration."""
    cluster, asked = config.cluster, config.retrieval
    if cluster.address and cluster.retrieval_replicas:
        yield (
            f"cluster.retrieval_replicas = {cluster.retrieval_replicas!r} with retrieval.kind = "
            f"{asked.kind!r}: one server spends the budget: set it to 0, which is one, on the "
            "launcher's node"
        )
    if cluster.address and asked.live.key_variable:
        yield (
            "retrieval.live.key_variable with cluster.address: what a node's processes find in "
            "their environment is Ray's: name a file, retrieval.live.key_file=FILE"
        )
        return
    try:
        opening.check(config)
    except ConfigError as error:
        yield str(error)


def no_purse(config: Config) -> Iterator[str]:
    """Yield that a command whose configuration names no folder cannot count what it spends."""
    try:
        opening.require_folder(config)
    except ConfigError as error:
        yield str(error)
