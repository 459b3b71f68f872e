"""The tables of `forage plan`, at 80 columns."""

import textwrap
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.plan.figures import Planned
from scripts.setup.gpu_memory import GIB

WIDTH = 80


def shown(planned: Planned) -> Iterator[str]:
    """Yield the parts of the page."""
    yield _printed(_table(planned, list(_rows(planned))))
    if planned.split is not None:
        yield _printed(_split(planned))
    elif planned.gpus > planned.found.config.actors.tensor_parallel:
        yield "No split of these GPUs fits the model: see forage memory.\n"
    for said in planned.says():
        yield textwrap.fill(said, WIDTH)


def _printed(table: Table) -> str:
    text = StringIO()
    Console(file=text, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _table(planned: Planned, rows: list[tuple[str, str, str]]) -> Table:
    config = planned.found.config
    where = f"{planned.gpus} x {planned.name}" if planned.gpus else planned.name
    ranks = config.learner.ranks
    title = (
        f"{Path(config.model.path).name} on {where}: {ranks} rank{'s' * (ranks > 1)}, "
        f"{config.actors.count:,} x {planned.scenario.engines.capacity} rollouts"
    )
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("planned", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _rows(planned: Planned) -> Iterator[tuple[str, str, str]]:
    found, scenario, work = planned.outcome, planned.scenario, planned.scenario.workload
    rest = f"update {_s(found.update_s)}, wait {_s(found.wait_s)}, rest {_s(found.rest_s)}"
    yield "a step", _s(found.step_s), rest
    yield "tokens/s trained", _n(found.trained_per_s), f"{scenario.batch:,} rollouts a step"
    yield "tokens/s sampled", _n(found.sampled_per_s), f"{work.sampled_tokens:.0f} of a rollout"
    yield "learner idle", _share(found.learner_idle), f"of which for the oldest {_oldest(planned)}"
    engines = f"{_n(found.in_flight)} rollouts in flight, {_s(found.rollout_s)} each"
    yield "engines idle", _share(found.engine_idle), engines
    bound = f"{found.staleness_max} at most, of {scenario.rules.max_staleness} allowed"
    yield "staleness of tokens", f"{found.staleness:.2f}", bound
    before, inside = zip(planned.forecast, planned.held_forecast, strict=True)
    yield "  before the queue", f"{found.before_queue:.2f}", _forecast(planned, *before)
    yield "  in the queue", f"{found.in_queue:.2f}", _forecast(planned, *inside)
    yield "rolled out/trained", f"{planned.ratio:.2f}", "of what each could do, unheld"
    every = f"a step; a version is {_s(scenario.sync.transfer_s)} on its way"
    yield "pause for weights", _s(found.pause_s), every
    yield "contexts made anew", _share(found.anew_share), "of the engines' time"
    latency = f"{found.searches_peak_per_s:,.0f} in the fullest second"
    yield "searches/s", _n(found.searches_per_s), latency
    replay = f"of {planned.replay_per_s:,.0f} that one replay server takes"
    yield "trajectories/s", _n(found.rollouts_per_s), replay
    yield from _memory(planned)


def _memory(planned: Planned) -> Iterator[tuple[str, str, str]]:
    found = planned.found
    if not found.gpus:
        host = sum(found.host.values()) / GIB
        yield "memory", f"{host:.1f} GiB", "of the host, at most (forage memory)"
        return
    for role in ("learner", "actor"):
        of_role = (each for each in found.gpus if any(who.startswith(role) for who in each))
        held = max((sum(sum(n.values()) for n in each.values()) for each in of_role), default=0)
        too_much = "" if held <= found.total else ": too much (forage memory)"
        limit = f"of {found.total / GIB:.1f} GiB, calculated{too_much}"
        yield f"memory, {role}'s GPU", f"{held / GIB:.1f} GiB", limit


def _split(planned: Planned) -> Table:
    assert planned.split is not None
    table = Table("", "ranks", "actors", "tokens/s", "a step", "learner idle", "engines idle",
                  box=None, pad_edge=False)  # fmt: skip
    config, best = planned.found.config, planned.split
    rows = (
        ("as configured", config.learner.ranks, config.actors.count, planned.outcome),
        (f"best of {planned.gpus:,} GPUs", best.ranks, best.actors, best.outcome),
    )
    for name, ranks, actors, of in rows:
        idle = _share(of.learner_idle), _share(of.engine_idle)
        table.add_row(name, str(ranks), f"{actors:,}", _n(of.trained_per_s), _s(of.step_s), *idle)
    return table


def _forecast(planned: Planned, published: float, held: float) -> str:
    told = f"{published:.2f} by the published forecast"
    return told if planned.ratio <= 1 else f"{told}, {held:.2f} held back"


def _oldest(planned: Planned) -> str:
    found = planned.outcome
    return _share(found.oldest_s / found.step_s)


def _share(value: float) -> str:
    return f"{100 * max(0.0, value):.0f} %"


def _n(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _s(seconds: float) -> str:
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.2g} s" if seconds else "0 s"
