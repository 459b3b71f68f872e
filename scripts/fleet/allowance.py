"""How often a process may be started again.

- At a rate, so that a run may last for weeks: `fleet.restarts` within `fleet.restarts_window_s`.
- As often without a new step between them, however far they lie apart: what ends in the same way
  each hour would do so for weeks.
- Not after two starts that hung with no good one between: the window may be shorter than their
  deadline.
"""

_MOST_HUNG = 2


class Allowance:
    """The restarts of every process within a window that slides; times are given."""

    def __init__(self, most: int, window_s: float) -> None:
        self.most, self.window_s = most, window_s
        self._made: dict[str, list[float]] = {}
        self._in_vain: dict[str, int] = {}  # since the last new step
        self._hung: dict[str, int] = {}

    def count(self, name: str, now: float) -> int:
        """Return how many restarts of this process lie within the window."""
        recent = [at for at in self._made.get(name, ()) if at > now - self.window_s]
        self._made[name] = recent
        return len(recent)

    def spent(self, name: str, now: float) -> str:
        """Why this process may not be started again now; ''."""
        if self.count(name, now) >= self.most:
            return f"fleet.restarts = {self.most} in {self.window_s:g} s are spent"
        if self._in_vain.get(name, 0) >= self.most:
            return f"fleet.restarts = {self.most} are spent without a new step between them"
        if self._hung.get(name, 0) >= _MOST_HUNG:
            return f"its last {_MOST_HUNG} starts hung"
        return ""

    def rest_s(self, name: str, now: float) -> float:
        """Return for how long a process whose restarts are spent is to rest: until the oldest of
        them has left the window, where that would do.
        """
        if self.count(name, now) < self.most or not self.most:
            return self.window_s
        return self._made[name][-self.most] + self.window_s - now

    def spend(self, name: str, now: float) -> int:
        """Note a restart; return which one it is within the window."""
        self._made.setdefault(name, []).append(now)
        self._in_vain[name] = self._in_vain.get(name, 0) + 1
        return self.count(name, now)

    def progress(self) -> None:
        """Note a new step: no restart before it was in vain."""
        self._in_vain.clear()

    def hang(self, name: str) -> None:
        """Note a start that came to nothing within its deadline."""
        self._hung[name] = self._hung.get(name, 0) + 1

    def rested(self, name: str) -> None:
        """Give a process that has rested one try."""
        self._hung[name] = min(self._hung.get(name, 0), _MOST_HUNG - 1)

    def renew(self, name: str) -> None:
        """Forget the starts that hung of one that works, or starts without having failed."""
        self._hung.pop(name, None)
