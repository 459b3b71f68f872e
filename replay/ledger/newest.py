"""A list that keeps its newest items only, and counts all: what is told of a run's history."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_KEPT = 100  # a report takes 10 KB: whoever holds them is soon as large as it gets
Item = TypeVar("Item")


@dataclass
class Newest(Generic[Item]):
    """The newest `MOST_KEPT` items; `count`: how many there ever were."""

    kept: deque[Item] = field(default_factory=deque)
    count: int = 0

    def append(self, item: Item) -> None:
        """Add an item; the oldest goes where there is no room."""
        self.kept.append(item)
        self.count += 1
        if len(self.kept) > MOST_KEPT:
            self.kept.popleft()

    def after(self, told: int) -> tuple[Item, ...]:
        """Return those after the first `told` that are still kept."""
        return tuple(list(self.kept)[max(0, len(self.kept) - (self.count - told)) :])
