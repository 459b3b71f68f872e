"""The kinds of a run's processes, which their names tell. A leaf module."""

REPLAY, LEARNER, ACTOR, RETRIEVAL = "replay", "learner", "actor", "retrieval_server"


def kind_of(name: str) -> str:
    """The kind of a process, by its name: one of replay, learner, actor, retrieval_server."""
    return next(kind for kind in (REPLAY, LEARNER, ACTOR, RETRIEVAL) if name.startswith(kind))


def is_rank(name: str) -> bool:
    """True for a process of the learner."""
    return kind_of(name) == LEARNER


def is_actor(name: str) -> bool:
    """True for an actor."""
    return kind_of(name) == ACTOR
