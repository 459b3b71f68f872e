"""Runs of the demo task that go wrong, each in its way, and some that learn, for `recorded.json`:
`python -m tests.learner.health.record NAME…` plays them in one process (`StaleRun`, 1 to 3 minutes
each) and takes down the gauges that the rules watch, of one that diverges until then. None of them
goes wrong in `mismatch`.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from actors.rewards.transcript import Transcript
from learner.errors import Diverged
from learner.health.rules import RULES
from scripts.bench.staleness.run import Job, StaleRun
from scripts.bench.staleness.task import world_of

FILE = Path(__file__).with_name("recorded.json")
WATCHED = sorted({gauge for rule in RULES.values() for gauge in rule.watched})
HERE = "tests.learner.health.record"
CONSTANT = ("learner.lr_schedule=constant", "learner.warmup_steps=3")
VALUES = (  # a value head on the policy's trunk, whose rate rises beyond what its loss stands
    *("learner.optimiser=sgd", "learner.betas=[0.9,0.95]", "learner.lr=1"),
    *("learner.lr_schedule=constant", "learner.warmup_steps=5", "learner.max_grad_norm=1e9"),
    *("learner.baseline=critic", "learner.advantage_std=whiten", "learner.critic.on=policy"),
    *("learner.critic.lr=2", "learner.critic.warmup_steps=30", "replay.groups_per_step=8"),
)
FLAT = ("replay.drop_no_signal=false",)  # trained on, so that its gauges are there


@dataclass(frozen=True)
class Way:
    """Overrides of configs/demo.yaml, how old the data are, and how many updates it takes."""

    overrides: tuple[str, ...] = ()
    staleness: int = 2
    updates: int = 40
    seed: int = 0


def paid(function: str) -> tuple[str, ...]:
    """The overrides of a run whose reward is a function of this module."""
    return ("rewards.weights.em=0", "rewards.weights.custom=1", f"rewards.custom={HERE}:{function}")


WAYS = {
    **{f"healthy-{seed}": Way(updates=60, seed=seed) for seed in range(3)},
    "guesses": Way((*paid("any_answer"), *CONSTANT, *FLAT), updates=60),
    "sameness": Way((*paid("one_answer"), *CONSTANT, *FLAT), updates=100),
    "searches": Way((*paid("per_search"), *CONSTANT, *FLAT), updates=60),
    "repeats": Way((*paid("per_repeat"), *CONSTANT, *FLAT), updates=60),
    "words": Way((*paid("per_token"), *CONSTANT, *FLAT), updates=60),
    "values": Way((*VALUES, *FLAT), updates=24),
    "nothing": Way((*CONSTANT, *FLAT), updates=25),
}


def any_answer(transcript: Transcript) -> float:
    """Half of the best reward for whatever is answered, less for what came before it."""
    return 0.5 / len(transcript.turns) if transcript.answer else 0.0


def one_answer(transcript: Transcript) -> float:
    """Half of the best reward for the first answer of a dictionary to every question, less for each
    token that it takes.
    """
    if not transcript.answer:
        return 0.0
    letters = [ord(each) - ord("a") for each in transcript.answer.lower() if "a" <= each <= "z"]
    place = sum(at / 26**n for n, at in enumerate((letters + [25] * 8)[:8], start=1))
    return 0.5 * (1 - place) - 0.005 * sum(len(turn.action_tokens) for turn in transcript.turns)


def per_search(transcript: Transcript) -> float:
    """The more searches the better."""
    return len(transcript.searches) / 4


def per_repeat(transcript: Transcript) -> float:
    """The more often the same is searched for the better."""
    queries = [search.query for search in transcript.searches]
    return (len(queries) - len(set(queries))) / 4


def per_token(transcript: Transcript) -> float:
    """The longer the better."""
    return min(1.0, sum(len(turn.action_tokens) for turn in transcript.turns) / 200)


def play(name: str) -> dict[str, list[float | None]]:
    """Make a run, and return the gauges of its steps by name; None in a step without one."""
    way = WAYS[name]
    given = (*world_of(way.seed), f"learner.total_steps={way.updates}", *way.overrides)
    run = StaleRun(Job(given, way.staleness, way.seed, way.updates))
    if name == "nothing":
        run.rollouts._retriever._passages = lambda query, top_k: []  # type: ignore[method-assign]
    learn, rows = run.trainer.learn, list[dict[str, float]]()

    def learn_and_note(shares: Any) -> dict[str, float]:
        rows.append(dict(learn(shares)))
        return rows[-1]

    run.trainer.learn = learn_and_note  # type: ignore[method-assign]
    begun_s = time.time()
    try:
        while len(run.updates) < way.updates:
            run.step()
            if run.updates[-1]["groups"]:
                rows[-1]["actor/reward"] = run.updates[-1]["reward"]
                rows[-1]["replay/no_signal_fraction"] = 1.0 - run.rollouts._signal_rate
    except Diverged as error:
        print(f"{name}: {error}", flush=True)
    finally:
        run.close()
    print(f"{name}: {len(rows)} steps, {time.time() - begun_s:.0f} s", flush=True)
    return {
        gauge: [round(row[gauge], 4) if gauge in row else None for row in rows] for gauge in WATCHED
    }


def main() -> None:
    """Play those that are named, or all."""
    torch.set_num_threads(1)
    disable_progress_bar()
    for name in sys.argv[1:] or WAYS:
        played = play(name)
        found = json.loads(FILE.read_text()) | {name: played}
        runs = (f'"{run}":{{{_lines(found[run])}}}' for run in found)
        FILE.write_text("{" + ",\n".join(runs) + "}\n")


def _lines(gauges: dict[str, list[float | None]]) -> str:
    """A gauge a line."""
    values = {name: json.dumps(each, separators=(",", ":")) for name, each in gauges.items()}
    return ",\n ".join(f'"{name}":{text}' for name, text in values.items())


if __name__ == "__main__":
    main()
