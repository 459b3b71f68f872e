"""Connections to replay that train nothing: the launcher's, and that of an actor about to join.

Every wait has a name and ends with ReplayTimeout when replay is silent for `restart_deadline_s`.
"""

import math
import time
from collections.abc import Callable

from configs.keys import ACTOR, Keys
from replay.clients.base import Caller
from replay.protocol import Describe, Described, Done, Observe, Reply, Shutdown, Status

ASK_AGAIN_S = 2.0
LOOK_S = 0.1


class Observer(Caller):
    """The launcher's connection; blocking.

    `gone()` returns True when replay's process has ended: no answer is waited for then.
    """

    gone: Callable[[], bool] = staticmethod(bool)  # nobody has said so

    def status(self, after_step: int = 0, after_evaluation: int = 0) -> Status:
        """Ask how the run stands, for steps and evaluations beyond the first so many."""
        reply = self._call(Observe(after_step, after_evaluation), Status, "status")
        assert isinstance(reply, Status)
        return reply

    def shutdown(self, cause: str) -> None:
        """Stop the run: no more leases, no more batches."""
        self._call(Shutdown(cause), Done, "shutdown")

    def _receive(self, limit_s: float) -> Reply | None:
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0.0:
            if self._socket.poll(math.ceil(min(left_s, LOOK_S) * 1000)):
                break
            if self.gone():
                raise self._timeout("an answer", 0.0, "its process has ended")
        return super()._receive(0.0)


class ConfigReader(Caller):
    """The connection of a process that knows only where replay listens; blocking.

    It asks again and again: replay may be busy, or not have been started yet.
    """

    role = ACTOR

    def __init__(self, endpoint: str, keys: Keys | None, deadline_s: float) -> None:
        """Raises ConfigError when the keys cannot be read."""
        if keys is not None:
            keys.check(self.role)
        super().__init__(endpoint, min(ASK_AGAIN_S, deadline_s), keys, deadline_s)

    def configuration(self) -> str:
        """Ask for the run's resolved configuration, as YAML.

        Raises ReplayTimeout once replay has been silent for `deadline_s`, RefusedByReplay when it
        does not know the question.
        """
        reply = self._call(Describe(), Described, "the run's configuration")
        assert isinstance(reply, Described)
        return reply.config
