"""Retries of a client's requests: the pauses between attempts, and how long calls take."""

import random
from collections import deque

_WINDOW = 1024  # calls that the percentiles look back on


class Backoff:
    """Pauses doubled from `first_s` to `longest_s`; jittered: callers return out of step."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._random = random.Random()

    def pause_s(self, attempt: int) -> float:
        """Return the seconds before the next attempt; the first one is attempt 0."""
        longest: float = min(self._first_s * 2**attempt, self._longest_s)
        return longest * self._random.uniform(0.5, 1.0)


class Latencies:
    """How long recent successful calls took, retries included."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float) -> None:
        """Record one call."""
        self._seconds.append(seconds)

    def gauges(self, name: str) -> dict[str, float]:
        """Return nearest-rank percentiles, `NAME_p50_s` and `NAME_p99_s`; 0 without a call."""
        ordered = sorted(self._seconds) or [0.0]
        return {
            f"{name}_{part}_s": ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]
            for part, fraction in (("p50", 0.50), ("p99", 0.99))
        }
