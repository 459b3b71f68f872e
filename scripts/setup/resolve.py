"""A configuration with nothing left open: run directory, retrieval port, paths, sizes."""

import difflib
import itertools
import random
import socket
import time
from pathlib import Path

import msgspec

from configs.load import ConfigError, marked
from configs.retrieval import RetrievalConfig
from configs.schema import Config
from configs.section import INPUT_PATH
from scripts.setup.fit import fitted
from scripts.setup.hub import with_hub_paths
from scripts.setup.overrides import get_field, with_field

PORTS = range(20_000, 32_000)  # below those of Linux's outgoing connections
_CONFIG = "config.yaml"
_RECORDS = (_CONFIG, "events.log")


def resolve(config: Config, name: str) -> Config:
    """The configuration with nothing left open; a run without a directory is named after `name`.
    What depends on the nodes of a cluster is found there (scripts/fleet).
    """
    run_dir = config.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = with_absolute_paths(with_hub_paths(config))
    config = msgspec.structs.replace(config, run_dir=str(Path(run_dir).expanduser().resolve()))
    if config.cluster.address:
        return config
    config = fitted(config)
    return msgspec.structs.replace(config, retrieval=with_port(config.retrieval))


def run_directory(path: Path) -> Path:
    """`path`, a run's directory. Raises ConfigError for any other."""
    if not path.is_dir():
        folders = (path.parent, path.parent / "runs")
        there = {each.name: each for of in folders for each in of.glob("*") if is_run(each)}
        meant = difflib.get_close_matches(path.name, there, n=1)
        near = f"did you mean {there[meant[0]]}?" if meant else "name a run's directory"
        wrong = "it is a file" if path.is_file() else "there is no such directory"
        raise ConfigError(f"RUN = {str(path)!r}: {wrong}: {near}")
    if not is_run(path):
        if around := next(filter(is_run, path.parents), None):
            raise ConfigError(f"RUN = {str(path)!r}: a folder of a run: did you mean {around}?")
        one = next(filter(is_run, sorted(path.glob("*"))), "runs/latest")
        raise ConfigError(
            f"RUN = {str(path)!r}: no {' or '.join(_RECORDS)} there: name a run's directory, for "
            f"example {one}"
        )
    return path


def run_config(run: Path) -> Path:
    """The configuration in a run's directory. Raises ConfigError where there is none."""
    path = run_directory(run) / _CONFIG
    if not path.is_file():
        raise ConfigError(
            f"RUN = {str(run)!r}: no {_CONFIG} there, but an event log: put the run's own back"
        )
    return path


def is_run(path: Path) -> bool:
    """True for a directory that holds a run's records."""
    return any((path / name).is_file() for name in _RECORDS)


def with_absolute_paths(config: Config) -> Config:
    """The configuration with every input path absolute; `~` is the user's home."""
    for field in marked(INPUT_PATH):
        if path := get_field(config, field):
            config = with_field(config, field, str(_absolute(Path(path).expanduser())))
    file, _, name = config.environment.program.entry_point.rpartition(":")
    if file.endswith(".py"):
        there = _absolute(Path(file).expanduser())
        config = with_field(config, "environment.program.entry_point", f"{there}:{name}")
    return config


def _absolute(path: Path) -> Path:
    """Its target; a link itself where it has another suffix, which says what the file is."""
    target = path.resolve()
    return target if target.suffix == path.suffix else path.parent.resolve() / path.name


def with_port(retrieval: RetrievalConfig) -> RetrievalConfig:
    """The section with a free port where none is chosen and a server of ours is started.
    Raises ConfigError for a host that is not here.
    """
    if retrieval.port or not retrieval.has_own_server:
        return retrieval
    with socket.socket() as probe:
        try:
            probe.bind((retrieval.host, 0))
        except OSError as error:
            raise ConfigError(
                f"retrieval.host = {retrieval.host!r}: no address of this machine "
                f"({error.strerror}): name one, 127.0.0.1 for this machine alone; a server that "
                "runs elsewhere is retrieval.url"
            ) from error
        chosen = msgspec.structs.replace(retrieval, port=probe.getsockname()[1])
    found = free_ports(retrieval.host, 1)
    return msgspec.structs.replace(retrieval, port=found[0]) if found else chosen


def free_ports(host: str, count: int) -> list[int]:
    """So many free ports of this host, or fewer. None that the system gives away: a run takes its
    port seconds later, and Ray, which starts meanwhile, opens many connections.
    """
    ports = random.SystemRandom().sample(PORTS, 100 + count)
    return list(itertools.islice((port for port in ports if not can_listen(host, port)), count))


def can_listen(host: str, port: int) -> str:
    """Return why nothing can listen at this port; empty when it is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
