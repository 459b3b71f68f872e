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
from replay.ledger.groups import Failures, Group
from replay.log import records
from replay.protocol import EvalResult, LogError, StepReport
from replay.questions import Questions
from replay.trajectory import Kind, Question

_FIRST_GROUP: dict[Kind, int] = {"train": 1, "eval": records.EVAL_GROUPS}
ASKED_AGAIN = ("group_deadline", "run_ended")  # causes that are no fault of the question


class LedgerState:
    """Groups, leases, batches and evaluations as the log has them.

    `opened`, `ready`, `sampled`: train groups by id; `evaluating`: eval groups by id.

    `short`: ids of groups with a sibling to lease. `held`: actor id → the (group, sibling) it was
    given and has not answered for, needed or not: what its capacity is counted against. `batches`:
    recorded, uncommitted, by step. `catching_up`: started again, and nothing new is asked for yet.
    `learner`: the process that resumed as this incarnation, empty when it must be gone.
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
        self.dropped: set[int] = set()
        self.short: set[int] = set()
        self.held: dict[str, set[tuple[int, int]]] = {}
        self.failures = Failures()
        self.batches: dict[int, records.Sampled] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.under_way: dict[int, Evaluation] = {}  # those without a result
        self.unannounced: list[int] = []  # steps of evaluations that no batch has carried yet
        self.results: list[EvalResult] = []
        self.reports: list[StepReport] = []
        self.counters = Counters()
        self.next_group_id = dict(_FIRST_GROUP)
        self.incarnation, self.learner = 0, ""
        self.last_sampled = 0
        self.served = 0  # the last step whose batch the current incarnation has been given
        self.committed = 0
        self.catching_up = False
        self.tokenizer_digest = self.stop_cause = ""

    @property
    def admitted(self) -> int:
        """Count of groups open, ready or sampled; a step is always a full batch."""
        sampled = self.last_sampled * self.config.groups_per_step
        return len(self.opened) + len(self.ready) + sampled

    @property
    def serving_again(self) -> bool:
        """True while recorded batches are still to be served to a resumed learner."""
        return self.served < self.last_sampled

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

    @singledispatchmethod
    def evolve(self, fact: records.Record) -> None:
        """Take in one fact. Raises LogError where it contradicts the questions."""
        raise TypeError(f"no fold for {fact!r}")

    @evolve.register
    def _(self, fact: records.RunStarted | records.ReplayRestarted) -> None:
        pass

    @evolve.register
    def _(self, fact: records.RunResumed) -> None:
        self.stop_cause = self.learner = ""
        self.catching_up = self.incarnation > 0
        self.counters.streaks.restart()
        self.held.clear()  # every process of before is gone; what it held is to be leased again
        for group in [*self.opened.values(), *self.evaluating.values()]:
            group.holders.clear()
            self._note_missing(group)

    @evolve.register
    def _(self, fact: records.ActorJoined) -> None:
        self.tokenizer_digest = self.tokenizer_digest or fact.tokenizer_digest
        self.held.setdefault(fact.actor_id, set())

    @evolve.register
    def _(self, fact: records.ActorLeft) -> None:
        self.held.pop(fact.actor_id, None)

    @evolve.register
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

    @evolve.register
    def _(self, fact: records.Leased) -> None:
        for sibling in fact.siblings:
            self._hand_out(fact.actor_id, fact.group_id, sibling)

    @evolve.register
    def _(self, fact: records.Adopted) -> None:
        self._hand_out(fact.actor_id, fact.group_id, fact.sibling)

    @evolve.register
    def _(self, fact: records.Delivered) -> None:
        self._let_go(fact.actor_id, fact.group_id, fact.sibling)
        group = self.opened.get(fact.group_id) or self.evaluating[fact.group_id]
        group.holders.pop(fact.sibling, None)
        group.summaries[fact.sibling] = fact.summary
        if group.kind == "train":
            group.payloads[fact.sibling] = fact.payload
            self.counters.deliver(fact.summary)
        else:
            self.evaluations[group.evaluation].delivered += 1
        self._note_missing(group)
        if group.closed:
            self._close(group)

    @evolve.register
    def _(self, fact: records.Superseded) -> None:
        self._let_go(fact.actor_id, fact.group_id, fact.sibling)
        self.counters.superseded += 1

    @evolve.register
    def _(self, fact: records.LeaseReturned) -> None:
        self._let_go(fact.actor_id, fact.group_id, fact.sibling)
        self.counters.returned += 1
        group = self.unfinished(fact.group_id)
        if group and group.holders.get(fact.sibling) == fact.actor_id:
            self._pass_on(group, fact.sibling)
            group.count_attempt(fact.sibling, fact.cause)
            self.failures.count(group, fact.sibling, fact.cause)
            self._note_missing(group)

    @evolve.register
    def _(self, fact: records.GroupDropped) -> None:
        self.dropped.add(fact.group_id)
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

    @evolve.register
    def _(self, fact: records.QuestionRetired) -> None:
        self.questions.retire(fact.question_id)

    @evolve.register
    def _(self, fact: records.Sampled) -> None:
        self.sampled |= {group_id: self.ready.pop(group_id) for group_id in fact.group_ids}
        self.batches[fact.step] = fact
        self.last_sampled = self.served = fact.step
        self.unannounced = [s for s in self.unannounced if s not in fact.evaluations]
        self.counters.sample(self.sampled[group_id] for group_id in fact.group_ids)

    @evolve.register
    def _(self, fact: records.Resampled) -> None:
        self.served = max(self.served, fact.step)

    @evolve.register
    def _(self, fact: records.StepsCommitted) -> None:
        for step in [step for step in self.batches if step <= fact.step]:
            for group_id in self.batches.pop(step).group_ids:
                del self.sampled[group_id]
                self.counters.committed += 1
        self.committed = max(self.committed, fact.step)

    @evolve.register
    def _(self, fact: records.LearnerResumed) -> None:
        self.catching_up = self.incarnation > 0
        self.incarnation, self.learner = fact.incarnation, fact.instance
        self.served = fact.step
        self.last_sampled = max(self.last_sampled, fact.step)

    @evolve.register
    def _(self, fact: records.CaughtUp) -> None:
        self.catching_up = False

    @evolve.register
    def _(self, fact: records.EvaluationOpened) -> None:
        total, siblings = len(self.eval_questions), len(self.eval_temperatures)
        pending = deque(self.eval_questions)
        evaluation = Evaluation(fact.step, pending, total, siblings)
        self.evaluations[fact.step] = self.under_way[fact.step] = evaluation

    @evolve.register
    def _(self, fact: records.EvaluationFinished) -> None:
        evaluation = self.under_way.pop(fact.result.step)
        evaluation.result = fact.result
        evaluation.answered.clear()
        self.results.append(fact.result)
        self.unannounced.append(fact.result.step)

    @evolve.register
    def _(self, fact: records.EvaluationVoided) -> None:
        del self.evaluations[fact.step], self.under_way[fact.step]
        self.failures.forget(fact.step)
        self.unannounced = [s for s in self.unannounced if s != fact.step]

    @evolve.register
    def _(self, fact: records.Reported) -> None:
        self.reports.append(StepReport(fact.step, fact.gauges))

    @evolve.register
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
