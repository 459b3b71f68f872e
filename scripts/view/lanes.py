"""The lanes of a run's time: what actors, learner, replay and retrieval did when, as its records
tell; when weights were taken up, what engines did and how many leases actors waited for, as files
beside them tell.

A lease is held from `Leased` to its delivery; in it the stamps of its turns say when the policy
wrote, and the seconds of its searches for how long it waited for them. A lease that ended without a
trajectory, or whose tokens were compacted away, is `unknown`. The learner's spans end where it
reports a step, and last as long as its gauges say. Stamps of other machines' clocks are cut to the
lease that they lie in.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf, isfinite

import msgspec

from learner.metrics.applications import Application
from replay.codec import WireTrajectory
from replay.log import records as facts
from scripts.runs.waits_file import MOST_ACTORS
from scripts.runs.waits_log import LAPSE_S, ActorSample

STATES = (
    "held", "generate", "search", "unknown", "train", "publish", "wait", "filling", "ready",
    "asked", "receive", "apply", "busy", "lease", "behind", "running", "queued", "kv", "runs",
    "told",
)  # fmt: skip
(
    HELD, GENERATE, SEARCH, UNKNOWN, TRAIN, PUBLISH, WAIT, FILLING, READY, ASKED, RECEIVE, APPLY,
    BUSY, LEASE, BEHIND, RUNNING, QUEUED, KV, RUNS, TOLD,
) = range(len(STATES))  # fmt: skip
LEARNER, REPLAY, RETRIEVAL, WEIGHTS, ENGINES = range(5)  # lanes
ACTORS = ENGINES + 1  # the first actor's
OWN_ENGINES = 13  # actors whose engines are told each; those of others lie on one lane
WORK = frozenset({GENERATE, SEARCH, TRAIN, PUBLISH, READY, ASKED, RECEIVE, APPLY})
_MOST_APART = 4096  # times of a lane between which nothing was done, that are remembered

_LONGEST_S = 60.0  # span of a sample
_MOST_SAMPLED = 4 * MOST_ACTORS  # actors of a run, whose samples are taken

Part = tuple[int, float, float]  # a state, its begin and its end
Level = tuple[int, int, float, float, int]  # a lane, and on it a part with how many are in it


@dataclass(frozen=True)
class Span:
    """A lease, a step, a group, weights or a sample on their lane, and their parts; `searches`:
    those of a rollout, which lie on retrieval's lane; `levels`: those of a sample. `BUSY` is of a
    lane's time, once: of spans that lie over each other one has it.
    """

    lane: int
    begun: float
    ended: float
    parts: tuple[Part, ...]
    searches: tuple[Part, ...] = ()
    levels: tuple[Level, ...] = ()


@dataclass
class _Group:
    """A train group that is neither trained nor dropped."""

    opened: float
    delivered: int = 0
    last: float = 0.0  # delivery

    def span(self, until: float, ready: bool) -> Span:
        until = max(until, self.opened)  # a clock may have been put back
        filled = min(max(self.last, self.opened), until) if ready else until
        parts = [(FILLING, self.opened, filled), *([(READY, filled, until)] if ready else [])]
        return Span(REPLAY, self.opened, until, tuple(parts))


class _Times:
    """Times in order, none over another: those that are far behind are forgotten, and count as
    taken with all that lies before.
    """

    def __init__(self) -> None:
        self._begins, self._ends = array("d"), array("d")
        self._floor = -inf

    def take(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Take a time; return what of it was free."""
        begin = max(begin, self._floor)
        if begin >= end:
            return []
        begins, ends = self._begins, self._ends
        first, last = bisect_left(ends, begin), bisect_right(begins, end)  # those that it touches
        edges = [begin]
        for one, other in zip(begins[first:last], ends[first:last], strict=True):
            edges += [one, other]
        edges.append(end)
        free = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        if first < last:
            begin, end = min(begin, begins[first]), max(end, ends[last - 1])
        begins[first:last], ends[first:last] = array("d", [begin]), array("d", [end])
        if len(begins) > _MOST_APART:
            half = _MOST_APART // 2
            self._floor = ends[half - 1]
            del begins[:half], ends[:half]
        return free


class Lanes:
    """Folds the records of one run; `found` has the spans that ended, until they are taken."""

    def __init__(self) -> None:
        self.actors: dict[str, int] = {}
        self.found: list[Span] = []
        self._leases: dict[tuple[str, int, int], float] = {}
        self._groups: dict[int, _Group] = {}
        self._size = 0  # siblings of a group, once one was trained
        self._busy: dict[int, _Times] = defaultdict(_Times)
        self._reported = self._last = 0.0
        self._publish_s: float | None = None
        self.searched = self.applied = False  # ever
        self._samples: dict[str, ActorSample] = {}
        self.sampled_s = 0.0  # up to when samples are told

    def take(self, record: facts.Record) -> None:
        """Take any record but a delivery."""
        match record:
            case facts.Leased():
                self._lease(record)
            case facts.LeaseReturned() | facts.Superseded():
                self._unknown(record, record.now)
            case facts.GroupOpened(kind="train"):
                self._groups[record.group_id] = _Group(record.now)
            case facts.Sampled():
                for group_id in record.group_ids:
                    self._trained(group_id, record.now)
            case facts.GroupDropped():
                if group := self._groups.pop(record.group_id, None):
                    self._end(group.span(record.now, self._ready(group)))
            case facts.LearnerResumed():
                self._reported, self._publish_s = record.now, None
            case facts.RunResumed():  # all that was under way ended with the processes before
                for actor, group_id, sibling in list(self._leases):
                    lease = facts.LeaseFact(self._last, actor, group_id, sibling)
                    self._unknown(lease, self._last)
        self._last = max(self._last, record.now)

    def deliver(self, record: facts.Delivered, wire: WireTrajectory | None) -> float:
        """Take a delivery; return when its rollout began."""
        now = record.now
        self._last = max(self._last, now)
        known = self._leases.pop((record.actor_id, record.group_id, record.sibling), None)
        lasted = wire.timings.get("total_s", 0.0) if wire else 0.0
        begun = min(known if known is not None else now - max(lasted, 0.0), now)
        lane = self._lane(record.actor_id)
        parts: list[Part] = [(UNKNOWN, begun, now)]
        searches = list[Part]()
        if wire:
            parts = [(HELD, begun, now), *_written(wire, begun, now)]
            searches = list(_searched(wire, begun, now))
        self.searched = self.searched or bool(searches)
        self._end(Span(lane, begun, now, tuple(parts), tuple(searches)))
        if group := self._groups.get(record.group_id):
            group.delivered, group.last = group.delivered + 1, now
        return begun

    def report(self, now: float, step: int, gauges: Mapping[str, float]) -> bool:
        """Take the gauges of a step; return whether its version was published: they tell the newest
        that was, or at least for how long, until there is another.
        """

        def seconds(name: str) -> float:
            value = gauges.get(name, 0.0)
            return value if isfinite(value) and value > 0 else 0.0

        told = gauges.get("sync/publish_s")
        published = told is not None and told != self._publish_s
        if "sync/published" in gauges:
            published = gauges["sync/published"] == step
        self._publish_s = told
        ends = [now]
        lasted = (
            (PUBLISH, seconds("sync/publish_s") if published else 0.0),
            (TRAIN, seconds("learner/update_s")),
            (WAIT, seconds("learner/wait_for_batch_s")),
        )
        parts = list[Part]()
        for state, each in lasted:
            ends.append(max(ends[-1] - each, min(self._reported, now)))
            parts.append((state, ends[-1], ends[-2]))
        self._end(Span(LEARNER, ends[-1], now, tuple(parts)))
        self._reported = now
        return published

    def apply(self, news: Sequence[Application]) -> None:
        """Take weights that actors have taken up."""
        for each in news:
            paused = each.at_s - each.pause_s
            begun = paused - each.receive_s
            parts = ((RECEIVE, begun, paused), (APPLY, paused, each.at_s))
            self._end(Span(WEIGHTS, begun, each.at_s, parts))
        self.applied = self.applied or bool(news)

    def observe(self, news: Sequence[ActorSample]) -> None:
        """Take what the launcher saw of actors, in the order of its lines."""
        for each in news:
            if not 0 <= each.at_s - self.sampled_s <= LAPSE_S:  # it was away, or its clock put back
                self._settle([*self._samples], self.sampled_s)
            if each.actor is not None:
                self._settle([each.actor] if each.actor else [*self._samples], each.at_s)
            self.sampled_s = each.at_s
            known = each.actor in self.actors or len(self.actors) < _MOST_SAMPLED
            if each.actor and known and (each.free is not None or each.running is not None):
                self._lane(each.actor)
                self._samples[each.actor] = each
        for name, sample in [*self._samples.items()]:
            if self.sampled_s - sample.at_s >= _LONGEST_S:
                self._settle([name], self.sampled_s)
                self._samples[name] = msgspec.structs.replace(sample, at_s=self.sampled_s)

    def under_way(self) -> list[Span]:
        """The leases, groups and samples that have not ended, up to the last record."""
        until = self._last
        leases = [
            Span(self.actors[actor], begun, until, ((UNKNOWN, begun, until),))
            for (actor, _, _), begun in self._leases.items()
            if begun < until
        ]
        busy = deepcopy(self._busy[REPLAY])
        groups = [
            _busy(each.span(until, self._ready(each)), busy) for each in self._groups.values()
        ]
        sampled = min(max(until, self.sampled_s), self.sampled_s + LAPSE_S)
        found = [_spans_of(self._lane(name), each, sampled) for name, each in self._samples.items()]
        return [*leases, *groups, *(span for spans in found for span in spans)]

    def _settle(self, names: Iterable[str], until: float) -> None:
        """Have the samples of these actors ended."""
        for name in names:
            if sample := self._samples.pop(name, None):
                self.found += _spans_of(self._lane(name), sample, until)

    def _end(self, span: Span) -> None:
        """Have a span ended."""
        searches = (*span.searches, *_free(span.searches, self._busy[RETRIEVAL]))
        self.found.append(_busy(replace(span, searches=searches), self._busy[span.lane]))

    def _lane(self, actor: str) -> int:
        return self.actors.setdefault(actor, ACTORS + len(self.actors))

    def _lease(self, record: facts.Leased) -> None:
        self._lane(record.actor_id)
        for sibling in record.siblings:
            self._leases[record.actor_id, record.group_id, sibling] = record.now

    def _unknown(self, lease: facts.LeaseFact, until: float) -> None:
        begun = self._leases.pop((lease.actor_id, lease.group_id, lease.sibling), None)
        if begun is not None:
            lane, until = self._lane(lease.actor_id), max(begun, until)
            self._end(Span(lane, begun, until, ((UNKNOWN, begun, until),)))

    def _ready(self, group: _Group) -> bool:
        return group.delivered >= self._size > 0

    def _trained(self, group_id: int, now: float) -> None:
        if group := self._groups.pop(group_id, None):
            self._size = max(self._size, group.delivered)
            self._end(group.span(now, group.delivered > 0))


def _spans_of(lane: int, sample: ActorSample, until: float) -> Iterator[Span]:
    """The spans of a sample: as many as it takes for none to be long."""
    engine, running = lane if lane < ACTORS + OWN_ENGINES else ENGINES, sample.running
    counts = (
        (lane, LEASE, sample.free),
        (WEIGHTS, BEHIND, sample.behind),
        (engine, RUNNING, running),
        (engine, QUEUED, sample.queued),
        (engine, KV, sample.kv),  # in percent: sums of whole numbers are exact
        (engine, RUNS, int(bool(running))),
        (engine, TOLD, int(running is not None)),
    )
    begun = sample.at_s
    while begun < until:
        end = min(begun + _LONGEST_S, until)
        levels = [(on, state, begun, end, count) for on, state, count in counts if count]
        yield Span(lane, begun, end, (), levels=tuple(levels))
        begun = end


def _free(parts: Iterable[Part], busy: _Times) -> list[Part]:
    """The time of these parts in which nothing was done yet."""
    work = [part for part in parts if part[0] in WORK]
    return [(BUSY, *free) for _, begin, end in work for free in busy.take(begin, end)]


def _busy(span: Span, busy: _Times) -> Span:
    """A span that has its lane's time in which nothing was done yet."""
    return replace(span, parts=(*span.parts, *_free(span.parts, busy)))


def _written(wire: WireTrajectory, begun: float, ended: float) -> Iterator[Part]:
    """The parts of a rollout that its turns tell: none at a time that another one has."""
    turns = wire.turns
    writes = _joined([(turn.started_at, turn.ended_at) for turn in turns], begun, ended)
    waits = [
        (turn.ended_at, turn.ended_at + max(search.seconds for search in turn.searches))
        for turn in turns  # of which the searches are asked together
        if turn.searches
    ]
    yield from ((GENERATE, *each) for each in writes)
    for first, last in _joined(waits, begun, ended):
        for other in writes:
            if other[1] > first and other[0] < last:
                if other[0] > first:
                    yield SEARCH, first, other[0]
                first = max(first, other[1])
        if first < last:
            yield SEARCH, first, last


def _searched(wire: WireTrajectory, begun: float, ended: float) -> Iterator[Part]:
    """When each of a rollout's searches was under way."""
    for turn in wire.turns:
        for search in turn.searches:
            first, last = max(turn.ended_at, begun), min(turn.ended_at + search.seconds, ended)
            if first < last:
                yield ASKED, first, last


def _joined(
    spans: Sequence[tuple[float, float]], begun: float, ended: float
) -> list[tuple[float, float]]:
    """These spans, cut to a longer one, in order and none over another."""
    found = list[tuple[float, float]]()
    for first, last in sorted(spans):
        first, last = max(first, begun), min(last, ended)
        if first >= last:
            continue
        if found and first <= found[-1][1]:
            first, last = found[-1][0], max(found.pop()[1], last)
        found.append((first, last))
    return found
