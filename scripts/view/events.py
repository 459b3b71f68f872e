"""What a run's events are called, and their words."""

from replay.log import records as facts


def refitted(count: float) -> str:
    """The words of refits: so many since the learner began."""
    times = "once" if count == 1 else f"{count:.0f} times"
    return f"weights that an actor did not verify were sent again ({times} since the learner began)"


def said(record: facts.Record) -> tuple[str, str] | None:
    """A record as an event of the run: its kind and words; None for those that are told by curves
    and tables.
    """
    match record:
        case facts.RunStarted():
            return "start", "the run starts"
        case facts.RunResumed():
            return "restart", "the run goes on, in new processes"
        case facts.ReplayRestarted():
            return "restart", "replay was started again"
        case facts.LearnerResumed():
            done = f"goes on after step {record.step}" if record.step else "begins"
            return "restart", f"the learner {done}"
        case facts.ActorJoined():
            return "actor", f"{record.actor_id} has joined"
        case facts.ActorLeft():
            return "actor", f"{record.actor_id} has left: {record.cause}"
        case facts.StepsCommitted():
            return "checkpoint", f"checkpoint of step {record.step}"
        case facts.GroupDropped():
            return "group", f"group {record.group_id} is dropped: {record.cause}"
        case facts.QuestionRetired():
            return "drop", f"question {record.question_id} is asked no more"
        case facts.LeaseReturned():
            return "drop", f"a rollout ended without a trajectory: {record.cause}"
        case facts.Stopped():
            return "stop", f"the run stops: {record.cause}"
        case _:
            return None
