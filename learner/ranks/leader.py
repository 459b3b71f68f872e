"""Several ranks of one learner: rank 0 leads, the others make its trainer's calls with it.

A follower waits for its next call for as long as rank 0 lives (batches and evaluations have their
own deadlines there); joining, a call, and every collective in it have `learner.step_deadline_s`,
and for a checkpoint the time of its bytes. A lost rank is named.
"""

import contextlib
import functools
import inspect
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import Store

from configs.runtime.files import weights_bytes
from configs.runtime.process import announce_ready
from configs.runtime.watchdog import die, phase
from configs.schema import Config
from learner.errors import BadBatch, BadModel, RankLost
from learner.model.engine import join_process_group
from learner.model.placement import Placement
from learner.ranks.link import CLOSE
from learner.ranks.rendezvous import Rendezvous, admit_ranks, join_leader
from learner.ranks.shares import decode_share, encode_share
from learner.trainer import COLLECTIVES, Argument, Trainer


class Leader(Trainer):
    """Rank 0 of several: the other ranks make its collective calls too (assigned below)."""

    def __init__(
        self,
        config: Config,
        model_path: str | None,
        rendezvous: Rendezvous,
        placement: Placement,
    ) -> None:
        """All ranks have joined; `close` dismisses them."""
        self._rendezvous = rendezvous
        super().__init__(config, model_path, placement)

    def close(self) -> None:
        """Dismiss the other ranks and release the engine."""
        self._rendezvous.dismiss()
        with contextlib.suppress(RankLost):
            self._rendezvous.send_all(CLOSE)
        super().close()
        self._rendezvous.close()


def _announced(name: str) -> Callable[..., Any]:
    """The collective method as rank 0 calls it: announced to the other ranks first."""
    method = getattr(Trainer, name)

    def call(self: Leader, *given: Any) -> Any:
        with self._rendezvous.naming_lost_rank():
            return method(self, *announce(self._rendezvous, name, given))

    def generate(self: Leader, *given: Any) -> Iterator[Any]:
        with self._rendezvous.naming_lost_rank():
            items = method(self, *announce(self._rendezvous, name, given))
            try:
                for item in items:  # noqa: UP028 (must outlive this generator)
                    yield item
            finally:  # the others gather along, so what the caller leaves over is gathered too
                for _ in items:
                    pass

    return functools.wraps(method)(generate if inspect.isgeneratorfunction(method) else call)


for _name in COLLECTIVES:
    setattr(Leader, _name, _announced(_name))


def announce(rendezvous: Rendezvous, name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have the other ranks make this call; return rank 0's own arguments."""
    argument = COLLECTIVES[name]
    ranks = len(rendezvous.links) + 1
    if argument == "shares" and len(given[0]) != ranks:
        raise BadBatch(f"{len(given[0])} shares for learner.ranks = {ranks}: build as many")
    for rank, link in rendezvous.links.items():
        link.send(name, _encode(argument, given, rank))
    return (given[0][:1],) if argument == "shares" else given


def make_call(trainer: Trainer, name: str, value: Any) -> None:
    """Make the call that rank 0 announced."""
    if name not in COLLECTIVES:
        raise RankLost(f"rank 0 of the learner called {name!r}, which no rank can do")
    made = getattr(trainer, name)(*_decode(COLLECTIVES[name], value))
    if isinstance(made, Iterator):
        for _ in made:
            pass


def _encode(argument: Argument, given: tuple[Any, ...], rank: int) -> Any:
    match argument:
        case "shares":
            return encode_share(given[0][rank])
        case "tokens":
            return list(given[0])
        case "folder":
            return str(given[0])
        case "number":
            return float(given[0])
        case "none":
            return None


def _decode(argument: Argument, value: Any) -> tuple[Any, ...]:
    match argument:
        case "shares":
            return ([decode_share(value)],)
        case "tokens":
            return (value,)
        case "folder":
            return (Path(value),)
        case "number":
            return (value,)
        case "none":
            return ()


def _longest_s(config: Config) -> float:
    """Seconds of the longest call: ranks wait for each other's part of a checkpoint."""
    return config.learner.saving_s(weights_bytes(config.model.path))


def _form_group(config: Config, rendezvous: Rendezvous, store: Store, placement: Placement) -> None:
    """Connect this rank to every other one. Raises RankLost, and tells the other side, where it
    does not reach them.
    """
    try:
        with rendezvous.naming_lost_rank():
            join_process_group(store, placement, config.learner, _longest_s(config))
    except RuntimeError as error:  # and nobody is lost
        by = f" by its interface {placement.interface!r}" if placement.interface else ""
        why = (
            f"rank {placement.rank} of the learner, on {socket.gethostname()}, does not reach "
            f"every other rank{by} ({error}): the machines of ranks must reach each other at any "
            "TCP port"
        )
        rendezvous.send_all("failed", why)
        raise RankLost(why) from error


def lead(
    config: Config, model_path: str | None = None, on_stall: Callable[[str], None] = die
) -> Trainer:
    """The trainer of rank 0, once every other rank has joined. Raises BadModel, ConfigError and
    RankLost.

    `on_stall(message)` must end the process: it is called where a rank is lost and nothing else
    here would notice.
    """
    learner = config.learner
    if learner.ranks == 1:
        with phase("loading the model", learner.step_deadline_s, on_stall):
            return Trainer(config, model_path)
    rendezvous = Rendezvous(on_stall)
    try:
        with rendezvous.naming_lost_rank():
            store, placement = admit_ranks(config, rendezvous)
            _form_group(config, rendezvous, store, placement)
            with phase("loading the model", learner.step_deadline_s, on_stall):
                return Leader(config, model_path, rendezvous, placement)
    except BaseException:
        rendezvous.close()
        raise


def follow(
    config: Config, rank: int, model_path: str | None = None, on_stall: Callable[[str], None] = die
) -> None:
    """Join as rank `rank` > 0, and make rank 0's calls until it closes.

    Raises BadModel, ConfigError and RankLost; `on_stall` as in `lead`.
    """
    learner = config.learner
    if not 0 < rank < learner.ranks:
        raise BadModel(
            f"rank {rank!r}: learner.ranks = {learner.ranks!r} allows 1 to {learner.ranks - 1}"
        )
    rendezvous = Rendezvous(on_stall)
    try:
        with rendezvous.naming_lost_rank():
            link, store, placement = join_leader(config, rank, rendezvous)
            _form_group(config, rendezvous, store, placement)
            with phase(f"loading the model on rank {rank}", learner.step_deadline_s, on_stall):
                trainer = Trainer(config, model_path, placement)
            announce_ready()
            while (call := link.receive())[0] != CLOSE:
                name = f"{call[0]} on rank {rank}"
                saves = COLLECTIVES.get(call[0]) == "folder"
                limit_s = _longest_s(config) if saves else learner.step_deadline_s
                with phase(name, limit_s, on_stall):
                    make_call(trainer, *call)
            rendezvous.dismiss()
            trainer.close()
    except RankLost:
        raise
    except Exception as error:
        with contextlib.suppress(RankLost):
            rendezvous.send_all("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        rendezvous.close()
