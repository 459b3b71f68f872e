"""`summary.json`: plain numbers, one fold over a run's event log and the last gauges it reported.

Written on success, failure and Ctrl-C alike, so a value that was never measured is None, not 0.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from configs.runtime.files import write_durably
from configs.schema import Config
from learner.health.rules import ROLLED_BACK_TO, RULES, gauge_of
from replay.codec import decode_trajectory
from replay.log import records
from replay.log.event_log import read
from replay.log.history import GroupHistory
from replay.protocol import EvalResult, LogError
from scripts.runs.fleet_log import restarts

COUNTED = (
    "sync/updates",
    "retrieval/requests",
    "retrieval/errors",
    "actor/lost_requests",
    "actor/token_mismatch",
    "sync/refits",
)


class RunFold:
    """The summary's facts, gathered in one pass over the log; payloads of untrained groups go. A
    run may have been launched several times: of what was reported twice the last counts, times are
    summed over launches, and `earlier` holds what the counters (`COUNTED`) came to before.
    """

    def __init__(self, log: Iterable[records.Record]) -> None:
        self.evaluations: dict[int, EvalResult] = {}
        self.reports: dict[int, dict[str, float]] = {}
        self.launches = 0
        self.earlier: Counter[str] = Counter()
        self.earlier_wall_s = self._earlier_train_s = self._begun = self._last = 0.0
        self._counters: dict[str, float] = {}
        self.dropped: Counter[str] = Counter()
        self._first_lease = self._last_report = 0.0
        self.delivered_tokens = self._tokens = 0  # up to the last report, and so far
        self.trajectories_trained = self.tokens_trained = self.steps = 0
        self.merged_whole = 0  # trained rollouts of one sequence
        self.staleness_sum = 0
        self.staleness_max: int | None = None
        self._groups = GroupHistory()
        try:
            for record in log:
                self._take(record)
                self._last = record.now
        except LogError:
            return  # a log cut off in a record is folded up to there

    @property
    def train_wall_s(self) -> float | None:
        """Seconds from the first lease to the last report, summed over launches."""
        return self._earlier_train_s + self._train_s or None

    @property
    def _train_s(self) -> float:
        return max(0.0, self._last_report - self._first_lease) if self._first_lease else 0.0

    @property
    def refits(self) -> int:
        """How many versions had to be sent anew, because an actor held something else."""
        return self.earlier["sync/refits"] + int(self._counters.get("sync/refits", 0))

    def _launch(self, now: float) -> None:
        self.launches += 1
        self.earlier_wall_s += self._last - self._begun
        self._earlier_train_s += self._train_s
        self._begun = self._last = now
        self._first_lease = self._last_report = 0.0
        self.earlier.update({name: int(self._counters.get(name, 0)) for name in COUNTED})
        self._counters = {}

    def _take(self, record: records.Record) -> None:
        self._groups.take(record)
        match record:
            case records.RunStarted() | records.RunResumed():
                self._launch(record.now)
            case records.Leased() if not self._first_lease:
                self._first_lease = record.now
            case records.Delivered():
                self._tokens += record.summary.action_tokens
            case records.GroupDropped() if self._groups.opened[record.group_id].kind == "train":
                self.dropped[record.cause] += 1
            case records.Sampled():
                self._train(record)
            case records.EvaluationFinished():
                self.evaluations[record.result.step] = record.result
            case records.Reported():
                self.reports[record.step] = self._counters = record.gauges
                if record.step:
                    self._last_report, self.delivered_tokens = record.now, self._tokens
            case _:
                pass

    def _train(self, record: records.Sampled) -> None:
        self.steps = max(self.steps, record.step)
        for _, delivered in self._groups.train(record):
            oldest = []
            for fact in delivered:
                tokens, versions, first = _versions(fact)
                self.trajectories_trained += 1
                self.merged_whole += fact.summary.sequences == 1
                self.tokens_trained += tokens
                self.staleness_sum += (record.step - 1) * tokens - versions
                oldest.append(first)
            if oldest:
                worst = record.step - 1 - min(oldest)
                self.staleness_max = max(worst, self.staleness_max or 0)


def _versions(fact: records.Delivered) -> tuple[int, int, int]:
    """The sampled tokens of a trajectory: how many, the sum of their versions, and the oldest."""
    if fact.compacted:
        return fact.summary.action_tokens, fact.compacted.version_sum, fact.summary.oldest_version
    trajectory = decode_trajectory(fact.payload)
    versions = np.concatenate([turn.policy_versions for turn in trajectory.turns])
    return len(versions), int(versions.sum()), trajectory.oldest_version


def build(
    config: Config,
    status: str,
    cause: str,
    wall_s: float,
    phases_s: dict[str, float],
    fleet: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Fold the run's log into the summary; `fleet` holds each actor's last gauges."""
    fold = RunFold(read(path) if (path := Path(config.run_dir) / "events.log").exists() else ())
    start = fold.evaluations[min(fold.evaluations)] if fold.evaluations else None
    final = fold.evaluations.get(config.learner.total_steps)  # of the last version alone
    train_wall_s = fold.train_wall_s
    return {
        "status": status,
        "cause": cause,
        **_evaluation("start", start),
        **_evaluation("final", final),
        "eval_questions": start.questions if start else None,
        "eval_sets": _sets(start, final),
        "steps": max(fold.reports, default=0),
        "launches": max(fold.launches, 1),
        "wall_s": round(fold.earlier_wall_s + wall_s, 2),
        "train_wall_s": _rounded(train_wall_s),
        "phases_s": {name: round(seconds, 2) for name, seconds in phases_s.items()},
        "actors": config.actors.count,
        **_trained(fold),
        "rollout_tokens_per_s": _ratio(fold.delivered_tokens, train_wall_s),
        "max_staleness": config.replay.max_staleness,
        **_fleet(fleet, fold.earlier),
        "refits": fold.refits,
        **_pauses(fold.reports.values(), train_wall_s),
        "restarts": restarts(path.parent),
        "dropped_groups_by_cause": dict(fold.dropped),
        "sentinels_fired_steps": _fired(fold.reports.values()),
        "rollbacks": sum(ROLLED_BACK_TO in report for report in fold.reports.values()),
        "seed": config.seed,
    }


def _trained(fold: RunFold) -> dict[str, Any]:
    """What was trained on: how much, in how many pieces, how old."""
    return {
        "trajectories_trained": fold.trajectories_trained,
        "tokens_trained": fold.tokens_trained,
        "merged_whole": _ratio(fold.merged_whole, fold.trajectories_trained, 4),
        "staleness_mean": _ratio(fold.staleness_sum, fold.tokens_trained, 4),
        "staleness_max": fold.staleness_max,
    }


def _fleet(fleet: dict[str, dict[str, float]], earlier: Counter[str]) -> dict[str, int]:
    """Actors' counts, `earlier` launches included: most versions applied, sums of the others."""

    def values(name: str) -> list[int]:
        return [int(gauges.get(name, 0.0)) for gauges in fleet.values()]

    return {
        "weight_syncs": max(values("sync/updates"), default=0) + earlier["sync/updates"],
        "retrieval_requests": sum(values("retrieval/requests")) + earlier["retrieval/requests"],
        "retrieval_errors": sum(values("retrieval/errors")) + earlier["retrieval/errors"],
        "lost_requests": sum(values("actor/lost_requests")) + earlier["actor/lost_requests"],
        "token_mismatches": sum(values("actor/token_mismatch")) + earlier["actor/token_mismatch"],
    }


def _fired(reports: Iterable[dict[str, float]]) -> dict[str, int]:
    """At how many steps each sentinel fired, of those that did."""
    steps = Counter(name for report in reports for name in RULES if report.get(gauge_of(name)))
    return dict(steps)


def _pauses(reports: Iterable[dict[str, float]], train_wall_s: float | None) -> dict[str, Any]:
    """The share of time that weight updates held the slowest actor up, and the p99 of a pause."""
    name = "sync/generation_pause_s"
    pauses = [report[name] for report in reports if name in report]
    return {
        "generation_pause_share": _ratio(sum(pauses), train_wall_s, 4),
        "generation_pause_p99_s": _rounded(float(np.quantile(pauses, 0.99)), 4) if pauses else None,
    }


def write(run_dir: Path, summary: dict[str, Any]) -> Path:
    """Write `summary.json` whole or not at all."""
    path = run_dir / "summary.json"
    write_durably(path, (json.dumps(summary, indent=2) + "\n").encode())
    return path


def _evaluation(when: str, result: EvalResult | None) -> dict[str, Any]:
    return {
        f"em_{when}": _rounded(result.em if result else None, 4),
        f"em_{when}_by_hops": result.em_by_hops if result else None,
        f"sampled_em_{when}": _rounded(result.sampled_em if result else None, 4),
        f"searches_{when}": _rounded(result.searches if result else None, 3),
        f"parts_{when}": {
            part: _rounded(mean, 4) for part, mean in (result.parts if result else {}).items()
        },
    }


def _sets(start: EvalResult | None, final: EvalResult | None) -> dict[str, dict[str, Any]]:
    """Of each data set the questions and what it came to, at the start and at the end."""
    table: dict[str, dict[str, Any]] = {}
    for when, result in (("start", start), ("final", final)):
        for name, found in (result.sets if result else {}).items():
            table.setdefault(name, {"questions": found.questions})[when] = {
                "em": _rounded(found.em, 4),
                "sampled_em": _rounded(found.sampled_em, 4),
                "searches": _rounded(found.searches, 3),
                **{part: _rounded(mean, 4) for part, mean in found.parts.items()},
            }
    return table


def set_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the exact match on each data set, at the start and at the end, in words."""
    for name, told in report["eval_sets"].items():
        start, final = (
            f"{told[when]['em']:.3f}" if when in told else "not evaluated"
            for when in ("start", "final")
        )
        yield f"{name}: EM {start} -> {final}, {told['questions']} questions"


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(float(value), digits)


def _ratio(value: float, per: float | None, digits: int = 2) -> float | None:
    return _rounded(value / per, digits) if per else None
