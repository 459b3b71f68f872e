"""The answers to the pages' questions, as JSON: runs, curves, rollouts."""

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from configs.load import ConfigError
from configs.schema import ActorsConfig, Config
from learner.health.tokens import file_of
from replay.codec import decode_trajectory
from replay.protocol import ReplayError
from replay.trajectory import TokenSequence, Trajectory, Turn
from scripts.command.terminal import clean
from scripts.runs.runs import names_of, state_of
from scripts.view.following import payload_of
from scripts.view.index import Index, Told
from scripts.view.rollouts.passages import Passages
from scripts.view.rollouts.tokenizer import config_of, tokenizer_of
from scripts.view.rollouts.tokens import Values, values_of
from scripts.view.rollouts.written import written_by
from scripts.view.wait_graph import wait_graph

MOST_EVENTS = 2000  # of a run; the newest
MOST_TEXT = 100_000  # characters of one piece of a rollout, and tokens of one that are read
MOST_TOKENS = 20_000  # of a turn
MOST_CAUSE = 300  # characters of a file's fault
MOST_STEPS = 5000  # of a curve: longer ones are thinned


def overview(index: Index) -> dict[str, Any]:
    """All runs: what they are, where they stand, evaluations, events, and the gauges they have."""
    names = names_of([told.path for told in index.runs])
    runs = [_run(index, number, name) for number, name in enumerate(names)]
    gauges, stops = index.known()
    return {"runs": runs, "gauges": gauges, "stops": stops}


def curves(index: Index, names: Sequence[str]) -> dict[str, Any]:
    """Each gauge's steps and values, by name and run."""
    found: dict[str, list[dict[str, list[Any]]]] = {}
    for name in names:
        found[name] = []
        for run in range(len(index.runs)):
            points = index.rows(
                "SELECT step, value FROM gauges WHERE name = ? AND run = ? ORDER BY step",
                (name, run),
            )
            found[name].append(curve(points))
    return found


def curve(points: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Steps and values; of very many some."""
    points = points[:: math.ceil(len(points) / MOST_STEPS) or 1]
    return {"steps": [step for step, _ in points], "values": [value for _, value in points]}


def waiting(index: Index, run: int) -> dict[str, Any]:
    """Who waits for whom in a run now. Raises ConfigError."""
    if not 0 <= run < len(index.runs):
        raise ConfigError(f"run {run}: there is no such run")
    told = index.runs[run]
    return wait_graph(index, told, config_of(told.path))


def rollout(index: Index, run: int, number: int) -> dict[str, Any]:
    """One rollout's tokens as text, with what is known of each. Raises ConfigError, ReplayError."""
    if not 0 <= run < len(index.runs):
        raise ConfigError(f"run {run}: there is no such run")
    found = index.rows(
        "SELECT segment, place, kind, step FROM rollouts WHERE run = ? AND number = ?",
        (run, number),
    )
    if not found:
        raise ConfigError(f"record {number}: there is no such rollout in this run")
    told, (segment, place, kind, step) = index.runs[run], found[0]
    payload = payload_of(told.follower.path, number, segment, place)
    if not payload:
        return {"gone": "its tokens were compacted away (replay.keep, forage compact)"}
    trajectory = decode_trajectory(payload)
    tokenizer, lacks = tokenizer_of(told.path)
    trained = kind == "train" and step is not None  # nothing else is scored by the learner
    learnt, unknown = _learnt(told.path, step, trajectory) if trained else ([], "")
    config = config_of(told.path)
    passages = Passages((config.actors if config else ActorsConfig()).passage_template)
    sequences = [_sequence(each, tokenizer, passages) for each in trajectory.sequences]
    for shown, values in zip(sequences, learnt, strict=False):
        _add(shown["turns"], values)
    return {
        "lacks": clean(lacks),
        "unknown": clean(unknown)[:MOST_CAUSE],
        "parts": {clean(name): part for name, part in trajectory.reward_parts.items()},
        "cause": _cut(clean(trajectory.reward_cause)),
        "timings": {clean(name): seconds for name, seconds in trajectory.timings.items()},
        "actor": clean(trajectory.actor_id),
        "attempt": trajectory.attempt,
        "sequences": sequences,
    }


def _run(index: Index, number: int, name: str) -> dict[str, Any]:
    told = index.runs[number]
    follower, config = told.follower, config_of(told.path)
    evaluations = index.rows(
        "SELECT step, at, result FROM evaluations WHERE run = ? ORDER BY step", (number,)
    )
    events = index.rows(
        "SELECT at, step, kind, said FROM events WHERE run = ? AND kind != 'group' "
        "ORDER BY number DESC LIMIT ?",
        (number, MOST_EVENTS),
    )
    state, damage = state_and_damage(told)
    told_of = "SELECT count(*) FROM events WHERE run = ? AND kind != 'group'"
    return {
        "name": clean(name),
        "path": clean(str(told.path)),
        "state": state,
        "damage": damage,
        "trouble": clean(told.trouble),
        "read": follower.read,
        "size": follower.size,
        "records": told.records,
        "step": told.step,
        "steps": config.learner.total_steps if config else 0,
        "model": clean(config.model.path) if config else "",
        "forecast": _forecast(told, config),
        "objective": config.learner.objective if config else "",
        "environment": clean(config.environment.name) if config else "",
        "stopped": told.stopped,
        "first": told.first,
        "last": told.last,
        "evaluations": [
            {"step": s, "at": at, **json.loads(result)} for s, at, result in evaluations
        ],
        "events": [
            {"at": at, "step": step, "kind": kind, "said": said} for at, step, kind, said in events
        ],
        "happened": index.rows(told_of, (number,))[0][0],
    }


def _learnt(run: Path, step: int, trajectory: Trajectory) -> tuple[list[Values], str]:
    """What the learner made of the tokens of each sequence, or why that is not known."""
    counts = [sum(len(t.action_tokens) for t in each.turns) for each in trajectory.sequences]
    name = f"tokens/{file_of(run, step).name}"
    try:
        found = values_of(run, step, (trajectory.group_id, trajectory.sibling), counts)
    except (OSError, ValueError) as error:
        return [], f"{name} cannot be read: {error}"
    if found is None:
        return [], f"there is no {name} (view.keep_steps)"
    return found, ""


def _add(turns: Sequence[dict[str, Any]], values: Values) -> None:
    """Give each turn the values of its tokens."""
    first = 0
    for turn in turns:
        last = first + len(turn["tokens"])
        turn["learnt"] = {
            name: each[first:last].tolist() if name == "fate" else _figures(each[first:last])
            for name, each in values.items()
        }
        first = last + turn["left"]


def _figures(values: NDArray[np.floating[Any]]) -> list[float | None]:
    """As many digits as float16 has."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]


def _sequence(
    sequence: TokenSequence, tokenizer: Tokenizer | None, passages: Passages
) -> dict[str, Any]:
    return {
        "name": clean(sequence.name),
        "prompt": _text(sequence.prompt_tokens, tokenizer),
        "turns": [_turn(turn, tokenizer, passages) for turn in sequence.turns],
    }


def _turn(turn: Turn, tokenizer: Tokenizer | None, passages: Passages) -> dict[str, Any]:
    pieces = _pieces(turn.action_tokens[:MOST_TOKENS], tokenizer)
    pieces = pieces[: bisect_right(list(accumulate(map(len, pieces))), MOST_TEXT)]
    shown = [clean(id) for each in turn.searches for id in each.passage_ids]
    logprobs = turn.behaviour_logprobs[: len(pieces)]
    return {
        "tokens": pieces,
        "left": len(turn.action_tokens) - len(pieces),
        "logprobs": [round(float(p), 4) if math.isfinite(p) else None for p in logprobs],
        "versions": turn.policy_versions[: len(pieces)].tolist(),
        "observation": passages.pieces(_text(turn.observation_tokens, tokenizer), shown),
        "malformed": turn.malformed,
        "reward": turn.reward,
        "info": _cut(clean(turn.info)),
        "seconds": round(turn.ended_at - turn.started_at, 4),
        "searches": [
            {
                "query": _cut(clean(each.query)),
                "passages": [clean(id) for id in each.passage_ids],
                "seconds": round(each.seconds, 4),
                "status": each.status,
            }
            for each in turn.searches
        ],
    }


def _pieces(tokens: NDArray[np.int32], tokenizer: Tokenizer | None) -> list[str]:
    """The text of each token; '' for one whose character the next ones complete."""
    if tokenizer is None:
        return [f"{token} " for token in tokens.tolist()]
    return written_by(tokenizer).pieces(tokens.tolist())


def _text(tokens: NDArray[np.int32], tokenizer: Tokenizer | None) -> str:
    """What the tokens say, and how much of it is left out."""
    text = _cut("".join(_pieces(tokens[:MOST_TEXT], tokenizer)))
    left = len(tokens) - MOST_TEXT
    return text if left <= 0 else f"{text}… ({left} more tokens)"


def _cut(text: str) -> str:
    left = len(text) - MOST_TEXT
    return text if left <= 0 else f"{text[:MOST_TEXT]}… ({left} more characters)"


def state_and_damage(told: Told) -> tuple[str, str]:
    """The state of a run, and why nothing more of its log is told."""
    if told.follower.damage:
        return "", clean(told.follower.damage)
    try:
        state = state_of(told.path)
    except (OSError, ReplayError):
        state = ""
    return state, "" if state == "running" else clean(told.follower.torn)


def _forecast(told: Told, config: Config | None) -> list[float] | None:
    """The published forecast of staleness before the queue and in it."""
    if config is None:
        return None
    replay = config.replay
    batch = replay.groups_per_step * replay.group_size
    return list(told.course.forecast(batch, replay.max_staleness) or ()) or None
