"""The cost of the learner's step: `forage bench learner [--quick] [--model FOLDER] [--json FILE]`.

The log-prob head against the plain computation (`scripts.bench.head`), how full micro-batches are,
and the whole update, with its parts, against a bare forward and backward pass of the same
micro-batches in plain torch, after a no-grad pass where the update has a proximal one. With a
model's folder, the update of that model alone: as `configs/wiki.yaml` trains it, on random tokens
in the wiki task's shape, a new batch for each update; and the pace of the last updates over that of
the first.
"""

import dataclasses
import functools
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging

from configs.load import load
from configs.runtime.amx import use_amx_where_it_works
from configs.runtime.files import MOST_IDS
from configs.runtime.process import Exit
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import TrainingBatch, build
from learner.model.ema import Averages
from learner.model.engine import Engine
from learner.model.scorer import load_model
from learner.packing import MicroBatch
from learner.update import update
from replay.codec import encode_trajectory
from replay.protocol import Batch
from replay.trajectory import Sampling, StopReason, TokenSequence, Trajectory, Turn
from scripts.bench import harness
from scripts.bench.head import VARIANTS, compare, peak_of
from scripts.command.options import option
from scripts.demo.start import Recipe, make_model
from scripts.demo.tokenizer import VOCABULARY as WORDS
from scripts.setup.model_size import known_model
from scripts.wiki.pipeline.settings import CONFIG, FLOAT32, SLOW, is_slow, lacks_bf16

SIBLINGS = 8
BUDGETS_TOKENS = (1024, 4096, 16384)
EXACT = {"logprob_difference": harness.at_most(1e-5), "gradient_difference": harness.at_most(1e-5)}
GOALS: dict[str, harness.Goal] = {
    "logprob_peak_memory_ratio": harness.at_most(0.15),
    "logprob_time_ratio": harness.at_most(1.3),
    **EXACT,
    "microbatch_fill": harness.at_least(0.9),
    "update_over_bare": harness.at_least(0.8),
}
GOALS_OF_MODEL = {
    "update_over_bare": harness.at_least(0.85),
    "last_over_first": harness.at_least(0.9),
}
UPDATES, QUICK_UPDATES = 12, 2  # of a model
COMPARED = 2  # updates at each end whose pace `last_over_first` compares, where there are more
PARTS = {"score": "proximal pass", "accumulate": "forward + backward", "step": "optimiser step"}


@dataclass(frozen=True)
class BenchLearnerOptions(harness.BenchOptions):
    """Options of `forage bench learner`; `quick` takes at most ten minutes."""

    threads: int | None = option(
        "threads of torch, on the CPU (default 1; with --model: 2)", metavar="N", least=1
    )
    model: Path | None = option(
        "measure only the update of this model folder, with configs/wiki.yaml's settings: "
        f"{UPDATES} updates (quick: {QUICK_UPDATES}, too few for last_over_first), of 135 million "
        "parameters half an hour on two cores",
        metavar="FOLDER",
    )

    @property
    def at_once(self) -> int:
        """The threads that it computes with."""
        return self.threads or (load(CONFIG).learner.threads if self.model else 1)


def now() -> float:
    """Seconds by the wall clock, once the accelerator, if there is one, has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(act: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of `act(*arguments)`, and how long it took."""
    start = now()
    return act(*arguments), now() - start


class Watch:
    """Stands in for an object and measures some methods; `join` adds up several calls."""

    def __init__(
        self,
        watched: Any,
        names: dict[str, str],
        found: dict[str, float],
        probe: Callable[..., tuple[Any, float]] = seconds_of,
        join: Callable[[float, float], float] = operator.add,
    ) -> None:
        self._watched, self._names, self._found = watched, names, found
        self._probe, self._join = probe, join

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watched, name)
        if name not in self._names:
            return found

        def measured(*arguments: Any, **named: Any) -> Any:
            result, amount = self._probe(functools.partial(found, **named), *arguments)
            part = self._names[name]
            self._found[part] = self._join(self._found.get(part, 0.0), amount)
            return result

        return measured


@dataclass(frozen=True)
class Shape:
    """The work of a step; lengths in tokens, each below its second number."""

    groups: int
    prompt: tuple[int, int]
    action: tuple[int, int]
    observation: tuple[int, int]
    vocabulary: int


DEMO = Shape(16, prompt=(9, 16), action=(11, 25), observation=(9, 26), vocabulary=len(WORDS))
WIKI = Shape(4, prompt=(105, 120), action=(16, 34), observation=(190, 215), vocabulary=49_152)


def rollout(rng: np.random.Generator, shape: Shape, group: int, sibling: int) -> Trajectory:
    """Random tokens in that shape: one search in even groups, two in odd ones."""

    def draw(bounds: tuple[int, int]) -> Any:
        return rng.integers(3, shape.vocabulary, int(rng.integers(*bounds)), dtype=np.int32)

    turns = []
    searches = 1 + group % 2
    for turn in range(searches + 1):
        action = draw(shape.action)
        observation = draw(shape.observation) if turn < searches else np.empty(0, np.int32)
        behaviour = (-2.0 * rng.random(len(action))).astype(np.float32)
        turns.append(Turn(action, behaviour, np.zeros(len(action), np.int32), observation))
    return Trajectory(
        group_id=group,
        sibling=sibling,
        question_id=f"q{group}",
        kind="train",
        actor_id="bench",
        sampling=Sampling(temperature=1.0),
        sequences=(TokenSequence(draw(shape.prompt), tuple(turns)),),
        stop_reason=StopReason.ANSWERED,
        answer="x",
        reward=float(sibling % 2),
    )


def random_batch(shape: Shape, seed: int = 0) -> Batch:
    """A batch of step 1, the same at every call with this seed."""
    rng = np.random.default_rng(seed)
    ids = tuple(range(1, shape.groups + 1))
    groups = tuple(
        tuple(encode_trajectory(rollout(rng, shape, group, sibling)) for sibling in range(SIBLINGS))
        for group in ids
    )
    return Batch(1, ids, (0,) * shape.groups, groups, {}, {}, ())


def bare_pass(model: PreTrainedModel, micro: MicroBatch) -> torch.Tensor:
    """float[N]: log-probs of the action tokens, by log_softmax over their whole logits."""
    hidden = model.base_model(input_ids=micro.tokens, use_cache=False).last_hidden_state
    predicts = micro.loss_mask[:, 1:]
    log_probabilities = torch.log_softmax(model.lm_head(hidden[:, :-1][predicts]), -1)
    targets = micro.tokens[:, 1:][predicts].unsqueeze(-1)
    return log_probabilities.gather(-1, targets).squeeze(-1)


def bare(model: PreTrainedModel, micro_batches: list[MicroBatch], scored: bool) -> None:
    """Forward and backward over the micro-batches, with `scored` a no-grad pass before; no
    optimiser.
    """
    with torch.no_grad():
        for micro in micro_batches if scored else ():
            bare_pass(model, micro)
    for micro in micro_batches:
        slopes = micro.advantages[micro.loss_mask] * micro.coefficients[micro.rows]
        (slopes * bare_pass(model, micro)).sum().backward()
    model.zero_grad()


def measure_update(
    config: Config, batches: Sequence[TrainingBatch], report: harness.Report = lambda _: None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Of update(), its parts and the bare passes: tokens/s by batch (the first only warms up), and
    the peak bytes on the last batch.
    """
    engine, learner = Engine(config), config.learner
    averages = Averages.begin(engine, learner)
    model, scored = load_model(config.model).to(engine.device), averages.proximal is not None
    rates: dict[str, list[float]] = defaultdict(list)
    for number, training in enumerate(batches):
        report(f"update {number} of {len(batches) - 1}" if number else "warm-up")
        tokens = training.gauges["learner/tokens"]
        micro_batches = [micro.to(engine.device) for micro in training.micro_batches]
        parts: dict[str, float] = {}
        timed: Any = Watch(engine, PARTS, parts)
        timed_averages: Any = Watch(averages, {"update": "EMA"}, parts)
        _, whole = seconds_of(update, timed, timed_averages, training, learner)
        _, plain = seconds_of(bare, model, micro_batches, scored)
        if not number:
            continue  # warm-up
        parts["the rest: swaps, loss terms, gauges"] = whole - sum(parts.values())
        parts |= {"whole update": whole, "bare passes": plain}
        for name, seconds in parts.items():
            rates[name].append(tokens / seconds)
    report("peak memory")
    peaks: dict[str, float] = {}
    weighed: Any = Watch(engine, PARTS, peaks, peak_of, max)
    weighed_averages: Any = Watch(averages, {"update": "EMA"}, peaks, peak_of, max)
    update(weighed, weighed_averages, training, learner)
    peaks["whole update"] = peak_of(update, engine, averages, training, learner)[1]
    peaks["bare passes"] = peak_of(bare, model, micro_batches, scored)[1]
    engine.close()
    return rates, peaks


def medians(rates: dict[str, list[float]]) -> dict[str, Any]:
    """`tokens_per_s`: each part's median; `update_over_bare`: the median, batch by batch, of the
    whole update's pace over that of the bare passes.
    """
    pairs = zip(rates["whole update"], rates["bare passes"], strict=True)
    return {
        "update_over_bare": statistics.median(whole / plain for whole, plain in pairs),
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
    }


def last_over_first(rates: Sequence[float]) -> float | None:
    """The mean of the last ones over that of the first; None where there are too few."""
    if len(rates) <= 2 * COMPARED:
        return None
    return statistics.mean(rates[-COMPARED:]) / statistics.mean(rates[:COMPARED])


def measure(options: BenchLearnerOptions, report: harness.Report) -> dict[str, Any]:
    """All figures; the update first, because it takes seconds. Raises RunFailed."""
    found: dict[str, Any] = {}
    with harness.scratch() as folder:
        torch.manual_seed(0)
        make_model(Recipe()).save_pretrained(folder)
        learner = LearnerConfig(lr=1e-4, warmup_steps=0, threads=options.at_once)
        config = Config(model=ModelConfig(path=str(folder), dtype="float32"), learner=learner)
        batch = random_batch(DEMO)
        report("micro-batches and update")
        found["microbatch_fill_by_budget"] = {
            budget: build(batch, given, vocabulary=MOST_IDS).gauges["learner/fill"]
            for budget in BUDGETS_TOKENS
            for given in [LearnerConfig(micro_batch_tokens=budget)]
        }
        training = build(batch, learner, vocabulary=MOST_IDS)
        rates, peaks = measure_update(config, [training] * (6 if options.quick else 21))
    found |= medians(rates) | {"peak_bytes": peaks}
    found["microbatch_fill"] = training.gauges["learner/fill"]
    repeats, budget_s = (2, 200.0) if options.quick else (5, 1500.0)
    found |= compare(repeats, budget_s, options.at_once, report)
    found["method"] = {
        "update_over_bare": "tokens/s of update() over bare passes; proximal pass in both",
        "peak_memory": "above weights, gradients and hidden states; a process each, peak "
        + ("torch.cuda.max_memory_allocated" if torch.cuda.is_available() else "resident set"),
        "time": "forward + backward, processor time on one CPU thread, else wall clock",
        "threads": options.at_once,
        "update_model": "the demo's: " + str(Recipe().hidden) + " hidden, fp32",
    }
    return found


def measure_model(
    options: BenchLearnerOptions, folder: Path, report: harness.Report
) -> dict[str, Any]:
    """The update of the model in `folder`, with the wiki task's settings. Raises BadModel."""
    config = load(CONFIG, [f"model.path={folder}", *(FLOAT32 if lacks_bf16() else ())])
    if is_slow(config):
        print(SLOW, flush=True)
    shape = dataclasses.replace(WIKI, vocabulary=known_model(folder).vocabulary or WIKI.vocabulary)
    updates = QUICK_UPDATES if options.quick else UPDATES
    batches = [
        build(random_batch(shape, seed), config.learner, vocabulary=MOST_IDS)
        for seed in range(updates + 1)
    ]
    tokens = [batch.gauges["learner/tokens"] for batch in batches]
    report(f"{updates} updates of {folder}, of {min(tokens):,.0f} to {max(tokens):,.0f} tokens")
    rates, peaks = measure_update(config, batches, report)
    return medians(rates) | {
        "last_over_first": last_over_first(rates["whole update"]),
        "bare_last_over_first": last_over_first(rates["bare passes"]),
        "microbatch_fill": statistics.mean(batch.gauges["learner/fill"] for batch in batches),
        "tokens_per_s_by_update": rates["whole update"],
        "peak_bytes": peaks,
        "method": {
            "update_over_bare": "tokens/s of update() over bare passes of the same model; a "
            f"proximal pass in {'both' if config.learner.centre == 'ema' else 'neither'}",
            "last_over_first": f"tokens/s of the last {COMPARED} updates over the first "
            f"{COMPARED}, each of a batch of its own, with its bare passes between them; "
            "bare_…: of those",
            "threads": options.at_once,
            "update_model": f"{folder}, {config.model.dtype}",
        },
    }


def tables(found: dict[str, Any]) -> tuple[Table, Table]:
    """The goals, and the parts of the update."""
    whole = "logprob_time_ratio" in found
    goals = harness.goals_table(
        found, GOALS if whole else GOALS_OF_MODEL, title="The learner's step"
    )
    for variant in VARIANTS if whole else ():
        peak = found[f"logprob_peak_bytes_{variant}"] / 2**20
        cpu, wall = found[f"logprob_cpu_s_{variant}"], found[f"logprob_wall_s_{variant}"]
        goals.add_row(f"head, {variant}", f"{peak:,.0f} MiB", f"{cpu:.1f} s CPU, {wall:.1f} s", "")
    title = f"Update ({found['method']['update_over_bare']})"
    parts = Table("part", "tokens/s", "peak MiB above what it found", title=title)
    for name, rate in found["tokens_per_s"].items():
        peak = found["peak_bytes"].get(name)
        parts.add_row(name, f"{rate:,.0f}", "" if peak is None else f"{peak / 2**20:,.0f}")
    return goals, parts


def bench(options: BenchLearnerOptions) -> int:
    """Measure, print the tables, write the JSON; failed where values differ from the plain ones."""
    logging.disable_progress_bar()
    use_amx_where_it_works()  # oneDNN asks at its first product
    torch.set_num_threads(options.at_once)
    report = harness.reporter()
    if options.model:
        found = measure_model(options, options.model, report)
    else:
        found = measure(options, report)
    harness.finish(options, found, tables(found))
    exact = all(goal.met(found[name]) for name, goal in EXACT.items() if name in found)
    return Exit.DONE if exact else Exit.FAILED
