"""The files of a training state, one for each rank that saved it, read as one.

`rank-R.safetensors` holds the elements of each weight that rank R saved, flat, by kind (master,
moment, average), and tensors of the rank's own. Its metadata say which settings it was made with
and where in each weight its elements begin. Together the files hold every element once, whatever
the layout was. A rank reads the elements it needs: no file as a whole, and from the file that most
likely holds them outwards, no more files than do.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.runtime.files import sync
from learner.errors import BadModel
from learner.model.shards import Piece

RANK, RANKS, STARTS = "learner.rank", "learner.ranks", "starts"  # in a file's metadata
MASTER, MOMENT, OWN = "master", "optimiser", "rank"  # kinds, OWN of the rank's own tensors
Runs = Mapping[str, Iterable[tuple[Piece, Tensor]]]  # elements of weights by kind


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.safetensors"


def write(path: Path, settings: Mapping[str, str], runs: Runs, own: Mapping[str, Tensor]) -> None:
    """Write a rank's file durably; `settings` name its rank and the number of ranks."""
    tensors, starts = {f"{OWN}/{name}": value for name, value in own.items()}, {}
    for kind, pieces in runs.items():
        for piece, values in pieces:
            tensors[f"{kind}/{piece.weight}"] = values
            starts[piece.weight] = piece.start
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(held, path, metadata={**settings, STARTS: json.dumps(starts)})
    sync(path)  # by this rank: on another host nobody else could


class _File:
    """An open file, whose settings are those expected."""

    def __init__(self, path: Path, content: Any, expected: Mapping[str, str]) -> None:
        settings: dict[str, str] = content.metadata() or {}
        _check(path, settings, expected)
        self.path, self._content = path, content
        self.ranks = int(settings[RANKS])
        self.names: frozenset[str] = frozenset(content.keys())
        self._starts: dict[str, int] = json.loads(settings[STARTS])

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        value: Tensor = self._content.get_tensor(name)
        return value

    def is_number(self, name: str) -> bool:
        """True where a tensor has one value; its elements are not read."""
        return not self._content.get_slice(name).get_shape()

    def overlap(self, piece: Piece, kind: str = MASTER) -> range:
        """The elements of a piece that are here, counted in the weight."""
        if (name := f"{kind}/{piece.weight}") not in self.names:
            return range(0)
        begin, (count,) = self._starts[piece.weight], self._content.get_slice(name).get_shape()
        return range(max(begin, piece.start), min(begin + count, piece.start + piece.count))

    def copy(self, kind: str, piece: Piece, into: Tensor) -> None:
        """Put what is here of a piece into its place."""
        if found := self.overlap(piece, kind):
            begin, name = self._starts[piece.weight], f"{kind}/{piece.weight}"
            values = self._content.get_slice(name)[found.start - begin : found.stop - begin]
            into[found.start - piece.start : found.stop - piece.start].copy_(values)


class StateFiles:
    """Open files that together hold all elements of some pieces."""

    def __init__(self, files: Sequence[_File]) -> None:
        """The first file stands for this rank's own."""
        self._files = files
        self._names = frozenset(name for file in files for name in file.names)
        moments = (name.split("/") for name in self._names if name.startswith(f"{MOMENT}/"))
        self._keys = sorted({key for _, key, _ in moments})

    def moments(self, weight: str) -> list[str]:
        """The keys under which the optimiser's state of a weight is here."""
        return [key for key in self._keys if f"{MOMENT}/{key}/{weight}" in self._names]

    def scalar(self, kind: str, weight: str) -> Tensor | None:
        """A number of a weight; None where this is no number but a value of each element."""
        name = f"{kind}/{weight}"
        file = next(file for file in self._files if name in file.names)
        return file.tensor(name) if file.is_number(name) else None

    def copy(self, kind: str, piece: Piece, into: Tensor) -> None:
        """Put a piece's elements into a flat tensor of as many."""
        for file in self._files:
            file.copy(kind, piece, into)

    def has(self, name: str) -> bool:
        """True where the rank has saved such a tensor of its own."""
        return f"{OWN}/{name}" in self._files[0].names

    def own(self, name: str) -> Tensor:
        """A tensor of the rank's own."""
        return self._files[0].tensor(f"{OWN}/{name}")


@contextlib.contextmanager
def opened(
    folder: Path, pieces: Sequence[Piece], expected: Mapping[str, str], rank: int, ranks: int
) -> Iterator[StateFiles]:
    """Open the files that hold these pieces, of rank `rank` of `ranks` now; `expected` are settings
    that they must have been made with. Raises BadModel naming what is missing or differs.
    """
    with contextlib.ExitStack() as stack:
        made_by = _open(stack, folder, 0, expected).ranks
        if missing := [r for r in range(made_by) if not path_of(folder, r).is_file()]:
            names = ", ".join(path_of(folder, each).name for each in missing)
            raise BadModel(f"state {str(folder)!r} is not whole: {names} of {made_by} is missing")
        files, left = list[_File](), {piece: piece.count for piece in pieces}
        likely = rank * made_by // ranks
        for number in sorted(range(made_by), key=lambda each: abs(each - likely)):
            files.append(_open(stack, folder, number, {**expected, RANKS: str(made_by)}))
            left = {piece: count - len(files[-1].overlap(piece)) for piece, count in left.items()}
            left = {piece: count for piece, count in left.items() if count}
            if not left:
                break
        for piece in left:
            raise BadModel(
                f"state {str(folder)!r} is not whole: it lacks elements of {piece.weight}; use "
                "another checkpoint"
            )
        yield StateFiles(files)


def _open(
    stack: contextlib.ExitStack, folder: Path, rank: int, expected: Mapping[str, str]
) -> _File:
    path = path_of(folder, rank)
    try:
        content = stack.enter_context(safe_open(path, "pt"))
        return _File(path, content, {**expected, RANK: str(rank)})
    except (OSError, SafetensorError) as error:
        raise BadModel(f"state {str(path)!r} cannot be read: {error}; use another one") from error


def _check(path: Path, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for field, value in expected.items():
        if found.get(field) != value:
            what = "another architecture" if field == "model.path" else "another setting"
            raise BadModel(
                f"state {str(path)!r} was made with {what}: {field} = {found.get(field)!r} there, "
                f"{value!r} here; resume with the run's own {field}, or start a new run from the "
                "checkpoint's model/ folder"
            )
