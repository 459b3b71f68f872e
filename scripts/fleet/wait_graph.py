"""Lines that say who waits for whom, for what, since when; pure, of replay's last `Status`."""

from collections.abc import Iterable, Mapping

from replay.protocol import Status
from scripts.fleet.kinds import is_actor

# (gauge of an actor, words)
_ACTOR = (
    ("sync/policy_version", "serves version {:.0f}"),
    ("actor/rollouts_in_flight", "{:.0f} rollouts in flight"),
    ("actor/tokens_per_s", "{:.0f} tokens/s"),
    ("retrieval/latency_p99_s", "retrieval p99 {:.2f} s"),
)


def wait_graph(
    status: Status | None, age_s: float, names: Iterable[str], states: Mapping[str, str]
) -> list[str]:
    """One line a process; `age_s`: of the status; `states`: what keeps a process from its work."""
    return [f"{name}: {states.get(name) or _at_work(name, status, age_s)}" for name in names]


def _at_work(name: str, status: Status | None, age_s: float) -> str:
    if status is None:
        return "replay has not told yet"
    since = f" ({age_s:.0f} s ago)" if age_s >= 1.0 else ""
    if name == "learner":
        step = f"reported step {status.steps[-1].step} last; " if status.steps else ""
        return f"{step}{status.phase}{since}"
    if name == "replay":
        ready, held = (status.gauges.get(f"replay/{each}_groups") for each in ("ready", "open"))
        return f"{_count(ready)} groups ready, {_count(held)} open{since}"
    if not is_actor(name):
        return "works, as far as the launcher sees"
    if name not in status.fleet:
        return f"not known to replay{since}"
    gauges = status.fleet[name]
    told = [words.format(gauges[gauge]) for gauge, words in _ACTOR if gauge in gauges]
    return (", ".join(told) or "has told no numbers yet") + since


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"
