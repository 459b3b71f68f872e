"""The learner's side of weight sync: versions in, verified actors out.

Consumes named tensors with a probe (`publish`, on the learner's thread) and the actors' messages (a
ROUTER); produces manifests and broadcast bytes, from one side thread. Nothing is sent before as
many actors as there are at the start have joined; from then on actors come and go, and whoever
joins gets the newest version. The side thread waits as `broadcast` says, and between versions for a
message, a new version or `close`. The learner's thread waits only in `wait_for_actors` and
`wait_applied`, and meets what ended the side thread there, in `publish` or in `check`.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from configs.keys import Keys
from configs.runtime.node import own_node
from configs.schema import WeightSyncConfig
from weight_sync.broadcast import Broadcast
from weight_sync.control import Closing, LearnerHost, RouterChannel
from weight_sync.protocol import Adapter, Applied, SyncTimeout, WeightSyncError
from weight_sync.staging import Staging
from weight_sync.transports.base import device_name

log = logging.getLogger(__name__)


class Publisher:
    """Publishes policy versions to `actors` or more actors; a context manager, or call `close`.

    Binds `endpoint` at once; raises WeightSyncError when it cannot.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        actors: int,
        incarnation: int,
        endpoint: str,
        keys: Keys | None = None,
        dtype: str = "",
        run_dir: str = "",
        adapter: Adapter | None = None,
        noted: Callable[[Applied], None] | None = None,
    ) -> None:
        """`dtype`: the actors', as torch names it; empty: the weights' own. `run_dir`: a folder of
        this host where downloads of late actors may lie; empty: that of temporary files. `adapter`:
        what is published is its tensors, named as PEFT does; None: the whole model's.
        `noted` is told, on the side thread, of each version that an actor has taken up.
        """
        self._deadline_s, self._endpoint = config.publish_deadline_s, endpoint
        self._staging = Staging(config.bucket_bytes, getattr(torch, dtype) if dtype else None)
        self._changed = threading.Condition()
        self._waiting_for = ""
        self._joined = 0
        self._published = self._applied = -1
        self._error: BaseException | None = None
        self._gauges: dict[str, float] = {"sync/updates": 0.0}
        self._channel = RouterChannel(endpoint, keys, incarnation)
        learner_host = _learner_host(endpoint, config.snapshot_dir, run_dir)
        broadcast = Broadcast(
            config, incarnation, learner_host, self._channel, self._say, adapter, noted
        )
        self._actors = actors
        self._thread = threading.Thread(
            target=self._main, args=(broadcast,), name="weight-publisher", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_actors(self, deadline_s: float) -> None:
        """Wait until `actors` actors have joined. Raises SyncTimeout, naming the missing."""
        self._wait(lambda: self._joined >= self._actors, deadline_s, "all actors to join")

    def calibrate(self, start_logprobs: Sequence[float]) -> None:
        """Have engines that still hold `model.path`'s weights measure how far they compute from the
        learner: its log-probs of the probe under those weights. Before the first `publish`.
        """
        self._staging.start_logprobs = tuple(map(float, start_logprobs))

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        probe_tokens: Sequence[int],
        probe_logprobs: Sequence[float],
    ) -> None:
        """Copy the weights into staging and return; the side thread sends them when it is free.

        A version that is still waiting there is replaced. `probe_logprobs[i]` is of `probe_tokens[i
        + 1]`. Raises what ended the side thread, and ValueError on a version that does not go
        forwards.
        """
        self.check()
        if version <= self._published:
            raise ValueError(f"version {version!r} after {self._published!r}: versions go forwards")
        if len(probe_logprobs) != len(probe_tokens) - 1:
            raise ValueError(
                f"{len(probe_tokens)} probe tokens need {len(probe_tokens) - 1} log-probs, "
                f"got {len(probe_logprobs)!r}"
            )
        begun = time.perf_counter()
        self._staging.put(version, named_tensors, probe_tokens, probe_logprobs)
        self._published = version
        seconds = time.perf_counter() - begun
        self._gauges |= {"sync/published": float(version), "sync/publish_s": seconds}
        self._channel.ring()

    def wait_applied(self, version: int, deadline_s: float) -> None:
        """Wait until every actor that has not left serves `version` or a newer one, verified, but
        for those that come late from other nodes while others serve it.

        Raises VerificationFailed, ManifestMismatch, TransportFailed or SyncTimeout, naming the
        actor.
        """
        self._wait(lambda: self._applied >= version, deadline_s, f"version {version} to be applied")

    def check(self) -> None:
        """Raise what ended the side thread, if anything did."""
        if self._error is not None:
            raise self._error

    def gauges(self) -> dict[str, float]:
        """Numbers of the last completed sync; of the slowest actor where they differ."""
        return {**self._gauges, "sync/overtaken": float(self._staging.overtaken)}

    def close(self) -> None:
        """Stop the side thread and leave, after the collective under way if there is one."""
        self._channel.closing = True
        self._channel.ring()
        self._thread.join(self._deadline_s + 1.0)
        if not self._thread.is_alive():
            self._channel.close()
            scheme, _, path = self._endpoint.partition("://")
            if scheme == "ipc":  # ZeroMQ leaves it
                Path(path).unlink(missing_ok=True)

    def _wait(self, reached: Callable[[], bool], deadline_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or reached(), deadline_s)
            self.check()
            if not reached():
                raise SyncTimeout(
                    f"the learner waited {deadline_s:g} s for {what}: still waiting for "
                    f"{self._waiting_for}"
                )

    def _say(self, what: str) -> None:
        self._waiting_for = what

    def _main(self, broadcast: Broadcast) -> None:
        """The side thread."""
        try:
            while self._joined < self._actors:
                self._say(f"actors to join: {_missing(self._channel.joined, self._actors)}")
                broadcast.hear(None)
                self._set(joined=len(self._channel.joined))
            while True:
                self._serve(broadcast)
        except Closing:
            log.debug("the publisher's thread ends")
        except WeightSyncError as error:
            log.error("weight sync ended: %s", error)
            self._set(error=error)
        except BaseException as error:
            self._set(error=error)
            raise
        finally:
            broadcast.close()
            broadcast.downloads.close()

    def _serve(self, broadcast: Broadcast) -> None:
        """Bring the newest version to whoever lacks it, or wait until somebody may."""
        parcel = self._staging.newest()
        if parcel is None:
            self._await_news(broadcast)
            return
        lacking = broadcast.lacking(parcel.version)
        if lacking.together:
            gauges = broadcast.deliver(parcel)
            if gauges is not None and parcel.version > self._applied:
                gauges["sync/updates"] = self._gauges["sync/updates"] + 1.0
                self._gauges.update(gauges)
        elif parcel.version > self._applied and broadcast.serves(parcel.version):
            self._set(applied=parcel.version)
        elif lacking.late:
            broadcast.download(parcel, lacking.late)
        else:
            self._await_news(broadcast)
        broadcast.downloads.look(parcel.version)
        self._gauges.update(broadcast.downloads.gauges())

    def _await_news(self, broadcast: Broadcast) -> None:
        alone = "" if self._channel.joined else ", or an actor to join: none is left"
        self._say(f"a version to be published{alone}")
        broadcast.hear(broadcast.downloads.next_look())

    def _set(self, **changes: object) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, f"_{name}", value)
            self._changed.notify_all()


def _learner_host(endpoint: str, folder: str, run_dir: str) -> LearnerHost:
    """The loopback and the socket's folder serve where all actors are on this machine."""
    scheme, _, path = endpoint.partition("://")
    host = urlsplit(endpoint).hostname if scheme == "tcp" else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own_folder = run_dir or tempfile.gettempdir() if host else str(Path(path).parent)
    return LearnerHost(
        device=device_name(device),
        address=host or "127.0.0.1",
        folder=folder or own_folder,
        node=own_node(),
        serves=host is not None,
    )


def _missing(joined: Sequence[str], actors: int) -> str:
    """The actors that have not joined, by the names the launcher gives."""
    absent = [name for i in range(actors) if (name := f"actor-{i}") not in joined]
    return f"{', '.join(absent[: actors - len(joined)])} ({len(joined)} of {actors} joined)"
