"""Where decisions become facts: taken into the books at once, then handed out to be appended.

Consumes facts; produces them again, in order, for the event log. Waits for nothing.
"""

from replay.books import Books
from replay.records import Record


class Journal:
    """`now` is the time of the event being decided, for the facts to carry."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.now = 0.0
        self._written: list[Record] = []

    def write(self, fact: Record) -> None:
        """Make this fact true."""
        self.books.evolve(fact)
        self._written.append(fact)

    def wrote_only(self, kinds: tuple[type[Record], ...]) -> bool:
        """Whether everything written since the last `take` is of these kinds."""
        return all(isinstance(fact, kinds) for fact in self._written)

    def take(self) -> tuple[Record, ...]:
        """Everything written since the last call, in order."""
        written, self._written = tuple(self._written), []
        return written
