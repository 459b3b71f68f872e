"""A KL over the anchor's likeliest tokens in the chunked head, beside the head alone: memory, time.

Two passes as a step makes them: the anchor's, which finds its likeliest tokens, and the one that
makes the gradient. Each measurement is a process of its own, so that its peak is no earlier run's;
`python -m scripts.bench.algorithms.topk RUN` is one, RUN a `HeadRun` in JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor, nn

from configs.runtime.process import die_with_parent
from learner.algorithm import kl
from learner.model.head import Candidates, LogProbHead
from scripts.bench.harness import Processes, Report, median_ratio, scratch
from scripts.bench.head import DEADLINE_S, TOKENS, VOCABULARY, WARM_UP_TOKENS, peak_of

TOP_K = 32
HIDDEN = 64  # narrow: a wide head's own gradient would hide what comes on top
MOVED = 0.9  # the factor that sets the policy's weights apart from its anchor's
PASSES = ("score", "gradient")
Result = TypeVar("Result")


class Size(msgspec.Struct, frozen=True):
    """The head's work."""

    vocabulary: int = VOCABULARY
    tokens: int = TOKENS
    hidden: int = HIDDEN


class HeadRun(msgspec.Struct, frozen=True):
    """One measurement, whose figures `file` gets; `top_k` 0: the head alone."""

    top_k: int
    file: str
    threads: int
    size: Size = Size()


class Work:
    """Both passes of one head over the same tokens."""

    def __init__(self, run: HeadRun, device: torch.device) -> None:
        torch.manual_seed(0)
        size, self._top_k = run.size, run.top_k
        self._layer = nn.Linear(size.hidden, size.vocabulary, bias=False, device=device)
        self._head = LogProbHead(self._layer)
        self._hidden = torch.randn(size.tokens, size.hidden, device=device).requires_grad_()
        self._targets = torch.randint(size.vocabulary, (size.tokens,), device=device)
        self._slopes = torch.randn(size.tokens, device=device) / size.tokens

    def score(self, part: slice = slice(None)) -> tuple[Tensor, Candidates | None]:
        """The log-probs under the anchor, with its likeliest tokens where there is a top-k."""
        hidden, targets = self._hidden[part], self._targets[part]
        k, device = self._top_k, hidden.device
        found = Candidates.room(len(hidden), k, device) if k else None
        with torch.no_grad():
            logprobs, _, _ = self._head(hidden, targets, 1.0, likeliest=found)
        return logprobs, found

    def gradient(
        self, reference: Tensor, found: Candidates | None, part: slice = slice(None)
    ) -> None:
        """Add the gradient of a policy's loss and, with a top-k, of the KL."""
        hidden, targets, slopes = self._hidden[part], self._targets[part], self._slopes[part]
        if found is None:
            value = self._head(hidden, targets, 1.0, lambda lp, own: (slopes[own] * lp).sum())[2]
            value.backward()
            return
        topk = kl.TopK(found.logprobs, (found.ids != targets.unsqueeze(-1)).all(-1))

        def loss(logprobs: Tensor, chunk: slice) -> Tensor:
            parts = topk.part(chunk).parts(logprobs, reference[chunk])
            return (slopes[chunk] * (logprobs[:, 0] + parts.head + parts.tail)).sum()

        table = torch.cat([targets.unsqueeze(-1), found.ids.to(targets)], -1)
        self._head(hidden, table, 1.0, loss)[2].backward()

    def warm_up(self) -> None:
        """Make the buffers of both gradients, and clear these."""
        few = slice(WARM_UP_TOKENS)
        self.gradient(*self.score(few), few)
        for weight in (self._layer.weight, self._hidden):
            assert weight.grad is not None
            weight.grad.zero_()

    def move(self) -> None:
        """Set the policy apart from its anchor."""
        self._layer.weight.data.mul_(MOVED)


def compare(
    repeats: int, threads: int, report: Report, *, top_k: int = TOP_K, size: Size | None = None
) -> dict[str, float]:
    """Medians of alternating runs: of either pass the ratios of memory and of time to the head
    alone; `topk_memory_over_head` is that of the dearer pass. Raises RunFailed.
    """
    found: dict[int, list[dict[str, float]]] = {top_k: [], 0: []}
    with scratch() as folder:
        for repeat in range(repeats):
            for k, runs in found.items():
                told = f"the KL over {k} tokens" if k else "the head alone"
                report(f"{told}, run {repeat + 1} of {repeats}")
                runs.append(measure(HeadRun(k, str(folder / f"{k}.json"), threads, size or Size())))
    clock = "cpu" if threads == 1 and not torch.cuda.is_available() else "wall"
    result: dict[str, float] = {}
    for each in PASSES:
        for name, figure in (("memory", "bytes"), ("time", f"{clock}_s")):
            ratio = median_ratio(found[top_k], found[0], f"{each}_{figure}")
            result[f"topk_{each}_{name}_over_head"] = ratio
        for k, name in ((top_k, "topk"), (0, "head")):
            size_of = [run[f"{each}_bytes"] for run in found[k]]
            result[f"{name}_{each}_peak_bytes"] = statistics.median(size_of)
    dearest = max(result[f"topk_{each}_memory_over_head"] for each in PASSES)
    return {"topk_memory_over_head": dearest} | result


def measure(run: HeadRun) -> dict[str, float]:
    """Seconds and peak bytes of a run in a process of its own. Raises RunFailed."""
    file = Path(run.file)
    given = msgspec.json.encode(run).decode()
    with Processes(file.parent) as processes:
        module = "scripts.bench.algorithms.topk"
        processes.run(f"bench_topk-{run.top_k}", "-m", module, given, limit_s=DEADLINE_S)
    return msgspec.json.decode(file.read_bytes(), type=dict[str, float])


def take(run: HeadRun, device: torch.device) -> dict[str, float]:
    """Both passes in this process. What the first finds lies there through the second, and counts
    as its memory too.
    """
    work = Work(run, device)
    work.warm_up()
    figures: dict[str, float] = {}
    reference, found = _weighed("score", work.score, figures)
    work.move()
    _weighed("gradient", lambda: work.gradient(reference, found), figures)
    figures["gradient_bytes"] += sum(each.nbytes for each in found or ())
    return figures


def _weighed(name: str, act: Callable[[], Result], figures: dict[str, float]) -> Result:
    """The result of `act`; its seconds and its peak join the figures."""

    def timed() -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        figures[f"{name}_wall_s"] = time.perf_counter() - wall
        figures[f"{name}_cpu_s"] = time.process_time() - cpu
        return result

    result: Result
    result, figures[f"{name}_bytes"] = peak_of(timed)
    return result


if __name__ == "__main__":
    die_with_parent()
    asked = msgspec.json.decode(sys.argv[1], type=HeadRun)
    torch.set_num_threads(asked.threads)
    measured = take(asked, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    Path(asked.file).write_text(json.dumps(measured), encoding="utf-8")
