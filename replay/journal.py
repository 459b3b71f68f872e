"""The journal makes decisions facts: taken into the state at once, then appended to the log."""

from replay.books import LedgerState
from replay.records import Record


class Journal:
    """Facts in the order in which they are written; `now`: the time that they carry."""

    def __init__(self, state: LedgerState) -> None:
        self.state = state
        self.now = 0.0
        self._written: list[Record] = []

    def write(self, fact: Record) -> None:
        """Make this fact true."""
        self.state.evolve(fact)
        self._written.append(fact)

    def wrote_only(self, kinds: tuple[type[Record], ...]) -> bool:
        """Return True if everything written since the last `take` is of these kinds."""
        return all(isinstance(fact, kinds) for fact in self._written)

    def take(self) -> tuple[Record, ...]:
        """Return everything written since the last call, in order."""
        written, self._written = tuple(self._written), []
        return written
