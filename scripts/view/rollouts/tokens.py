"""The learner's values of a rollout's tokens, out of the file of the step that trained it.

Such a file may be a stranger's, torn, or replaced while it is read: of it are read a header, a
table of sequences, both bounded, and the values of this rollout alone.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.health.tokens import FATES, FORMAT, VALUES, file_of

MOST_HEADER = 1 << 16  # bytes
MOST_SEQUENCES = 1 << 18  # of a step
_KINDS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "U8": np.dtype("u1"),
    "I64": np.dtype("<i8"),
}

Values = dict[str, NDArray[Any]]  # of a sequence's tokens, by name


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _File:
    content: BinaryIO
    tensors: dict[str, _Tensor]
    begin: int  # of the tensors
    size: int

    @classmethod
    def read(cls, content: BinaryIO) -> "_File":
        """Read the header. Raises ValueError."""
        status = os.fstat(content.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no file")
        length = int.from_bytes(content.read(8), "little")
        if length > MOST_HEADER:
            raise ValueError(f"its header has {length} bytes, more than {MOST_HEADER}")
        try:
            told = msgspec.json.decode(content.read(length), type=dict[str, msgspec.Raw])
            metadata = told.pop("__metadata__", msgspec.Raw(b"{}"))
            found = msgspec.json.decode(metadata, type=dict[str, str]).get("format", "none")
            tensors = {n: msgspec.json.decode(each, type=_Tensor) for n, each in told.items()}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"its header is none: {error}") from error
        if found != FORMAT:
            raise ValueError(f"its format is {found}, which is not {FORMAT}")
        return cls(content, tensors, 8 + length, status.st_size)

    def shape(self, name: str, kind: str, ndim: int) -> tuple[int, ...]:
        """The shape of a tensor, which is in the file. Raises ValueError."""
        if name not in self.tensors:
            raise ValueError(f"it has no {name!r}")
        given = self.tensors[name]
        first, last = given.data_offsets
        size = prod(given.shape) * _KINDS[kind].itemsize
        if given.dtype != kind or len(given.shape) != ndim or min(given.shape) < 0:
            raise ValueError(f"{name!r} is {given.dtype} {list(given.shape)}")
        if first < 0 or last - first != size or self.begin + last > self.size:
            raise ValueError(f"{name!r} is not whole")
        return given.shape

    def rows(self, name: str, first: int, count: int) -> NDArray[Any]:
        """Some rows of a tensor whose shape was asked for. Raises ValueError."""
        given = self.tensors[name]
        kind, width = _KINDS[given.dtype], prod(given.shape[1:])
        self.content.seek(self.begin + given.data_offsets[0] + first * width * kind.itemsize)
        found = self.content.read(count * width * kind.itemsize)
        return np.frombuffer(found, kind).reshape(count, *given.shape[1:])


def values_of(
    run: Path, step: int, rollout: tuple[int, int], counts: Sequence[int]
) -> list[Values] | None:
    """The values of each sequence of a rollout (group and sibling) whose sequences have so many
    sampled tokens; None where the step has no file. Raises ValueError for a file that is not as
    the learner writes it, and OSError.
    """
    try:
        with open(file_of(run, step), "rb", opener=_at_once) as content:
            return _values(_File.read(content), rollout, counts)
    except FileNotFoundError:
        return None


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to


def _values(file: _File, rollout: tuple[int, int], counts: Sequence[int]) -> list[Values]:
    sequences, columns = file.shape("sequences", "I64", 2)
    if sequences > MOST_SEQUENCES or columns != 4:
        raise ValueError(f"its table of sequences is {sequences} x {columns}")
    kinds = {name: "F16" for name in VALUES if name in file.tensors or name != "proximal"}
    kinds["fate"] = "U8"
    lengths = {file.shape(name, kind, 1)[0] for name, kind in kinds.items()}
    table = file.rows("sequences", 0, sequences)
    sizes = table[:, 3].tolist()
    if lengths != {sum(sizes)} or min(sizes, default=0) < 0:
        raise ValueError(f"its sequences have {sum(sizes)} tokens, its values {sorted(lengths)}")
    own = np.flatnonzero((table[:, :2] == rollout).all(1)).tolist()
    known = [table[row, 2:].tolist() for row in own]
    if not own:
        raise ValueError("it lacks this rollout")
    if known != [list(each) for each in enumerate(counts)]:
        raise ValueError("it has other tokens than this rollout")
    found = []
    for row in own:
        first, count = sum(sizes[:row]), sizes[row]
        found.append({name: file.rows(name, first, count) for name in kinds})
        if count and found[-1]["fate"].max() >= len(FATES):
            raise ValueError("the fate of a token is none")
    return found
