"""The durable state of replay: a fold of `evolve` over the records, and of nothing else.

Every train group is in one place: open → ready → sampled(step) → committed, or dropped by a counted
cause; payloads are kept from delivery until it is committed or dropped.

The journal makes decisions facts, taken into the state at once and then appended to the log.
"""

from collections import deque
from collections.abc import Sequence
from functools import singledispatchmethod

from configs.schema import ReplayConfig
from replay.ledger.counters import Counters
from replay.ledger.evaluation import Evaluation
from replay.ledger.groups import OF_THE_PROGRAM, Failures, Group
from replay.ledger.newest import MOST_KEPT, Newest
from replay.log import records
from replay.protocol import EvalResult, LogError, StepReport
from replay.questions import Questions
from replay.trajectory import Kind, Question

_FIRST_GROUP: dict[Kind, int] = {"train": 1, "eval": records.EVAL_GROUPS}
MOST_DROPPED = 2_000  # of which a late delivery is told that its group was dropped
ASKED_AGAIN = ("group_deadline", "run_ended")  # causes that are no fault of the question


class LedgerState:
    """Groups, leases, batches and evaluations as the log has them.

    `opened`, `ready`, `sampled`: train groups by id; `evaluating`: eval groups by id.

    `short`: ids of groups with a sibling to lease. `held`: actor id → the (group, sibling) it was
    given and has not answered for, needed or not: what its capacity is counted against. `batches`:
    recorded, uncommitted, by step. `catching_up`: started again, and nothing new is asked for yet.
    `learner`: the process that resumed as this incarnation, empty when it must be gone.

    Nothing here grows with the run's history: of what is over only the newest is kept. `facts`: how
    many records were taken in; `recorded`: the configuration in force, as the log has it.
    """

    def __init__(
        self,
        config: ReplayConfig,
        questions: Questions,
        eval_questions: Sequence[Question],
        eval_temperatures: tuple[float, ...],
    ) -> None:
        self.config, self.eval_temperatures = config, eval_temperatures
        self.questions = questions
        self.eval_questions = tuple(eval_questions)
        self.opened: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.sampled: dict[int, Group] = {}
        self.evaluating: dict[int, Group] = {}
        self.dropped: dict[int, None] = {}  # the newest
        self.short: set[int] = set()
        self.held: dict[str, set[tuple[int, int]]] = {}
        self.failures = Failures()
        self.batches: dict[int, records.Sampled] = {}
        self.evaluations: dict[int, Evaluation] = {}  # the newest, and all that may be asked for
        self.under_way: dict[int, Evaluation] = {}  # those without a result
        self.unannounced: list[int] = []  # steps of evaluations that no batch has carried yet
        self.results: Newest[EvalResult] = Newest()
        self.reports: Newest[StepReport] = Newest()
        self.counters = Counters()
        self.next_group_id = dict(_FIRST_GROUP)
        self.incarnation, self.learner = 0, ""
        self.last_sampled = 0
        self.served = 0  # the last step whose batch the current incarnation has been given
        self.committed = 0
        self.catching_up = False
        self.tokenizer_digest = self.stop_cause = self.recorded = ""
        self.facts = 0

    @property
    def admitted(self) -> int:
        """Count of groups open, ready or sampled; a step is always a full batch."""
        sampled = self.last_sampled * self.config.groups_per_step
        return len(self.opened) + len(self.ready) + sampled

    @property
    def serving_again(self) -> bool:
        """True while recorded batches are still to be served to a resumed learner."""
        return self.served < self.last_sampled

    @property
    def oldest_unsettled(self) -> tuple[int, int]:
        """The first train group, and the first of evaluations, whose payloads may be asked for; of
        all that come before nothing is.
        """
        train = [*self.opened, *self.ready, *self.sampled]
        evaluated = [evaluation.first_group for evaluation in self.under_way.values()]
        ahead = self.next_group_id
        return min([*train, ahead["train"]]), min([*evaluated, ahead["eval"]])

    def unfinished(self, group_id: int) -> Group | None:
        """Return the group of this id, if a sibling of it is still wanted."""
        return self.opened.get(group_id) or self.evaluating.get(group_id)

    def was_opened(self, group_id: int) -> bool:
        """Return True if there is, or has been, a group of this id."""
        kind = _kind_of(group_id)
        return _FIRST_GROUP[kind] <= group_id < self.next_group_id[kind]

    def size_of(self, group_id: int) -> int:
        """Return how many siblings a group of this id has."""
        training = _kind_of(group_id) == "train"
        return self.config.group_size if training else len(self.eval_temperatures)

    def gauges(self) -> dict[str, float]:
        """Return replay's own numbers, by metric name."""
        places = {
            "replay/open_groups": len(self.opened),
            "replay/ready_groups": len(self.ready),
            "replay/evaluating_groups": len(self.evaluating),
            "replay/leases": sum(len(leases) for leases in self.held.values()),
            "replay/retired_questions": self.questions.retired_count,
            "replay/sampled_steps": self.last_sampled,
        }
        return {name: float(n) for name, n in places.items()} | self.counters.gauges()

    def evolve(self, fact: records.Record) -> None:
        """Take in one fact. Raises LogError where it contradicts the questions."""
        self._take(fact)
        self.facts += 1

    @singledispatchmethod
    def _take(self, fact: records.Record) -> None:
        raise TypeError(f"no fold for {fact!r}")

    @_take.register
    def _(self, fact: records.ReplayRestarted) -> None:
        pass

    @_take.register
    def _(self, fact: records.RunStarted) -> None:
        self.recorded = fact.config

    @_take.register
    def _(self, fact: records.RunResumed) -> None:
        self.stop_cause, self.learner, self.recorded = "", "", fact.config
        self.catching_up = self.incarnation > 0
        self.counters.streaks.restart()
        self.held.clear()  # every process of before is gone; what it held is to be leased again
        for group in [*self.opened.values(), *self.evaluating.values()]:
            group.holders.clear()
            self._note_missing(group)

    @_take.register
    def _(self, fact: records.ActorJoined) -> None:
        self.tokenizer_digest = self.tokenizer_digest or fact.tokenizer_digest
        self.held.setdefault(fact.actor_id, set())

    @_take.register
    def _(self, fact: records.ActorLeft) -> None:
        self.held.pop(fact.actor_id, None)

    @_take.register
    def _(self, fact: records.GroupOpened) -> None:
        training, asked = self.config.group_size, len(self.eval_temperatures)
        group = Group.opened(fact, training if fact.kind == "train" else asked)
        if fact.kind == "train":
            expected: Question | None = self.questions.next()
            self.opened[fact.group_id] = group
            self.counters.opened += 1
        else:
            pending = self.evaluations[fact.evaluation].pending
            expected = pending.popleft() if pending else None
            self.evaluating[fact.group_id] = group
        if expected != fact.question:
            raise LogError(
                f"group {fact.group_id} was opened with {fact.question!r}, but here {expected!r} "
                "is next: the log is of other (or since changed) question files, or another seed"
            )
        self.next_group_id[fact.kind] = fact.group_id + 1
        self.short.add(fact.group_id)

    @_take.register
    def _(self, fact: records.Leased) -> None:
        for sibling in fact.siblings:
            self._hand_out(fact.actor_id, fact.group_id, sibling)

    @_take.register
    def _(self, fact: records.Adopted) -> None:
        self._hand_out(fact.actor_id, fact.group_id, fact.sibling)

    @_take.register
    def _(self, fact: records.Delivered) -> None:
        self._let_go(fact.actor_id, fact.group_id, fact.sibling)
        self.counters.streaks.failed = 0
        group = self.opened.get(fact.group_id) or self.evaluating[fact.group_id]
        group.holders.pop(fact.sibling, None)
        group.summaries[fact.sibling] = fact.summary
        if group.kind == "train":
            group.payloads[fact.sibling] = fact.payload
            group.places[fact.sibling] = self.facts
            self.counters.deliver(fact.summary)
        else:
            self.evaluations[group.evaluation].delivered += 1
        self._note_missing(group)
        if group.closed:
            self._close(group)

    @_take.register
    def _(self, fact: records.Superseded) -> None:
        self._let_go(fact.actor_id, fact.group_id, fact.sibling)
        self.counters.superseded += 1

    @_take.register
    def _(self, fact: records.LeaseReturned) -> None:
        self._let_go(fact.actor_id, fact.group_id, fact.sibling)
        self.counters.returned += 1
        self.counters.streaks.failed += fact.cause.startswith(OF_THE_PROGRAM)
        group = self.unfinished(fact.group_id)
        if group and group.holders.get(fact.sibling) == fact.actor_id:
            self._pass_on(group, fact.sibling)
            group.count_attempt(fact.sibling, fact.cause)
            self.failures.count(group, fact.sibling, fact.cause)
            self._note_missing(group)

    @_take.register
    def _(self, fact: records.GroupDropped) -> None:
        self.dropped[fact.group_id] = None
        if len(self.dropped) > MOST_DROPPED:
            del self.dropped[next(iter(self.dropped))]
        self.short.discard(fact.group_id)
        group = self._forget(fact.group_id)
        if fact.cause == "group_deadline":
            for sibling in group.undelivered:
                self.failures.count(group, sibling)
        if group.kind == "train":
            self.counters.dropped[fact.cause] += 1
            if fact.cause in ASKED_AGAIN:
                self.questions.requeue(group.question)
            return
        evaluation = self.evaluations[group.evaluation]
        evaluation.delivered -= len(group.summaries)
        if fact.cause in ASKED_AGAIN:
            evaluation.pending.append(group.question)
        elif fact.cause == "question_failed":
            evaluation.given_up.add(group.question.id)
            self.failures.forgive(group)

    @_take.register
    def _(self, fact: records.QuestionRetired) -> None:
        self.questions.retire(fact.question_id)

    @_take.register
    def _(self, fact: records.Sampled) -> None:
        self.sampled |= {group_id: self.ready.pop(group_id) for group_id in fact.group_ids}
        self.batches[fact.step] = fact
        self.last_sampled = self.served = fact.step
        self.unannounced = [s for s in self.unannounced if s not in fact.evaluations]
        self.counters.sample(self.sampled[group_id] for group_id in fact.group_ids)

    @_take.register
    def _(self, fact: records.Resampled) -> None:
        self.served = max(self.served, fact.step)

    @_take.register
    def _(self, fact: records.StepsCommitted) -> None:
        for step in [step for step in self.batches if step <= fact.step]:
            for group_id in self.batches.pop(step).group_ids:
                del self.sampled[group_id]
                self.counters.committed += 1
        self.committed = max(self.committed, fact.step)

    @_take.register
    def _(self, fact: records.LearnerResumed) -> None:
        self.catching_up = self.incarnation > 0
        self.incarnation, self.learner = fact.incarnation, fact.instance
        self.served = fact.step
        self.last_sampled = max(self.last_sampled, fact.step)

    @_take.register
    def _(self, fact: records.CaughtUp) -> None:
        self.catching_up = False

    @_take.register
    def _(self, fact: records.EvaluationOpened) -> None:
        total, siblings = len(self.eval_questions), len(self.eval_temperatures)
        pending = deque(self.eval_questions)
        first = self.next_group_id["eval"]
        evaluation = Evaluation(fact.step, pending, total, siblings, first)
        self.evaluations[fact.step] = self.under_way[fact.step] = evaluation

    @_take.register
    def _(self, fact: records.EvaluationFinished) -> None:
        evaluation = self.under_way.pop(fact.result.step)
        evaluation.result = fact.result
        evaluation.answered.clear()
        self.results.append(fact.result)
        self.unannounced.append(fact.result.step)
        self._forget_evaluations()

    @_take.register
    def _(self, fact: records.EvaluationVoided) -> None:
        del self.evaluations[fact.step], self.under_way[fact.step]
        self.failures.forget(fact.step)
        self.unannounced = [s for s in self.unannounced if s != fact.step]

    @_take.register
    def _(self, fact: records.Reported) -> None:
        self.reports.append(StepReport(fact.step, fact.gauges))

    @_take.register
    def _(self, fact: records.Stopped) -> None:
        self.stop_cause = fact.cause

    def _hand_out(self, actor_id: str, group_id: int, sibling: int) -> None:
        self.held.setdefault(actor_id, set()).add((group_id, sibling))
        group = self.unfinished(group_id)
        if group and group.misses(sibling):
            group.holders[sibling] = actor_id
            self._note_missing(group)

    def _let_go(self, actor_id: str, group_id: int, sibling: int) -> None:
        self.held.get(actor_id, set()).discard((group_id, sibling))

    def _pass_on(self, group: Group, sibling: int) -> None:
        del group.holders[sibling]
        # An actor thought lost may have come back with this sibling while another had it.
        key = (group.group_id, sibling)
        for actor_id in sorted(name for name, leases in self.held.items() if key in leases):
            group.holders[sibling] = actor_id
            return

    def _note_missing(self, group: Group) -> None:
        (self.short.add if group.short else self.short.discard)(group.group_id)

    def _forget(self, group_id: int) -> Group:
        for place in (self.opened, self.ready, self.evaluating):
            if group_id in place:
                return place.pop(group_id)
        raise LogError(f"group {group_id} is dropped, but it is neither open nor ready")

    def _forget_evaluations(self) -> None:
        """Let go of old ones that no learner asks for again: their steps are committed."""
        spare = max(0, len(self.evaluations) - MOST_KEPT)
        for step in list(self.evaluations)[:spare]:
            if step < self.committed and step not in self.under_way:
                del self.evaluations[step]

    def _close(self, group: Group) -> None:
        self.failures.forgive(group)
        if group.kind == "train":
            self.ready[group.group_id] = self.opened.pop(group.group_id)
            self.counters.close(group)
        else:
            del self.evaluating[group.group_id]
            answers = tuple(group.summaries[sibling] for sibling in range(group.size))
            self.evaluations[group.evaluation].answered[group.question.id] = answers


def _kind_of(group_id: int) -> Kind:
    return "train" if group_id < records.EVAL_GROUPS else "eval"


class Journal:
    """Facts in the order in which they are written; `now`: the time that they carry."""

    def __init__(self, state: LedgerState) -> None:
        self.state = state
        self.now = 0.0
        self._written: list[records.Record] = []

    def write(self, fact: records.Record) -> None:
        """Make this fact true."""
        self.state.evolve(fact)
        self._written.append(fact)

    def wrote_only(self, kinds: tuple[type[records.Record], ...]) -> bool:
        """Return True if everything written since the last `take` is of these kinds."""
        return all(isinstance(fact, kinds) for fact in self._written)

    def take(self) -> tuple[records.Record, ...]:
        """Return everything written since the last call, in order."""
        written, self._written = tuple(self._written), []
        return written
