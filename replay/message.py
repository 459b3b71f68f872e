"""The base of every message that crosses replay's socket. A leaf."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """A tagged message."""
