"""What a run's own log tells: its learning curve, and the same rollouts before and after."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rewards.scorer import evaluated
from replay.log.records import Record
from replay.trajectory import Question, Trajectory
from scripts.runs.show import Shown, load_tokenizer
from scripts.runs.summary import RunFold

SHOWN = 3  # questions
Words = Callable[[NDArray[np.int32]], str]


def curve(log: Iterable[Record]) -> dict[str, Any]:
    """The mean reward of the rollouts that came in before each step, and the run's evaluations."""
    fold = RunFold(log)
    reward = {step: gauges.get("actor/reward") for step, gauges in sorted(fold.reports.items())}
    known = {step: value for step, value in reward.items() if step and value is not None}
    return {
        "step": list(known),
        "reward": [round(value, 4) for value in known.values()],
        "evaluated": [
            {
                "step": step,
                "em": round(result.em, 4),
                "sampled_em": None if result.sampled_em is None else round(result.sampled_em, 4),
                "questions": result.questions,
            }
            for step, result in sorted(fold.evaluations.items())
        ],
    }


def first_of_each(kinds: Iterable[tuple[str, str]], count: int = SHOWN) -> list[str]:
    """The ids of the first question of each of the first kinds, in the order of the file."""
    found: dict[str, str] = {}
    for id, kind in kinds:
        found.setdefault(kind, id)
    return list(found.values())[:count]


def reader(model: Path) -> Words:
    """A function from tokens to text. Raises ConfigError."""
    tokenizer = load_tokenizer(str(model))

    def words(tokens: NDArray[np.int32]) -> str:
        text: str = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    return words


def before_and_after(
    rollouts: Iterable[Shown], ids: Sequence[str], last: int, words: Words
) -> list[dict[str, Any]]:
    """Of a run's rollouts, the greedy ones of these questions by its first and its last version, as
    text. What the log no longer holds is left out.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    names = {(0, 0): "before", (last, last): "after"}
    for question, trajectory, _ in rollouts:
        when = names.get(trajectory.version_span)
        greedy = trajectory.kind == "eval" and not trajectory.sampling.temperature
        if when and greedy and question.id in ids:
            found[question.id, when] = _told(question, trajectory, when, words)
    return [found[id, when] for id in ids for when in names.values() if (id, when) in found]


def _told(question: Question, trajectory: Trajectory, when: str, words: Words) -> dict[str, Any]:
    return {
        "id": question.id,
        "question": question.text,
        "gold": list(question.answers),
        "when": when,
        "turns": [
            {
                "action": words(turn.action_tokens),
                "observation": words(turn.observation_tokens),
                "malformed": turn.malformed,
            }
            for turn in trajectory.turns
        ],
        "answer": trajectory.answer,
        "em": evaluated(trajectory.answer, question.answers)["em"],
        "stop": trajectory.stop_reason.value,
    }


def page(shown: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """The rollouts of each seed as a page of Markdown."""
    lines, heading = ["# Greedy rollouts before and after training", ""], None
    for seed, each in shown:
        if heading != (seed, each["id"]):
            heading = seed, each["id"]
            lines += [f"## Seed {seed}, {each['id']}: {each['question']}", ""]
            lines += [f"Accepted: {' | '.join(each['gold'])}", ""]
        ending = "no answer" if each["answer"] is None else f"answered {each['answer']!r}"
        verdict = "right" if each["em"] == 1.0 else "wrong"
        lines += [f"**{each['when'].capitalize()}**: {ending}, {verdict} ({each['stop']})", ""]
        for turn in each["turns"]:
            lines += [f"    {line}" for line in turn["action"].splitlines()]
            lines += [f"    > {line}" for line in turn["observation"].splitlines() if line.strip()]
        lines.append("")
    return "\n".join(lines)
