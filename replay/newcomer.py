"""What a process asks replay that knows nothing of the run yet but where replay listens.

Consumes the reply to Describe; waits for it, with a deadline. Asked again and again: replay may be
busy, or not have been started yet.
"""

from configs.keys import Keys
from replay.caller import Caller
from replay.run_protocol import Describe, Described

ASK_AGAIN_S = 2.0


class Newcomer(Caller):
    """The connection of somebody who is not part of the run; blocking."""

    def __init__(self, endpoint: str, keys: Keys | None, deadline_s: float) -> None:
        """Raises ConfigError when the keys cannot be read."""
        if keys is not None:
            keys.check()
        super().__init__(endpoint, min(ASK_AGAIN_S, deadline_s), keys, deadline_s)

    def configuration(self) -> str:
        """The run's resolved configuration, as YAML. Raises ReplayTimeout once replay has been
        silent for `deadline_s`, RefusedByReplay when it does not know the question.
        """
        reply = self._call(Describe(), Described, "the run's configuration")
        assert isinstance(reply, Described)
        return reply.config
