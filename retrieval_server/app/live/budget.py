"""What live searches may cost, counted in a file of the run: a line for each change, on the disk
before the request that it pays for is made.

So a run that goes on goes on counting, and a killed one has counted what it may have spent. Several
processes of one machine may spend of the same budget. Waits for the file's lock, 5 s at most.
"""

import errno
import os
import time
from pathlib import Path

import msgspec

from configs.runtime.files import locked
from retrieval_server.protocol import BadRecord

FILE = "spending.jsonl"
_HOLDER = "another retrieval server of this run"
_PATIENCE_S = 5.0
_NANOS = 1_000_000_000  # in a US dollar: sums of them are exact


class _Spent(msgspec.Struct, frozen=True):
    """A line: money spent, or below 0 given back, and when (seconds since the epoch)."""

    at: float
    usd: float


_decoder = msgspec.json.Decoder(_Spent)


class Budget:
    """The money of one run. Of one thread at a time."""

    def __init__(self, path: Path, budget_usd: float, price_usd: float) -> None:
        """Read what is spent already. Raises BadRecord."""
        self.path, self.budget_usd, self.price_usd = path, budget_usd, price_usd
        self._budget, self._price = _nanos(budget_usd), _nanos(price_usd)
        self._spent = self._read = 0
        self._change(0)

    @property
    def spent_usd(self) -> float:
        """All that is counted, of other processes up to the last change made here."""
        return self._spent / _NANOS

    @property
    def is_spent(self) -> bool:
        """True where another request would cost more than is left."""
        return self._spent + self._price > self._budget

    def take(self) -> bool:
        """Pay for one request before it is made; False, and nothing is paid, where the rest does
        not do. Raises BadRecord.
        """
        return self._change(self._price)

    def give_back(self) -> None:
        """Take back what was paid for a request that was not billed. Raises BadRecord."""
        self._change(-self._price)

    def _change(self, nanos: int) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT
            with locked(self.path, _HOLDER, flags, patience_s=_PATIENCE_S) as file:
                self._catch_up(file)
                if nanos > 0 and self.is_spent:
                    return False
                if nanos:
                    self._append(file, nanos)
                return True
        except OSError as error:
            raise BadRecord(f"{self.path}: {error.strerror or error}: nothing is asked") from error

    def _catch_up(self, file: int) -> None:
        """Count what others have spent since; drop what a killed one has half written."""
        size = os.fstat(file).st_size
        if size < self._read:
            raise BadRecord(f"{self.path} has become shorter: put back what was taken from it")
        content = os.pread(file, size - self._read, self._read)
        whole = content.rfind(b"\n") + 1
        self._spent = _counted(self.path, content[:whole], self._spent)
        self._read += whole
        if whole < len(content):
            os.ftruncate(file, self._read)

    def _append(self, file: int, nanos: int) -> None:
        line = msgspec.json.encode(_Spent(time.time(), nanos / _NANOS)) + b"\n"
        if os.pwrite(file, line, self._read) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
        self._read += len(line)
        self._spent += nanos


class Spending:
    """What a run has spent, as somebody reads it who spends nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spent = self._read = 0

    def look(self) -> float:
        """Read on, and return the money spent so far. Raises BadRecord or OSError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:  # nothing yet
            return 0.0
        whole = content.rfind(b"\n") + 1
        self._spent = _counted(self._path, content[:whole], self._spent)
        self._read += whole
        return self._spent / _NANOS

    def is_spent(self, budget_usd: float, price_usd: float) -> bool:
        """True where, at the last look, another request would have cost more than was left."""
        return self._spent + _nanos(price_usd) > _nanos(budget_usd)


def _counted(path: Path, lines: bytes, spent: int) -> int:
    """What is spent after these lines. Raises BadRecord."""
    for line in lines.splitlines():
        try:
            spent += _nanos(_decoder.decode(line).usd)
            if spent < 0:
                raise ValueError("more is given back than was spent")
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise BadRecord(
                f"{path}: {error}: a line is wrong, so what is left cannot be told: mend it, or "
                "start a new run"
            ) from error
    return spent


def _nanos(usd: float) -> int:
    return round(usd * _NANOS)
