"""What the algorithms come to: exact match of whole runs of the demo; and the size of an adapter.

Each run is `forage demo` with an algorithm's settings and nothing else beside it, for as many steps
as the demo takes.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from configs.load import load, parse
from configs.runtime.process import REPOSITORY
from scripts.bench.harness import Processes, Report, Rows, digest_of, scratch, sources
from scripts.setup.model_size import model_of_shape, sent_elements

SEEDS = (0, 1, 2)
RANK = 8
ADAPTED = (f"learner.lora.rank={RANK}", "learner.lr=2e-3")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),  # configs/demo.yaml as it stands
    "ppo": (
        "learner.baseline=critic",
        "learner.advantage_std=whiten",
        "learner.critic.lr=1e-3",
        "learner.critic.updates=2",
    ),
    "lora": ADAPTED,
}
SMOLLM2_135M = {  # the config.json of HuggingFaceTB/SmolLM2-135M, as far as its size goes
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
TOLD_EVERY_S = 30.0
DEADLINE_S = 1800.0  # of a run of the demo, alone 150 to 250 s
USED = ("actors", "learner", "replay", "retrieval_server", "weight_sync", "scripts.demo")
METHOD = {
    "grpo_em, ppo_em, lora_em": "greedy exact match of the demo's last evaluation, the worst seed",
    "lora_em_gap": f"the whole model's less that of {' '.join(ADAPTED)}, in as many steps, worst",
    "lora_sync_bytes_share": f"bytes of an adapter of rank {RANK} on every linear layer over those "
    "of the model, in one dtype, on SmolLM2-135M's shape: calculated",
}
Row = dict[str, Any]


def sync_bytes_share() -> float:
    """Bytes of a version that is an adapter over those of one that is the model, on SmolLM2."""
    model, config = model_of_shape(SMOLLM2_135M), parse("", ADAPTED, "the benchmark")
    return sum(sent_elements(config, model)) / model.parameters


def measure(
    seeds: Iterable[int],
    folder: Path,
    minutes: float,
    report: Report,
    demo: Callable[[int, Sequence[str]], Row] | None = None,
) -> tuple[list[Row], list[str]]:
    """A row a run, those on file first of all, more until the time is over; what is left, by name.
    Raises RunFailed.
    """
    rows, end_s = Rows(folder, digest_of(sources(*USED))), time.monotonic() + 60.0 * minutes
    made, left = [], []
    for seed in seeds:
        for name, overrides in ALGORITHMS.items():
            told, key = f"{name}, seed {seed}", [seed, _settings(overrides)]
            if rows.kept(key) is None:
                if time.monotonic() > end_s:
                    left.append(told)
                    continue
                report(f"the demo by {told}")
            found = rows.get(key, partial(demo or partial(run_demo, report), seed, overrides))
            made.append({"algorithm": name, "seed": seed} | found)
    return made, left


def _settings(overrides: Sequence[str]) -> Any:
    """The whole configuration, as a key of rows."""
    return msgspec.to_builtins(load(REPOSITORY / "configs" / "demo.yaml", overrides))


@dataclass
class Progress:
    """Reports now and then which step the console of a run told last."""

    console: Path
    report: Report
    due_s: float = field(default_factory=lambda: time.monotonic() + TOLD_EVERY_S)

    def __call__(self) -> bool:
        """Report it if it is time; False: only the run itself knows its end."""
        if time.monotonic() >= self.due_s:
            self.due_s = time.monotonic() + TOLD_EVERY_S
            lines = self.console.read_text(errors="replace").splitlines()
            told = [line for line in lines if line.startswith("step ")]
            self.report(" ".join(told[-1].split()[:4]) if told else "no step yet")
        return False


def run_demo(report: Report, seed: int, overrides: Sequence[str]) -> Row:
    """The figures of a run of the demo. Raises RunFailed."""
    with scratch() as folder, Processes(folder) as processes:
        run = folder / "run"
        words = ("-m", "scripts.cli", "demo", "--seed", str(seed), f"run_dir={run}", *overrides)
        processes.start("demo", *words)
        processes.wait(["demo"], DEADLINE_S, Progress(folder / "demo.log", report))
        summary = json.loads((run / "summary.json").read_bytes())
    names = ("em_final", "sampled_em_final", "steps", "wall_s", "token_mismatches")
    return {name: summary[name] for name in names}


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Of each algorithm `NAME_em`, its worst seed's; `lora_em_gap`, what the adapter has less than
    the whole model, the worst of the seeds that have both. None where no run is there.
    """
    rows = list(rows)
    em = {
        name: {row["seed"]: float(row["em_final"]) for row in rows if row["algorithm"] == name}
        for name in ALGORITHMS
    }
    both = sorted(em["grpo"].keys() & em["lora"].keys())
    gaps = [em["grpo"][seed] - em["lora"][seed] for seed in both]
    worst = {f"{name}_em": min(found.values(), default=None) for name, found in em.items()}
    adapter = {
        "lora_em_gap": max(gaps, default=None),
        "lora_sync_bytes_share": sync_bytes_share(),
    }
    return {**worst, **adapter, "learning": rows}


def make_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A line a run."""
    table = Table(title="The demo by algorithm: exact match at the end")
    for name in ("algorithm", "seed", "steps", "EM", "sampled", "seconds"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in rows:
        table.add_row(
            row["algorithm"],
            str(row["seed"]),
            str(row["steps"]),
            f"{row['em_final']:.3f}",
            f"{row['sampled_em_final']:.3f}",
            f"{row['wall_s']:.0f}",
        )
    return table
