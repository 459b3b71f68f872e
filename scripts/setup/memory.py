"""`forage memory`: what GPUs and host must hold, and the pace to be expected, each with its
arithmetic. Works for machines and models that are not here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.load import ConfigError, load
from configs.runtime.files import write_json
from configs.runtime.process import Exit
from configs.schema import Config
from scripts.command.options import Options, argument, option, overrides
from scripts.setup.fit import fitted
from scripts.setup.gpu_memory import GIB, state_bytes, tenants, totals
from scripts.setup.machine import LESS, gpus_wanted, least_memory, memory_needed
from scripts.setup.model_size import (
    Model,
    find_model,
    sent_elements,
    token_bytes,
    tokens_at_once,
    trained_elements,
    uneven_shares,
    width_of,
)
from scripts.setup.pace import Pace, speed_of

_REASONS = {  # of a part of who lies on a GPU
    "weights": "{width} x {elements}{over3}",
    "weights within a node": "{width} x {elements} / a node's ranks, of two nodes",
    "adapter": "4 x {trained}{over3}",
    "gradients": "{gradient} x {trained}{over2}",
    "optimiser, with fp32 weights": "{state} x {trained}{over1}",
    "averages": "{averages} x {trained}{over1}",
    "critic's optimiser": "{moments} x {trunk}{over1}",
    "critic, with its gradients": "{width} x {trunk}{over3} + {gradient} x {trunk}{over2}",
    "activations": "{tokens:,} tokens at once",
    "head, with its gradient": "a piece of logits at a time",
    "value head, with its gradient": "of hidden states in fp32",
    "the anchor's likeliest tokens": "8 x learner.kl_top_k a token",
    "optimiser's temporaries": "while it steps",
    "reductions": "DeepSpeed's buckets",
    "weights shown to actors": "{engine} x {sent}",
    "engine": "graphs, logits, activations",
    "weights received": "{engine} x {sent}",
    "vectors in halves": "the index over all GPUs",
    "FAISS": "its scratch",
    "encoder": "of queries, on one GPU",
    "CUDA": "a process",
}
FILLING = (
    "A run starts where {} GiB of it are free: caches and activations, which only the longest "
    "rollouts fill, count by half."
)
NOTE = (
    "Times are calculated for {moved:g} TB/s and {done:g} TFLOP/s a GPU; none is measured. "
    'Rollouts are taken to end half way to the context\'s limit, "at most" at it.'
)
_OF_ENGINES = {  # of an actor's, where another reason stands above or workers share
    "weights": "{engine} x {elements}{workers}",
    "adapter": "{engine} x {trained}{workers}",
    "keys and values": "{kv_tokens:,} tokens of {token_kib:g} KiB{workers}",
}
_PASSING = "what passes through"


@dataclass(frozen=True)
class MemoryOptions(Options):
    """The options of `forage memory`; `gpus` and `gib` describe a machine other than this one."""

    config: str = argument("a YAML file, for example configs/one_gpu.yaml")
    overrides: tuple[str, ...] = overrides()
    gpus: int | None = option("for so many GPUs, instead of this machine's", metavar="N", least=0)
    gib: float = option("the memory of each of them", default=79.0, least=1)
    json: Path | None = option("write the figures there", metavar="FILE")


@dataclass(frozen=True)
class Reckoned:
    """A configuration on so many GPUs: who lies on each, what the host holds, the pace."""

    config: Config
    model: Model
    total: int  # bytes of each GPU
    gpus: list[dict[str, dict[str, int]]]
    host: dict[str, int]
    pace: Pace

    @property
    def fits(self) -> bool:
        """True where every GPU can hold what lies on it."""
        return all(_sum(each) <= self.total for each in self.gpus)


def memory(options: MemoryOptions) -> int:
    """Print it; failed where a GPU cannot hold what it must. Raises ConfigError."""
    found = reckon(options)
    console = Console()
    console.print(_memory_table(found))
    if (least := least_memory(found.host)) < sum(found.host.values()):
        console.print(FILLING.format(_gib(least)), highlight=False)
    if found.fits:
        console.print()
        console.print(_pace_table(found))
    if not found.fits:
        console.print(f"\nToo much for a GPU: {LESS}.", style="bold red", highlight=False)
    elif found.gpus:
        moved, done = (each / 1e12 for each in speed_of(found.total))
        console.print(f"\n{NOTE.format(moved=moved, done=done)}", highlight=False)
    if options.json:
        write_json(options.json, figures(found))
    return Exit.DONE if found.fits else Exit.FAILED


def reckon(options: MemoryOptions) -> Reckoned:
    """All of it, for the GPUs that the options name, that are here, or that a recipe is for."""
    config = load(options.config, options.overrides, options.gpus)
    size = int(options.gib * GIB)
    gpus = _gpus(config, size) if options.gpus is None else [size] * options.gpus
    try:
        model = find_model(config.model.path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its size cannot be read ({error}): name a "
            "Hugging Face folder, or a model of known shape such as Qwen2.5-7B"
        ) from error
    if uneven := next(uneven_shares(config, model), ""):
        raise ConfigError(uneven)
    config = fitted(config, gpus, model)
    return Reckoned(
        config,
        model,
        min(gpus, default=0),
        tenants(config, model, len(gpus)) if gpus else [],
        memory_needed(config, len(gpus), model),
        Pace(config, model, min(gpus, default=0), len(gpus)),
    )


def _gpus(config: Config, size: int) -> list[int]:
    """The bytes of the GPUs that are here, or that a recipe is for, of which a cluster's node has
    some.
    """
    here, wanted = totals(), gpus_wanted(config)
    if config.cluster.address and len(here) < wanted:
        return [min(here, default=size)] * wanted
    return here or [size] * wanted


def _memory_table(found: Reckoned) -> Table:
    """Each kind of GPU by its fullest, and the host."""
    name = Path(found.config.model.path).name
    table = _table("GiB", f"{name}: {found.model.parameters / 1e9:.3g}e9 parameters")
    for group in _kinds(found.gpus):
        fullest = max((found.gpus[gpu] for gpu in group), key=_sum)
        held = f"[bold]of {found.total / GIB:.1f}{', the fullest' if len(group) > 1 else ''}"
        table.add_row(f"[bold]{_span(group)}", f"[bold]{_gib(_sum(fullest))}", held)
        for who, needs in fullest.items():
            table.add_row(f" {_role(who)}", _gib(sum(needs.values())), "")
            for what, size in needs.items():
                table.add_row(f"   {what}", _gib(size), _reason(found, who, what))
    table.add_row("[bold]host", f"[bold]{_gib(sum(found.host.values()))}", "")
    for what, size in found.host.items():
        short, _, fields = what.partition(" (")
        table.add_row(f"   {short}", _gib(size), fields.removesuffix(")"))
    return table


def _pace_table(found: Reckoned) -> Table:
    table = _table("")
    for what, value, how in _pace_rows(found):
        table.add_row(what, value, how)
    return table


def _pace_rows(found: Reckoned) -> Iterator[tuple[str, str, str]]:
    pace, config = found.pace, found.config
    actors, sync = config.actors, config.weight_sync
    per = f"{pace.kv_tokens:,} tokens / {pace.context_tokens:,} a context"
    slots = f", {actors.max_num_seqs} slots"
    yield "rollouts in flight", f"{actors.count} x {pace.in_flight}", per + slots
    if not found.gpus:
        return
    token = f"{actors.max_action_tokens} tokens of {1e3 * pace.token_s:.0f} ms, a search"
    yield "a turn, at most", _seconds(pace.turn_s), token
    met = f"{pace.updates} update{'s' * (pace.updates > 1)} of {_seconds(pace.anew_s)}"
    limits = f"{pace.sampled_tokens:,} tokens, {actors.max_turns} searches, {met}"
    yield "a rollout, at most", _seconds(pace.rollout_s), limits
    batch = f"{pace.rollouts_per_step:,} rollouts, {pace.passes} forward passes' work"
    yield "a step", _seconds(pace.step_s), batch
    every = f"weight_sync.publish_every = {sync.publish_every}"
    yield "new weights, every", _seconds(pace.publish_s), every
    yield "contexts made anew", f"{100 * pace.anew_share:.0f} %", "of an engine's time"


def figures(found: Reckoned) -> dict[str, Any]:
    """The same as a tree, in bytes and seconds."""
    pace, numbers = found.pace, ("kv_tokens", "context_tokens", "in_flight")
    times = (
        "token_s",
        "turn_s",
        "rollout_s",
        "step_s",
        "longest_step_s",
        "publish_s",
        "anew_share",
    )
    shown = (*numbers, *times) if found.gpus else numbers
    return {
        "parameters": found.model.parameters,
        "gpu_bytes": found.total,
        "gpus": found.gpus,
        "host": found.host,
        "kv_cache_bytes": found.config.actors.kv_cache_bytes,
        "offload": found.config.learner.offload,
        "fits": found.fits,
        "pace": {name: getattr(pace, name) for name in shown},
    }


def _reason(found: Reckoned, who: str, what: str) -> str:
    config, learner, model = found.config, found.config.learner, found.model
    width, ranks = width_of(config.model.dtype), learner.ranks
    state, trained = state_bytes(config, model), sum(trained_elements(config, model))
    over = {
        f"over{stage}": f" / {ranks} ranks" * (ranks > 1 and learner.zero_stage >= stage)
        for stage in (1, 2, 3)
    }
    shared = ranks if learner.zero_stage else 1
    workers = config.actors.tensor_parallel
    forms = _REASONS | (_OF_ENGINES if who.startswith("actor") else {})
    if workers > 1:
        forms |= {"weights received": _PASSING}
    return forms[what].format(
        width=width,
        engine=width_of(config.engine_dtype),
        elements=f"{model.parameters / 1e9:.3g}e9",
        trained=f"{trained / 1e9:.3g}e9",
        sent=f"{sum(sent_elements(config, model)) / 1e9:.3g}e9",
        gradient=width if learner.offload == "cpu" and not learner.lora.rank else 4,
        state=round(shared * state["optimiser, with fp32 weights"] / trained),
        trunk=f"{model.trunk_parameters / 1e9:.3g}e9",
        moments=round(shared * state["critic's optimiser"] / model.trunk_parameters),
        averages=round(shared * state["averages"] / trained),
        tokens=tokens_at_once(config),
        kv_tokens=found.pace.kv_tokens,
        token_kib=token_bytes(config, model) / 1024,
        workers=f" / {workers} workers" * (workers > 1),
        **over,
    )


def _kinds(gpus: list[dict[str, dict[str, int]]]) -> list[list[int]]:
    """Numbers of GPUs by the roles of who lies there."""
    found: dict[tuple[str, ...], list[int]] = {}
    for gpu, each in enumerate(gpus):
        if each:
            found.setdefault(tuple(map(_role, each)), []).append(gpu)
    return list(found.values())


def _role(who: str) -> str:
    return re.sub(r"( rank \d+|-\d+.*)$", "", who)


def _span(gpus: list[int]) -> str:
    whole = len(gpus) > 1 and gpus == [*range(gpus[0], gpus[-1] + 1)]
    named = f"{gpus[0]} to {gpus[-1]}" if whole else ", ".join(map(str, gpus))
    return f"GPU{'s' * (len(gpus) > 1)} {named}"


def _sum(there: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(needs.values()) for needs in there.values())


def _table(unit: str, title: str = "") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, no_wrap=True)
    table.add_column(unit, justify="right", no_wrap=True)
    table.add_column("calculated as", overflow="fold")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"
