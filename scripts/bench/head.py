"""The chunked log-prob head against log_softmax and gather: memory, time, and equal values.

Each measurement is a process of its own, so that its peak resident memory is the head's and no
earlier run's; `python -m scripts.bench.head RUN` is one, RUN a `HeadRun` in JSON. Both heads run
alternately in one call of `compare`; ours makes the entropy too, the plain one does not.
"""

import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.runtime.process import die_with_parent
from learner.model.head import LogProbHead
from scripts.bench.harness import Processes, Report, median_ratio, scratch, status_bytes

VOCABULARY, TOKENS, HIDDEN = 151_936, 4096, 896
WARM_UP_TOKENS = 8
KEPT_ROWS = 64  # of the weight's gradient: rows of targets, the largest ones
DEADLINE_S = 900.0
_RESET_HIGH_WATER_MARK = "5"
Variant = Literal["ours", "naive"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # -> log-probs, loss


class HeadRun(msgspec.Struct, frozen=True):
    """One measurement: `file` gets log-probs and gradients, and the figures, as `.json`, beside."""

    variant: Variant
    file: str
    threads: int


def compare(repeats: int, budget_s: float, threads: int, report: Report) -> dict[str, float]:
    """Medians of alternating runs: seconds and peak bytes of each, their ratios, the largest
    differences. No further pair of runs begins once `budget_s` is spent. Peak memory is above
    weights, gradients and hidden states, which exist before. Raises RunFailed.
    """
    found: dict[Variant, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with scratch() as folder:
        files = {variant: folder / f"{variant}.safetensors" for variant in VARIANTS}
        start = time.monotonic()
        for repeat in range(repeats):
            if repeat and time.monotonic() - start > budget_s:
                break
            for variant in VARIANTS:
                report(f"head: {variant}, run {repeat + 1} of {repeats}")
                found[variant].append(measure(variant, files[variant], threads))
        differences = _differences(load_file(files["ours"]), load_file(files["naive"]))
    result = {
        f"logprob_{name}_{variant}": statistics.median(run[name] for run in found[variant])
        for name in ("peak_bytes", "cpu_s", "wall_s")
        for variant in VARIANTS
    }
    for ratio, name in (("peak_memory", "peak_bytes"), ("cpu_time", "cpu_s"), ("wall", "wall_s")):
        result[f"logprob_{ratio}_ratio"] = median_ratio(found["ours"], found["naive"], name)
    # One thread on the CPU: processor time, which other processes on the machine do not lengthen.
    clock = "cpu_time" if threads == 1 and not torch.cuda.is_available() else "wall"
    result["logprob_time_ratio"] = result[f"logprob_{clock}_ratio"]
    return result | differences | {"logprob_runs": float(len(found["ours"]))}


def measure(variant: Variant, file: Path, threads: int) -> dict[str, float]:
    """Seconds and peak bytes of a run in a process of its own. Raises RunFailed."""
    run = msgspec.json.encode(HeadRun(variant, str(file), threads)).decode()
    with Processes(file.parent) as processes:
        processes.run(f"bench_head-{variant}", "-m", "scripts.bench.head", run, limit_s=DEADLINE_S)
    return msgspec.json.decode(file.with_suffix(".json").read_bytes(), type=dict[str, float])


def _differences(ours: dict[str, Tensor], naive: dict[str, Tensor]) -> dict[str, float]:
    """Of log-probs the largest absolute difference, of gradients relative to the largest entry."""
    apart = {name: float((ours[name] - naive[name]).abs().max()) for name in ours}
    relative = [apart[name] / float(naive[name].abs().max()) for name in ("hidden", "weight")]
    return {"logprob_difference": apart["logprobs"], "gradient_difference": max(relative)}


def _ours(layer: nn.Linear) -> Step:
    head = LogProbHead(layer)

    def step(hidden: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, _, loss = head(hidden, targets, 1.0, lambda lp, part: (slopes[part] * lp).sum())
        return logprobs, loss

    return step


def _naive(layer: nn.Linear) -> Step:
    def step(hidden: Tensor, targets: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(layer(hidden), -1).gather(-1, targets.unsqueeze(-1))
        return logprobs.detach().squeeze(-1), (slopes * logprobs.squeeze(-1)).sum()

    return step


def _run(run: HeadRun, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    layer = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
    hidden = torch.randn(TOKENS, HIDDEN, device=device).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), device=device)
    slopes = torch.randn(TOKENS, device=device) / TOKENS
    step = (_ours if run.variant == "ours" else _naive)(layer)
    few = slice(WARM_UP_TOKENS)
    step(hidden[few], targets[few], slopes[few])[1].backward()  # makes both gradients' buffers
    for weight in (layer.weight, hidden):
        weight.grad.zero_()

    def work() -> tuple[Tensor, float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        logprobs, loss = step(hidden, targets, slopes)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return logprobs, time.perf_counter() - wall, time.process_time() - cpu

    (logprobs, wall, cpu), peak = peak_of(work)
    kept = layer.weight.grad[targets[:KEPT_ROWS]].clone()
    save_file({"logprobs": logprobs.clone(), "hidden": hidden.grad, "weight": kept}, run.file)
    return {"peak_bytes": peak, "wall_s": wall, "cpu_s": cpu}


def peak_of(act: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of `act(*arguments)`, and the most bytes that it needed beyond what was there. On
    an accelerator from its allocator; else of this process's resident set, whose high-water mark
    Linux lets a process reset. Not for works that overlap.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = act(*arguments)
        torch.cuda.synchronize()
        return result, float(torch.cuda.max_memory_allocated() - before)
    _trim_heap()
    Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER_MARK)
    before = status_bytes("VmRSS")
    result = act(*arguments)
    return result, float(status_bytes("VmHWM") - before)


def _trim_heap() -> None:
    # Else the work would fill memory that malloc has kept, and seem to need none.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    die_with_parent()
    given = msgspec.json.decode(sys.argv[1], type=HeadRun)
    torch.set_num_threads(given.threads)
    measured = _run(given, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    Path(given.file).with_suffix(".json").write_text(json.dumps(measured), encoding="utf-8")
