"""The health of runs: each sentinel's rule, and of each run how it was held against it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from learner.health.rules import RULES, Rule
from learner.health.sentinels import Noted, actions, bounds, read_notes
from scripts.view.answers import curve
from scripts.view.index import Index, Told
from scripts.view.rollouts.tokenizer import config_of
from scripts.view.rollouts.wanted import MOST_SPANS

_WHICH = {  # what a rollout has that has a rule fire
    "repeated_queries": "repeated",
    "empty_searches": "empty",
    "malformed": "malformed",
    "truncation": "limit",
}


@dataclass(frozen=True)
class _Run:
    noted: list[Noted]  # of a step that was trained again the last line
    fired: dict[str, set[int]]  # by rule: steps, also of lines that no longer count
    bounds: dict[str, float | None]
    config: Config | None


def health(index: Index) -> dict[str, Any]:
    """Each sentinel's rule, and of each run its history: values, bound, when it fired, and what to
    ask for to see the rollouts that caused it.
    """
    runs = [_known(told) for told in index.runs]
    rules = [
        {
            "name": name,
            "gauge": rule.gauge,
            "condition": rule.condition,
            "side": rule.side,
            "means": rule.means,
            "remedy": rule.remedy,
            "runs": [
                _history(name, rule, run) | {"asked": _asked(index, number, name, run)}
                for number, run in enumerate(runs)
            ],
        }
        for name, rule in RULES.items()
    ]
    return {"rules": rules}


def _known(told: Told) -> _Run:
    config, by_step = config_of(told.path), dict[int, Noted]()
    fired: dict[str, set[int]] = {name: set() for name in RULES}
    for noted in read_notes(told.path):
        by_step[noted.step] = noted
        for name in fired.keys() & noted.fired:
            fired[name].add(noted.step)
    lines = [by_step[step] for step in sorted(by_step)]
    staleness = (config or Config()).replay.max_staleness
    return _Run(lines, fired, bounds(lines, staleness), config)


def _history(name: str, rule: Rule, run: _Run) -> dict[str, Any]:
    points = [
        (each.step, each.gauges[rule.gauge]) for each in run.noted if rule.gauge in each.gauges
    ]
    return curve(points) | {
        "bound": run.bounds[name],
        "action": actions(run.config)[name] if run.config else "",
        "fired": _spans(run.fired[name]),
    }


def _asked(index: Index, number: int, name: str, run: _Run) -> dict[str, str]:
    """What selects the rollouts that had a rule fire; empty where it has not."""
    fired = _spans(run.fired[name])
    if not fired:
        return {}
    asked = {"run": str(number), "kind": "train"}
    if name == "no_signal" and (run.config or Config()).replay.drop_no_signal:
        begun, ended = _times(index, number, *fired[-1])
        return asked | {"time_from": begun, "time_to": ended, "which": "dropped"}
    steps = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in fired[-MOST_SPANS:])
    return asked | {"steps": steps} | ({"which": _WHICH[name]} if name in _WHICH else {})


def _times(index: Index, number: int, first: int, last: int) -> tuple[str, str]:
    """From when to when these steps were trained."""
    told, asked = index.runs[number], "SELECT {}(at) FROM steps WHERE run = ? AND step = ?"
    ((begun,),) = index.rows(asked.format("min"), (number, first - 1))
    ((ended,),) = index.rows(asked.format("max"), (number, last))
    return f"{begun or told.first:.3f}", f"{ended or told.last:.3f}"


def _spans(steps: Iterable[int]) -> list[list[int]]:
    """The first and the last of each run of steps."""
    found = list[list[int]]()
    for step in sorted(steps):
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found
