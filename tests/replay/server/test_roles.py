"""An actor's key opens what actors say, and nothing that ends, resumes or steers the run."""

import contextlib
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from configs.keys import ACTOR
from replay.clients.base import Caller
from replay.clients.launcher import ConfigReader, Observer
from replay.clients.learner import BatchReader
from replay.protocol import (
    Committed,
    Done,
    Evaluate,
    Finish,
    FromLauncher,
    FromLearner,
    Observe,
    RefusedByReplay,
    Report,
    Request,
    Resume,
    Sample,
    SamplePart,
    Shutdown,
)

TAKEN = (
    Resume(2, 0),
    Sample(1, 0),
    SamplePart(1, 0, 0),
    Committed(1, 0),
    Evaluate(1, 0),
    Report(1, 0, {}),
    Finish(1),
    Shutdown("over"),
    Observe(0, 0),
)


class Actor(Caller):
    """Somebody with an actor's key, who may say anything."""

    role = ACTOR

    def say(self, request: Request) -> None:
        self._call(request, Done, "an answer")


@pytest.fixture
def actor(serve) -> Iterator[tuple[Any, Actor]]:
    running = serve(tcp=True)
    with contextlib.closing(Actor(running.endpoint, 20.0, running.keys)) as found:
        yield running, found


def test_an_actors_key_steers_nothing(actor: tuple[Any, Actor], tmp_path) -> None:
    running, stranger = actor
    assert {type(request) for request in TAKEN} == set(get_args(FromLearner | FromLauncher))
    with BatchReader(running.endpoint, 1, 20.0, keys=running.keys) as learner:
        learner.resume(0)
        for number, request in enumerate(TAKEN, start=1):
            kind = type(request).__name__
            with pytest.raises(RefusedByReplay, match=f"{kind} with the key of actor: show the l"):
                stranger.say(request)
            assert running.server.gauges()["replay/refused_messages"] == number
        assert running.ledger.state.incarnation == 1 and not running.ledger.stop_cause
        learner.report(1, {"learner/loss": 0.5})
    with ConfigReader(running.endpoint, running.keys, 20.0) as joining:
        assert "run_dir" in joining.configuration()
    # What a machine that only acts needs: no secret but the actor's own.
    for path in running.keys.folder.iterdir():
        if path.name not in ("server.key", "actor.key_secret"):
            path.rename(tmp_path / path.name)
    stranger.close()
    with ConfigReader(running.endpoint, running.keys, 20.0) as joining:
        assert "run_dir" in joining.configuration()
    for path in tmp_path.iterdir():
        path.rename(running.keys.folder / path.name)
    with Observer(running.endpoint, 20.0, running.keys) as console:
        assert len(console.status().steps) == 1


def test_who_has_no_role_may_say_no_more_than_an_actor(actor: tuple[Any, Actor]) -> None:
    running, stranger = actor
    with pytest.raises(RefusedByReplay, match="with the key of actor"):
        stranger.say(Shutdown("over"))
    running.server._router._guard._roles.clear()  # its key is admitted, and means nothing now
    with pytest.raises(RefusedByReplay, match="with the key of nobody"):
        stranger.say(Shutdown("over"))
    assert not running.ledger.stop_cause
