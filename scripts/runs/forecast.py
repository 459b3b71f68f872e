"""The published forecast of staleness, beside which a simulation's is shown.

Applied Compute, "Staleness in fully asynchronous RL". C rollouts are in flight, B make a batch, ρ
is what the engines could roll out over what the learner could train, q the batches that may be
queued, M the tail factor of rollouts' lengths. It knows no admission, no order of groups and no
publishing cadence: it is a check on the simulation's size, not its goal. Its engines run on while
the queue is full; those of Forage are held back, which is ρ = 1.
"""

from typing import NamedTuple


class Forecast(NamedTuple):
    """Steps of staleness that come before the queue, and in it."""

    before_queue: float
    in_queue: float

    @property
    def staleness(self) -> float:
        """Both."""
        return self.before_queue + self.in_queue


def forecast(
    *, concurrency: float, batch: float, ratio: float, queue: float, tail: float
) -> Forecast:
    """C·M/B + ρ for ρ < 1, else C·M/(ρB) + (2q + ρ − 1)/(2ρ)."""
    if ratio < 1.0:
        return Forecast(concurrency * tail / batch, ratio)
    return Forecast(concurrency * tail / (ratio * batch), (2 * queue + ratio - 1) / (2 * ratio))
