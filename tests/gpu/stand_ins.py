"""Stand-ins for msgspec and blake3, for a machine with torch alone: what weight sync's transports
and buckets use of them, by the standard library. Messages are Python's literals.
"""

import ast
import dataclasses
import hashlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = ("msgspec", "blake3")


def stand_in() -> list[str]:
    """Put stand-ins in the place of those that are missing; return their names."""
    missing = [name for name in OURS if importlib.util.find_spec(name) is None]
    for name in missing:
        module = ModuleType(name)
        vars(module).update(_MADE[name])
        sys.modules[name] = module
    return missing


class Struct:
    """A frozen dataclass; every other option is without meaning here."""

    def __init_subclass__(cls, *, frozen: bool = False, **_: Any) -> None:
        dataclasses.dataclass(frozen=frozen)(cls)


def encode(value: Any) -> bytes:
    """Plain values as their literals."""
    return repr(value).encode()


class Codec:
    """Encoder and Decoder; a type that is given is not checked."""

    def __init__(self, _type: Any = None) -> None:
        self.encode = encode

    def decode(self, data: bytes) -> Any:
        """What was encoded."""
        return ast.literal_eval(data.decode())


class Digest:
    """As blake3 is called, by blake2b; threads are without meaning."""

    def __init__(self, max_threads: int = 1) -> None:
        self._blake2b = hashlib.blake2b()

    def update(self, data: Any) -> None:
        """Take in bytes."""
        self._blake2b.update(data)

    def hexdigest(self, length: int) -> str:
        """The first `length` bytes, hexadecimal."""
        return self._blake2b.hexdigest()[: 2 * length]


_MADE: dict[str, dict[str, Any]] = {
    "msgspec": {
        "Struct": Struct,
        "msgpack": SimpleNamespace(Encoder=Codec, Decoder=Codec, encode=encode),
        "structs": SimpleNamespace(replace=dataclasses.replace),
    },
    "blake3": {"blake3": Digest},
}
