"""Adapters beside the whole model: the bytes of a version, and exact match on the demo."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from configs.load import parse
from scripts.bench.harness import Processes, Report, scratch
from scripts.setup.model_size import model_of_shape, sent_elements

RANK = 8
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
ADAPTED = (f"learner.lora.rank={RANK}", "learner.lr=2e-3")  # on the demo; else its own settings
DEADLINE_S = 1200.0  # of a run of the demo, alone 150 s


def sync_bytes_share() -> float:
    """Bytes of a version that is an adapter over those of one that is the model, on SmolLM2."""
    model, config = model_of_shape(SMOLLM2_135M), parse("", ADAPTED, "the benchmark")
    return sum(sent_elements(config, model)) / model.parameters


def em_gap(seeds: Iterable[int], report: Report) -> dict[str, float]:
    """Exact match of the demo's last evaluation, trained whole and by an adapter, and how much less
    the adapter has; means over seeds. Raises RunFailed.
    """
    found: dict[str, list[float]] = {"full_em": [], "lora_em": []}
    for seed in seeds:
        for name, overrides in (("full_em", ()), ("lora_em", ADAPTED)):
            found[name].append(em := _demo(seed, overrides))
            report(f"seed {seed}: {name} {em:.3f}")
    means = {name: statistics.mean(each) for name, each in found.items()}
    return means | {"lora_em_gap": means["full_em"] - means["lora_em"]}


def _demo(seed: int, overrides: Iterable[str]) -> float:
    with scratch() as folder, Processes(folder) as processes:
        run = folder / "run"
        words = ("-m", "scripts.cli", "demo", "--seed", str(seed), f"run_dir={run}", *overrides)
        processes.run("demo", *words, limit_s=DEADLINE_S)
        return _final(run)


def _final(run: Path) -> float:
    summary = json.loads((run / "summary.json").read_text())
    em: float = summary["em_final"]
    return em
