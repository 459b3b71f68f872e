"""How often a process may be started again: a rate, so that a run may last for weeks.

Each process has `fleet.restarts` within `fleet.restarts_window_s`. One that hangs at its start
twice in a row has used up all of them: the window may be shorter than its deadline.
"""

_MOST_HUNG = 2


class Allowance:
    """The restarts of every process within a window that slides; times are given."""

    def __init__(self, most: int, window_s: float) -> None:
        self.most, self.window_s = most, window_s
        self._made: dict[str, list[float]] = {}
        self._hung: dict[str, int] = {}

    def __str__(self) -> str:
        return f"fleet.restarts = {self.most} in {self.window_s:g} s are spent"

    def count(self, name: str, now: float) -> int:
        """Return how many restarts of this process lie within the window."""
        recent = [at for at in self._made.get(name, ()) if at > now - self.window_s]
        self._made[name] = recent
        return len(recent)

    def is_spent(self, name: str, now: float) -> bool:
        """True where this process may not be started again now."""
        return self.count(name, now) >= self.most or self._hung.get(name, 0) >= _MOST_HUNG

    def rest_s(self, name: str, now: float) -> float:
        """Return for how long a process whose restarts are spent is to rest: until the oldest of
        them has left the window.
        """
        if self.count(name, now) < self.most or not self.most:
            return self.window_s  # it hung
        return self._made[name][-self.most] + self.window_s - now

    def spend(self, name: str, now: float) -> int:
        """Note a restart; return which one it is within the window."""
        self._made.setdefault(name, []).append(now)
        return self.count(name, now)

    def hang(self, name: str) -> None:
        """Note a start that came to nothing within its deadline."""
        self._hung[name] = self._hung.get(name, 0) + 1

    def rested(self, name: str) -> None:
        """Give a process that works, or has rested, its starts anew."""
        self._hung.pop(name, None)
