"""The index of some runs' logs: a database in a file, from which the pages are answered. Payloads
stay in the logs.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from learner.health.habits import empty, repeated
from learner.health.rules import Announcer, rolled_back
from learner.metrics.applications import Applications
from replay.codec import WireTrajectory, decode_wire
from replay.log import records as facts
from replay.log.event_log import FILE_NAME
from replay.protocol import CodecError
from replay.trajectory import Question
from scripts.command.terminal import clean
from scripts.runs.fleet_log import RestartsSince
from scripts.runs.runs import LATEST
from scripts.runs.waits_log import SamplesSince
from scripts.view import spans
from scripts.view.course import Course
from scripts.view.events import refitted, said
from scripts.view.following import Follower, Placed
from scripts.view.lanes import Lanes, Span
from scripts.view.rollouts.texts import Texts
from scripts.view.rollouts.wanted import DROPPED, Wanted
from scripts.view.rollouts.written import Written, written_of

BATCH = 2000  # records between two looks at who else wants what is known of runs
GIVEN_S = 0.001  # to them
RETRIEVAL = "retrieval_server"  # how its processes' names begin
SEARCHED = 4000  # characters of a question, its answers, or the queries, that are searched
_TABLES = """
CREATE TABLE rollouts (
    text INTEGER PRIMARY KEY, -- the number of its text
    run INTEGER, number INTEGER, segment INTEGER, place INTEGER, at REAL, kind TEXT,
    group_id INTEGER, sibling INTEGER, actor TEXT, question_id TEXT, hops INTEGER, question TEXT,
    expected TEXT, answer TEXT, reward REAL, searches INTEGER, turns INTEGER,
    tokens INTEGER, malformed INTEGER, sequences INTEGER, stop TEXT, oldest INTEGER,
    newest INTEGER, step INTEGER, staleness INTEGER, fate TEXT, gone INTEGER, begun REAL,
    repeated INTEGER, empty INTEGER -- searches
);
CREATE INDEX by_number ON rollouts (run, number);
CREATE INDEX by_group ON rollouts (run, group_id);
CREATE INDEX by_question ON rollouts (run, question_id);
CREATE INDEX by_step ON rollouts (run, step);
CREATE INDEX by_arrival ON rollouts (at);
CREATE INDEX by_time ON rollouts (run, at, begun, actor);
CREATE TABLE gauges (run INTEGER, name TEXT, step INTEGER, value REAL,
    PRIMARY KEY (run, name, step)) WITHOUT ROWID;
CREATE TABLE evaluations (run INTEGER, step INTEGER, at REAL, result TEXT,
    PRIMARY KEY (run, step));
CREATE TABLE events (run INTEGER, number INTEGER, at REAL, step INTEGER, kind TEXT, said TEXT);
CREATE INDEX events_by_time ON events (run, at);
CREATE INDEX by_place ON events (run, number) WHERE kind != 'group';
"""
SHOWN = (
    "run", "number", "at", "kind", "group_id", "sibling", "question_id", "hops", "question",
    "expected", "answer", "reward", "searches", "turns", "tokens", "malformed", "sequences",
    "stop", "oldest", "newest", "step", "staleness", "fate", "gone", "begun", "actor",
    "repeated", "empty",
)  # fmt: skip


@dataclass
class Told:
    """What is known of a run beside the tables."""

    path: Path
    follower: Follower
    records: int = 0
    step: int = 0
    stopped: str = ""
    first: float = 0.0
    last: float = 0.0
    opened: dict[int, facts.GroupOpened] = field(default_factory=dict)  # groups of open fate
    lanes: Lanes = field(default_factory=Lanes)
    longest: float = 0.0  # span of a lane
    announcer: Announcer = field(default_factory=Announcer)
    applications: Applications = field(init=False)
    course: Course = field(default_factory=Course)
    restarts: RestartsSince = field(init=False)
    samples: SamplesSince = field(init=False)
    written: Written | None = None  # decodes what its policy wrote
    refits: float = 0.0  # that this learner has told of
    trouble: str = ""  # why the index is not read on
    left: set[str] = field(default_factory=set)  # actors that have left, and are not back

    def __post_init__(self) -> None:
        self.applications = Applications(self.path)
        self.restarts = RestartsSince(self.path)
        self.samples = SamplesSince(self.path)


class Index:
    """The database of some runs, read further by `catch_up`; of several threads. It is asked by a
    connection of its own, which does not wait while a batch of records is taken.
    """

    def __init__(self, runs: Sequence[Path], file: Path) -> None:
        self.runs = [Told(run, Follower(run / FILE_NAME)) for run in runs]
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._names = frozenset[str]()  # of gauges
        self._stops = frozenset[str]()
        self._base = sqlite3.connect(file, check_same_thread=False)
        self._base.executescript(_TABLES + spans.TABLES)
        self._base.execute("PRAGMA synchronous = OFF")
        self._base.execute("PRAGMA journal_mode = WAL")
        self._reader = sqlite3.connect(file, check_same_thread=False)
        self._texts = Texts(file.with_suffix(".texts"))

    def close(self) -> None:
        """Close the database."""
        with self._lock, self._asking:
            self._reader.close()
            self._base.close()
            self._texts.close()

    def catch_up(self, stop: threading.Event) -> bool:
        """Read what has been written since, unless told to stop; True where there was some."""
        changed = False
        for run, told in enumerate(self.runs):
            news = told.follower.news()
            while not (told.trouble or stop.wait(GIVEN_S)):
                try:
                    with self._lock, self._base:
                        read = self._take_some(run, told, news)
                    if read < BATCH:
                        changed = self._take_restarts(run, told) or changed
                except (sqlite3.Error, OSError) as error:  # a full disk
                    told.trouble = (
                        f"the index cannot be written: {error}: is there room in {gettempdir()}? "
                        "make some, and start anew"
                    )
                    break
                changed = changed or bool(read)
                if read < BATCH:
                    break
        return changed

    def _take_some(self, run: int, told: Told, news: Iterator[Placed]) -> int:
        """Take a batch; return how many records and lines that were."""
        count = number = 0
        told.written = written_of(told.path)
        try:
            for count, placed in enumerate(islice(news, BATCH), 1):  # noqa: B007
                number = placed.number
                self._take(run, told, placed)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # as no run writes
            where = f"{told.path / FILE_NAME}: record {number}"
            told.follower.damage = f"{where}: {type(error).__name__}: {error}"
        told.lanes.apply(applied := told.applications.news())
        told.lanes.observe(sampled := told.samples.news())
        ended, told.lanes.found = told.lanes.found, []
        told.longest = max([told.longest, *(each.ended - each.begun for each in ended)])
        spans.keep(self._base, run, ended)
        return count + len(applied) + len(sampled)

    def _take_restarts(self, run: int, told: Told) -> bool:
        """Take the restarts that the log does not tell, those of retrieval; True where there are
        some.
        """
        news = [each for each in told.restarts.news() if each.name.startswith(RETRIEVAL)]
        with self._lock, self._base:
            for each in news:
                before = self._base.execute(
                    "SELECT number, step FROM steps WHERE run = ? AND at <= ? ORDER BY at DESC",
                    (run, each.at_s),
                ).fetchone()
                number, step = before or (0, 0)
                words = _short(f"{each.name} is started again: {each.cause}")
                self._base.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)",
                    (run, number, each.at_s, step, "restart", words),
                )
        return bool(news)

    def rows(self, statement: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return what a statement finds."""
        with self._asking:
            return self._reader.execute(statement, tuple(values)).fetchall()

    def known(self) -> tuple[list[str], list[str]]:
        """Return the names of all gauges, and the reasons for which rollouts stopped."""
        return sorted(self._names), sorted(self._stops)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Have what is known of runs stand still."""
        with self._lock:
            yield

    def under_way(self, run: int) -> list[Span]:
        """Return the spans of a run's lanes that have not ended."""
        with self._lock:
            return self.runs[run].lanes.under_way()

    def rollouts(self, wanted: Wanted, begin: int, most: int) -> tuple[int, list[dict[str, Any]]]:
        """Return how many rollouts are wanted, and some of them."""
        where, values = wanted.condition(self._texts.holding)
        order = wanted.order(len(self.runs))
        count = self.rows(f"SELECT count(*) FROM rollouts WHERE {where}", values)[0][0]
        chosen = f"SELECT rowid FROM rollouts WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        found = self.rows(  # of wide rows those alone are sorted that are shown
            f"SELECT {', '.join(SHOWN)} FROM rollouts WHERE rowid IN ({chosen}) ORDER BY {order}",
            (*values, most, begin),
        )
        return count, [dict(zip(SHOWN, row, strict=True)) for row in found]

    def _take(self, run: int, told: Told, placed: Placed) -> None:
        record = placed.record
        if not 0 <= record.now <= LATEST:
            raise OverflowError(f"{record.now} is no time")
        told.records, told.last = told.records + 1, max(told.last, record.now)
        told.first = told.first or record.now
        if not isinstance(record, facts.Delivered):
            told.lanes.take(record)
            told.course.take(record)
        match record:
            case facts.GroupOpened():
                told.opened[record.group_id] = record
            case facts.Delivered():
                self._deliver(run, told, placed, record)
            case facts.Sampled():
                self._sample(run, told, record)
            case facts.GroupDropped():
                told.opened.pop(record.group_id, None)
                self._base.execute(
                    "UPDATE rollouts SET fate = ? WHERE run = ? AND group_id = ?",
                    (_short(f"{DROPPED}{record.cause}"), run, record.group_id),
                )
                self._event(run, told, placed)
            case facts.Reported():
                self._report(run, told, placed, record)
            case facts.EvaluationFinished():
                self._evaluation(run, told, record)
            case _:
                self._event(run, told, placed)

    def _deliver(self, run: int, told: Told, placed: Placed, record: facts.Delivered) -> None:
        summary, opened = record.summary, told.opened.get(record.group_id)
        question = opened.question if opened else Question(record.summary.question_id, "", ())
        wire = _wire(record.payload)
        searches = [s for turn in wire.turns for s in turn.searches] if wire else []
        answer = (wire.answer or "") if wire else ""
        texts = [_short(each) for each in (question.text, " | ".join(question.answers), answer)]
        evaluation = opened.evaluation if opened else -1
        begun = told.lanes.deliver(record, wire)
        told.course.deliver(record, begun)
        stop = wire.stop_reason.value if wire else ""
        if stop and stop not in self._stops:
            self._stops = self._stops | {stop}
        values = (
            self._search(told, [*texts, _short("\n".join(s.query for s in searches))], wire),
            run, placed.number, placed.segment, placed.offset, record.now, summary.kind,
            record.group_id, record.sibling, _short(record.actor_id), _short(summary.question_id),
            question.hops, *texts,
            summary.reward, summary.searches, summary.turns, summary.action_tokens,
            summary.malformed, len(wire.sequences) if wire else 0,
            stop, summary.oldest_version,
            summary.newest_version, evaluation if summary.kind == "eval" else None, None,
            "" if summary.kind == "train" else "evaluation", int(record.compacted is not None),
            begun, repeated(searches), empty(searches),
        )  # fmt: skip
        marks = ", ".join("?" * len(values))
        self._base.execute(f"INSERT INTO rollouts VALUES ({marks})", values)

    def _search(self, told: Told, texts: Sequence[str], wire: WireTrajectory | None) -> int:
        """Have a rollout's texts be found; return their number."""
        said = [told.written.text(wire.turns)] if told.written and wire else []
        return self._texts.add("\n".join([*texts, *said]))

    def _sample(self, run: int, told: Told, record: facts.Sampled) -> None:
        told.step = max(told.step, record.step)
        for group in record.group_ids:
            told.opened.pop(group, None)
        self._base.executemany(
            "UPDATE rollouts SET step = ?1, staleness = ?1 - 1 - oldest, fate = 'trained' "
            "WHERE run = ?2 AND group_id = ?3",
            [(record.step, run, group) for group in record.group_ids],
        )
        self._gauges(run, record.step, record.gauges | told.course.sample(record))

    def _report(self, run: int, told: Told, placed: Placed, record: facts.Reported) -> None:
        self._gauges(run, record.step, record.gauges)
        published = told.lanes.report(record.now, record.step, record.gauges)
        told.course.report(record, published)
        self._step(run, placed, record.step, published)
        refits = record.gauges.get("sync/refits", 0.0)
        if refits > told.refits:
            self._say(run, told, placed, ("refit", refitted(refits)))
        told.refits = refits
        back = rolled_back(record.step, record.gauges)
        for line in told.announcer.lines(record.step, record.gauges):
            self._say(run, told, placed, ("rollback" if line == back else "sentinel", line))

    def _step(self, run: int, placed: Placed, step: int, published: bool) -> None:
        self._base.execute(
            "INSERT INTO steps VALUES (?, ?, ?, ?, ?)",
            (run, placed.number, placed.record.now, step, int(published)),
        )

    def _gauges(self, run: int, step: int, gauges: dict[str, float]) -> None:
        found = {_short(name): value for name, value in gauges.items()}
        if not self._names.issuperset(found):
            self._names = self._names.union(found)
        self._base.executemany(
            "INSERT OR REPLACE INTO gauges VALUES (?, ?, ?, ?)",
            [(run, name, step, v if isfinite(v) else None) for name, v in found.items()],
        )

    def _evaluation(self, run: int, told: Told, record: facts.EvaluationFinished) -> None:
        result = record.result
        over = [id for id, each in told.opened.items() if each.evaluation == result.step]
        for group in over:
            del told.opened[group]
        names = ("em", "sampled_em", "em_by_hops", "questions", "searches")
        shown = {name: getattr(result, name) for name in names}
        shown["em_by_hops"] = {clean(hops): em for hops, em in result.em_by_hops.items()}
        shown["em_by_set"] = {clean(name): each.em for name, each in result.sets.items()}
        self._base.execute(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
            (run, result.step, record.now, json.dumps(shown)),
        )

    def _event(self, run: int, told: Told, placed: Placed) -> None:
        record = placed.record
        match record:
            case facts.Stopped():
                told.stopped = clean(record.cause)
            case facts.RunResumed():
                told.stopped = ""
                told.left.clear()
            case facts.LearnerResumed():
                told.refits = 0.0
                served = told.course.published == (record.step, record.now)
                self._step(run, placed, record.step, served)
            case facts.CaughtUp():
                self._step(run, placed, record.step, True)
            case facts.ActorLeft():
                told.left.add(record.actor_id)
            case _:
                pass
        event = said(record)
        if isinstance(record, facts.ActorJoined) and record.actor_id in told.left:
            told.left.discard(record.actor_id)
            event = "restart", f"{record.actor_id} has joined again"
        if event is not None:
            self._say(run, told, placed, event)

    def _say(self, run: int, told: Told, placed: Placed, event: tuple[str, str]) -> None:
        kind, text = event
        self._base.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)",
            (run, placed.number, placed.record.now, told.step, kind, _short(text)),
        )


def _wire(payload: bytes) -> WireTrajectory | None:
    try:
        return decode_wire(payload) if payload else None
    except CodecError:
        return None


def _short(text: str) -> str:
    return clean(text[:SEARCHED])
