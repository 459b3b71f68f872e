"""The ends of groups, questions, evaluations and the run, other than by being trained.

Each function may be called after any event: where nothing has ended it writes nothing.
"""

from itertools import takewhile

from replay.ledger.evaluation import summarise_evaluation
from replay.ledger.groups import Group
from replay.ledger.state import Journal, LedgerState
from replay.log import records


def drop(journal: Journal, group: Group, cause: str) -> None:
    """Record that this group will never be trained."""
    journal.write(records.GroupDropped(journal.now, group.group_id, cause))


def drop_if_failing(journal: Journal, group_id: int) -> None:
    """Drop an unfinished group, one of whose siblings has failed too often; retire its question."""
    state = journal.state
    group = state.unfinished(group_id)
    if group is None:
        return
    failures = max((state.failures.of(group, i) for i in group.undelivered), default=0)
    if failures >= state.config.max_question_failures:
        _give_up(journal, group, failures)


def _give_up(journal: Journal, group: Group, failures: int) -> None:
    drop(journal, group, "question_failed")
    if group.kind == "train":
        journal.write(records.QuestionRetired(journal.now, group.question.id, failures))


def drop_expired(journal: Journal, serving_since: float) -> None:
    """Drop groups past their deadline; time in which replay was down does not count."""
    state = journal.state

    def expired(group: Group) -> bool:
        age = journal.now - max(group.opened_at, serving_since)
        return age >= state.config.group_deadline_s

    # They stand in the order in which they were opened: the younger ones are not looked at.
    places = (state.opened, state.evaluating)
    for group in [each for place in places for each in takewhile(expired, place.values())]:
        if state.stop_cause:
            return
        failures = 1 + max(state.failures.of(group, i) for i in group.undelivered)
        if failures >= state.config.max_question_failures:
            _give_up(journal, group, failures)
        else:
            drop(journal, group, "group_deadline")


def settle_closed(journal: Journal, group: Group) -> None:
    """Drop a group that has just closed with nothing to learn from: unscorable as a whole (a judge
    that is down must not use up steps), or without signal, where configured. Stop where none has
    any (`Streaks`).
    """
    state = journal.state
    if group.kind == "train" and not group.rewards:
        drop(journal, group, "unscorable")
    elif group.kind == "train" and state.config.drop_no_signal and not group.has_signal:
        drop(journal, group, "no_signal")
    if not state.stop_cause:
        why = next((s.reward_cause for s in group.summaries.values() if s.reward is None), "")
        if cause := state.counters.streaks.end(state.config.groups_per_step, why):
            end_run(journal, cause)


def finish_evaluations(journal: Journal) -> None:
    """Write the result of each evaluation that is complete."""
    state = journal.state
    for evaluation in list(state.under_way.values()):
        if evaluation.complete:
            result = summarise_evaluation(evaluation, state.eval_questions)
            journal.write(records.EvaluationFinished(journal.now, result))


def stop_failing(journal: Journal, cause: str) -> None:
    """Stop where rollout after rollout was failed by its program, the last by this cause."""
    config, streaks = journal.state.config, journal.state.counters.streaks
    if why := streaks.failing(config.groups_per_step * config.group_size, cause):
        end_run(journal, why)


def stop_without_questions(journal: Journal) -> None:
    """Stop where every train question is retired."""
    if journal.state.questions.peek() is None:
        end_run(journal, "every train question has failed too often and is retired")


def end_run(journal: Journal, cause: str) -> None:
    """Stop for this cause; the first one stays. What is not sampled is dropped as `run_ended`."""
    state = journal.state
    if state.stop_cause:
        return
    journal.write(records.Stopped(journal.now, cause))
    for group in _unsampled(state):
        drop(journal, group, "run_ended")


def void_after(journal: Journal, step: int) -> None:
    """Forget the unfinished evaluations of steps that a resumed learner will train again.

    A finished one stays, as a result of the version that it measured: the same batches, trained
    again, make the same one, unless `learner.total_steps` has changed and the rate depends on it.
    """
    state = journal.state
    for lost in [lost for lost in state.under_way if lost > step]:
        for group in [g for g in state.evaluating.values() if g.evaluation == lost]:
            drop(journal, group, "resumed")
        journal.write(records.EvaluationVoided(journal.now, lost))


def drop_untrainable(journal: Journal, step: int) -> None:
    """A learner is ahead of all recorded batches: what it trained since is unknown here."""
    state = journal.state
    if step > state.last_sampled:
        for group in [*state.opened.values(), *state.ready.values()]:
            drop(journal, group, "resumed")


def _unsampled(state: LedgerState) -> list[Group]:
    return [*state.opened.values(), *state.ready.values(), *state.evaluating.values()]
