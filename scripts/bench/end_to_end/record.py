"""What one run of the work leaves: its steps and evaluations, or the parts measured alone.

The child process of a cell writes it, the benchmark reads it. Times (`at_s`) are seconds since the
epoch, so that they can be laid beside what was seen of the processes.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from replay.codec import decode_wire

Kind = Literal["lockstep", "sync", "ahead", "async", "parts"]
TaskName = Literal["demo", "wiki"]


class Job(msgspec.Struct, frozen=True):
    """The order to a child process: a configuration file and overrides, how to run it, and where to
    write the `Record`, of `parts` the `Parts`.

    `learns`: evaluate on the way, and end by the configuration; else end after `steps`. `memory`: a
    folder in it for weights on their way, which is removed by who gives the order. Of `parts`:
    rollouts in flight of generation alone, and the seconds before and in its window.
    """

    kind: Kind
    config: str
    overrides: tuple[str, ...]
    engines: int
    steps: int
    learns: bool
    server: tuple[str, int]  # the retrieval server's base URL, without latency, and process id
    out: str = ""
    memory: str = ""
    in_flight_alone: int = 0
    window: tuple[float, float] = (0.0, 0.0)


class Turns(msgspec.Struct, frozen=True):
    """So many turns and searches of rollouts, and their seconds as the rollouts saw them."""

    turns: int = 0
    searches: int = 0
    generate_s: float = 0.0
    search_s: float = 0.0


def turns_of(payloads: Iterable[bytes]) -> Turns:
    """The turns of encoded trajectories. Raises CodecError."""
    rollouts = [decode_wire(payload) for payload in payloads]
    searches = [
        search.seconds
        for rollout in rollouts
        for turn in rollout.turns
        for search in turn.searches
        if search.status != "skipped"
    ]
    return Turns(
        turns=sum(len(rollout.turns) for rollout in rollouts),
        searches=len(searches),
        generate_s=sum(rollout.timings["generate_s"] for rollout in rollouts),
        search_s=sum(searches),
    )


class Step(msgspec.Struct, frozen=True):
    """One optimiser step as its learner saw it, and what was sampled since the one before.

    `wait_s`: for rollouts, of which `oldest_s` for the slowest that staleness lets no step pass,
    while a batch lay ready; `pause_s`: of generation, while weights are written. `tokens` are
    sampled ones that this step trained on, `staleness` their mean, `turns` their rollouts'.
    """

    at_s: float
    update_s: float
    wait_s: float
    pause_s: float
    tokens: int
    sampled: int
    staleness: float = 0.0
    staleness_max: float = 0.0
    oldest_s: float = 0.0
    turns: Turns = Turns()


class Evaluation(msgspec.Struct, frozen=True):
    """Exact match after `step`, `after_s` of training; where training stood still for evaluations,
    without that time.
    """

    step: int
    after_s: float
    em: float
    sampled_em: float | None


class Record(msgspec.Struct, frozen=True):
    """All of a run."""

    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]


class Parts(msgspec.Struct, frozen=True):
    """Generation by one engine alone without latency, and training alone.

    `token_cpu_s`, `update_cpu_s`: processor time of all processes that take part, of one sampled
    token and of one update; `update_tokens`: the sampled tokens of the batch that was trained on.
    """

    tokens_per_s: float
    token_cpu_s: float
    turn_s: float
    update_s: float
    update_cpu_s: float
    update_tokens: int
