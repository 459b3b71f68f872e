"""The base of every message that crosses replay's socket."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """A tagged message."""
