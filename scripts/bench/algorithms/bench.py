"""What the algorithms of the learner cost: `forage bench algorithms [--quick] [--json FILE]`.

Each figure is a ratio to a baseline that is measured beside it, in turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from scripts.bench import harness
from scripts.bench.algorithms import lora, topk
from scripts.options import option

GOALS: dict[str, harness.Goal] = {
    "topk_memory_over_head": harness.at_most(1.2),
    "lora_sync_bytes_share": harness.at_most(0.02),
    "lora_em_gap": harness.at_most(0.05),
}
SEEDS = (0, 1, 2)  # of the demo; --quick: the first


@dataclass(frozen=True)
class BenchAlgorithmsOptions(harness.BenchOptions):
    """Options of `forage bench algorithms`; `quick` takes ten minutes."""

    threads: int = option("threads of torch, on the CPU", default=1, least=1)


def measure(options: BenchAlgorithmsOptions, report: harness.Report) -> dict[str, Any]:
    """All figures. Raises RunFailed."""
    found = topk.compare(1 if options.quick else 3, options.threads, report)
    found |= {"lora_sync_bytes_share": lora.sync_bytes_share()}
    found |= lora.em_gap(SEEDS[:1] if options.quick else SEEDS, report)
    size = topk.Size()
    return found | {
        "machine": harness.machine(),
        "method": {
            "topk_memory_over_head": f"the chunked head with a KL over the {topk.TOP_K} likeliest "
            f"tokens of the anchor over the head alone, vocabulary {size.vocabulary}, "
            f"{size.tokens} tokens, hidden {size.hidden}, fp32; the dearer of the anchor's pass "
            "(finds them) and the pass that makes the gradient (what was found counts too)",
            "peak_bytes": "above weights, gradients and hidden states; a process each, peak "
            + ("torch.cuda.max_memory_allocated" if torch.cuda.is_available() else "resident set"),
            "lora_sync_bytes_share": f"bytes of an adapter of rank {lora.RANK} on every linear "
            "layer over those of the model, in one dtype, on SmolLM2-135M's shape: calculated",
            "lora_em_gap": "exact match of the demo's last evaluation, trained whole less with "
            f"{' '.join(lora.ADAPTED)}, in as many steps; seeds "
            f"{SEEDS[:1] if options.quick else SEEDS}",
            "threads": options.threads,
        },
    }


def tables(found: Mapping[str, Any]) -> tuple[Table, Table]:
    """The goals, and both passes of the head."""
    passes = Table("pass", "head alone", "with top-k", "memory", "time", title="Peak of the head")
    for name, told in (("score", "the anchor's"), ("gradient", "gradient")):
        peaks = [found[f"{who}_{name}_peak_bytes"] / 2**20 for who in ("head", "topk")]
        ratios = [found[f"topk_{name}_{what}_over_head"] for what in ("memory", "time")]
        passes.add_row(
            told, *(f"{peak:,.0f} MiB" for peak in peaks), *(f"{ratio:.3f}" for ratio in ratios)
        )
    return harness.goals_table(found, GOALS, title="The learner's algorithms"), passes


def bench(options: BenchAlgorithmsOptions) -> None:
    """Measure, print the tables, write the JSON. Raises BenchError."""
    found = measure(options, harness.reporter())
    harness.finish(options, found, tables(found))
