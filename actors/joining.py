"""An actor that joins a running run by hand: it fetches the run's configuration from replay and
checks that everything in it can be reached from this machine.

A setting that would keep the actor from working is a ConfigError that names the field, before any
engine starts. Replay and the retrieval server have deadlines.
"""

import asyncio
import ipaddress
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from actors.policies import engine_keys
from actors.retrieval import open_retrieval
from configs import trust
from configs.keys import ACTOR, Addresses, Keys
from configs.load import ConfigError, parse, retrieval_urls
from configs.retrieval import shown_urls
from configs.runtime.hosts import is_own_host
from configs.schema import Config
from replay.clients.launcher import ConfigReader
from replay.protocol import ReplayTimeout
from retrieval_server.protocol import PROBE, RetrievalError, RetrievalRefused

DEADLINE_S = 20.0  # for replay's answer
MAX_IPC_BYTES = 107
_OURS = {"replay.endpoint": "--connect", "keys": "--keys"}


def configuration(
    endpoint: str,
    keys_folder: str,
    overrides: Sequence[str],
    deadline_s: float = DEADLINE_S,
    *,
    trusted: bool = False,
) -> Config:
    """Return the run's configuration with `overrides`, checked from here; what replay tells may
    decide all of it where that is `trusted` (configs/trust.py). Raises ConfigError, ReplayError.

    `keys_folder` is needed for a tcp:// endpoint; '' means the run's own folder otherwise.
    """
    for name, option in _OURS.items():
        if any(each.partition("=")[0].strip() == name for each in overrides):
            raise ConfigError(f"override of {name}: with --connect, {option} says that: drop it")
    keys = _keys(endpoint, keys_folder)
    text = _ask(endpoint, keys, deadline_s)
    source = f"the run at {endpoint}"
    config = parse(text, overrides, f"configuration of {source}")
    own = trust.given(overrides)
    if _is_beside(endpoint, config):
        own.add("weight_sync.endpoint")  # as was said by naming the one of replay
    trust.require(config, source=source, trust=trusted, given=own, of=trust.ACTING)
    config = msgspec.structs.replace(
        config,
        keys=str(Path(keys_folder).resolve()) if keys_folder else config.keys,
        replay=msgspec.structs.replace(config.replay, endpoint=endpoint),
    )
    find = (_model, engine_keys.problems, _weight_sync, _retrieval, _judge)
    if problems := [problem for each in find for problem in each(config)]:
        raise ConfigError("\n".join(problems))
    if config.retrieval.top_k:
        asyncio.run(_search(config))
    return config


def _is_beside(endpoint: str, config: Config) -> bool:
    """True where the learner that is told listens where replay does, or on this machine as well."""
    both = endpoint, config.weight_sync.endpoint
    return urlsplit(both[0]).hostname == urlsplit(both[1]).hostname or all(map(on_this_host, both))


def _keys(endpoint: str, folder: str) -> Keys | None:
    """Return the keys for `endpoint`, which must be one that can be connected to."""
    tcp = re.fullmatch(r"tcp://[^/*:\s]+:\d{1,5}|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}", endpoint)
    if endpoint.startswith("ipc://") and 0 < len(endpoint.encode()) - 6 <= MAX_IPC_BYTES:
        return None
    if not tcp:
        raise ConfigError(
            f"--connect {endpoint!r}: give replay's endpoint, tcp://HOST:PORT or ipc://PATH (the "
            "run's log of replay says where it listens)"
        )
    if not folder:
        raise ConfigError(
            f"--keys is missing: {endpoint} lets in who has the run's keys alone: name a folder "
            "with copies of RUN/keys/server.key and RUN/keys/actor.key_secret"
        )
    try:
        Keys(Path(folder)).check(ACTOR)
    except ConfigError as error:
        raise ConfigError(f"--keys {folder!r}: {error}") from error
    return Keys(Path(folder))


def _ask(endpoint: str, keys: Keys | None, deadline_s: float) -> str:
    try:
        with ConfigReader(endpoint, keys, deadline_s) as replay:
            return replay.configuration()
    except ReplayTimeout as error:
        whose = f", and that --keys {str(keys.folder)!r} is a copy of its keys" if keys else ""
        raise ConfigError(
            f"--connect {endpoint!r}: {error}: see that a run listens there{whose}"
        ) from error


def _model(config: Config) -> Iterator[str]:
    path = config.model.path
    if not Path(path, "config.json").is_file():
        yield (
            f"model.path = {path!r}: no model there on this machine: copy the run's model here and "
            "say where: model.path=FOLDER"
        )


def _weight_sync(config: Config) -> Iterator[str]:
    endpoint = Addresses.of(config).weight_sync.endpoint
    here = on_this_host(config.replay.endpoint)
    path = Path(endpoint.removeprefix("ipc://"))
    if endpoint.startswith("ipc://"):
        reached = here and path.parent.is_dir()
    else:
        reached = here or not _stays_inside(urlsplit(endpoint).hostname or "")
    if not reached:
        yield (
            f"weight_sync.endpoint = {config.weight_sync.endpoint!r}: the learner listens at "
            f"{endpoint}, which this machine cannot reach: start the run with "
            "weight_sync.endpoint=tcp://HOST:PORT, HOST an address that both know"
        )


def _retrieval(config: Config) -> Iterator[str]:
    asked = config.retrieval
    if not asked.top_k or asked.recorded or on_this_host(config.replay.endpoint):
        return
    field, value = ("url", shown_urls(asked.url)) if asked.url else ("host", repr(asked.host))
    for url in retrieval_urls(config):
        if _stays_inside(urlsplit(url).hostname or ""):
            yield (
                f"retrieval.{field} = {value}: the retrieval server at {url} cannot be reached "
                f"from this machine: start the run with retrieval.{field}={field.upper()}, an "
                "address that both know, or say here where one is: retrieval.url=http://HOST:PORT"
            )


def _judge(config: Config) -> Iterator[str]:
    url = config.rewards.judge.url
    inside = bool(url) and _stays_inside(urlsplit(url).hostname or "")
    if inside and not on_this_host(config.replay.endpoint):
        yield (
            f"rewards.judge.url = {url!r}: that judge cannot be reached from this machine: start "
            "the run with an address that both know, or say here where one is: "
            "rewards.judge.url=http://HOST:PORT/v1"
        )


async def _search(config: Config) -> None:
    """Search once: an actor whose searches all fail would only take leases and give them back."""
    if config.retrieval.recorded:
        open_retrieval(config)
        return
    asked, where = config.retrieval, shown_urls(retrieval_urls(config))
    try:
        async with open_retrieval(config) as client:
            await client.retrieve([PROBE], 1)
            found = client.index_version
    except RetrievalRefused as error:
        raise ConfigError(f"a search from this machine was refused: {error}") from error
    except RetrievalError as error:
        raise ConfigError(
            f"retrieval.url = {where}: a search from this machine failed: {error}: say here where "
            "the retrieval server is: retrieval.url=http://HOST:PORT"
        ) from error
    if asked.index_version not in ("", found):
        raise ConfigError(
            f"retrieval.url = {where}: serves index {found!r}, the run searches "
            f"{asked.index_version!r}: name servers of the same index"
        )


def on_this_host(endpoint: str) -> bool:
    """True where an endpoint is on this machine: its loopback and files can be reached."""
    host = urlsplit(endpoint).hostname
    return endpoint.startswith("ipc://") or host is None or is_own_host(host)


def _stays_inside(host: str) -> bool:
    """True for an address that means another machine on every host: loopback, or unspecified."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "*", "localhost")
    return address.is_loopback or address.is_unspecified
