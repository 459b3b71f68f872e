"""The record of live answers, a line each, which is their cache too: what is on it is never paid
for again, and a replay answers from it alone.

Several runs of one machine may share a file. What a search was told in place of an answer, because
the budget was spent, is on record for replays; a live search asks again. An answer that cannot be
written is paid for, so it is kept in memory, and found there, until it can.
Waits for the file's lock, 5 s at most.
"""

import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from configs.runtime.files import locked
from retrieval_server.protocol import BadRecord, Document

FILE = "answers.jsonl"
BUDGET_SPENT, QUERY_REFUSED = "BudgetSpent", "QueryRefused"
_HOLDER = "another retrieval server"
_PATIENCE_S = 5.0
_PIECE_BYTES = 16 << 20
_BEGINNING = b'{"scope":'  # of each line
logger = logging.getLogger("retrieval_server")


class Scope(msgspec.Struct, frozen=True):
    """What an answer depends on beside its query."""

    kind: str
    engine_id: str = ""
    country: str = ""
    language: str = ""


class _Head(msgspec.Struct, frozen=True):
    """A line without its passages."""

    scope: Scope
    query: str
    error: str = ""


class Answer(msgspec.Struct, frozen=True):
    """A line: the passages of a query, or the name of what it was told instead; and when (seconds
    since the epoch).
    """

    scope: Scope
    query: str
    at: float
    error: str = ""
    passages: list[Document] = []


class _Place(NamedTuple):
    begin: int
    size: int
    is_of_budget: bool


_head, _answer = msgspec.json.Decoder(_Head), msgspec.json.Decoder(Answer)


class Answers:
    """The answers of one file, of one scope. Of one thread at a time."""

    def __init__(self, path: Path, scope: Scope, writes: bool) -> None:
        """Read where each answer is. Raises BadRecord. `writes`: more will be added."""
        self.path, self.scope, self._writes = path, scope, writes
        self._places: dict[bytes, _Place] = {}
        self._unwritten: dict[bytes, Answer] = {}
        self._read = 0
        try:
            if writes:
                path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if writes else os.O_RDONLY
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise BadRecord(f"{path}: {error.strerror}") from error
        try:
            self._catch_up()
        except OSError as error:  # a folder
            self.close()
            raise BadRecord(f"{path}: {error.strerror}") from error
        except BadRecord:
            self.close()
            raise

    def close(self) -> None:
        """Try once more to write what could not be; close the file."""
        try:
            self.settle()
        except BadRecord as error:
            logger.error("%d answers that were paid for are lost: %s", len(self._unwritten), error)
        os.close(self._file)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, query: str) -> Answer | None:
        """Return the answer to a query, if it is on record; where more may be added, none that a
        spent budget has given. Raises BadRecord.
        """
        if (kept := self._unwritten.get(_key(query))) is not None:
            return kept
        if self._writes:
            self._catch_up()
        place = self._places.get(_key(query))
        if place is None or (self._writes and place.is_of_budget):
            return None
        return self._at(place)

    def add(self, query: str, passages: list[Document], error: str = "") -> Answer:
        """Put an answer on the disk, or keep it in memory where that fails."""
        answer = Answer(self.scope, query, time.time(), error, passages)
        key = _key(query)
        if error == BUDGET_SPENT and (key in self._places or key in self._unwritten):
            return answer
        try:
            self._write(answer)
        except BadRecord as fault:
            if error != BUDGET_SPENT:
                self._unwritten[key] = answer
            logger.warning("an answer is not on record, nothing is paid until it is: %s", fault)
        return answer

    @property
    def is_behind(self) -> bool:
        """True where an answer could not be written yet."""
        return bool(self._unwritten)

    def settle(self) -> None:
        """Write what could not be written before. Raises BadRecord where it still cannot."""
        for key, answer in list(self._unwritten.items()):
            self._write(answer)
            del self._unwritten[key]

    def _write(self, answer: Answer) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        try:
            with locked(self.path, _HOLDER, os.O_RDWR, patience_s=_PATIENCE_S) as there:
                if not os.path.sameopenfile(there, self._file):
                    raise BadRecord(
                        f"{self.path} is another file than it was: put the first one back, or "
                        "start again"
                    )
                self._catch_up()
                os.ftruncate(self._file, self._read)  # what a killed one has half written
                if os.write(self._file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file)
        except OSError as fault:
            raise BadRecord(
                f"{self.path}: {fault.strerror or fault}: see that it is there, and has room"
            ) from fault
        self._catch_up()

    def _catch_up(self) -> None:
        """Note the lines that are new."""
        size = os.fstat(self._file).st_size
        if size < self._read:
            raise BadRecord(f"{self.path} has become shorter: put back what was taken, start again")
        while self._read < size:
            content = os.pread(self._file, _PIECE_BYTES, self._read)
            whole = content.rfind(b"\n") + 1
            if not whole:
                self._require_ours(content)
                return  # it is still being written, or was cut short
            begin = self._read
            for line in content[:whole].splitlines(keepends=True):
                self._note(line, begin)
                begin += len(line)
            self._read = begin

    def _require_ours(self, tail: bytes) -> None:
        """Raise BadRecord where half a line is not one of ours: it would be cut off."""
        if not (tail.startswith(_BEGINNING) or _BEGINNING.startswith(tail)):
            raise BadRecord(
                f"{self.path}: what is at byte {self._read} is no answer: name a record of live "
                "searches in retrieval.live.record, or take that out"
            )

    def _note(self, line: bytes, begin: int) -> None:
        try:
            head = _head.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRecord(
                f"{self.path}: the line at byte {begin} is no answer ({error}): name the record "
                "of live searches, or take that line out"
            ) from error
        is_of_budget = head.error == BUDGET_SPENT
        key = _key(head.query)
        if head.scope == self.scope and not (is_of_budget and key in self._places):
            self._places[key] = _Place(begin, len(line), is_of_budget)

    def _at(self, place: _Place) -> Answer:
        try:
            return _answer.decode(os.pread(self._file, place.size, place.begin))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRecord(
                f"{self.path}: the answer at byte {place.begin} cannot be read: {error}"
            ) from error


def _key(query: str) -> bytes:
    return blake3(query.encode(errors="surrogatepass")).digest(16)
