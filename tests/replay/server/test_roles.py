"""An actor's key opens what actors say, and nothing that ends, resumes or steers the run."""

import contextlib
from collections.abc import Iterator
from typing import Any

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
    Observe,
    RefusedByReplay,
    Report,
    Request,
    Resume,
    Sample,
    Shutdown,
)

TAKEN = (
    Resume(2, 0),
    Sample(1, 0),
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
    with BatchReader(running.endpoint, 1, 20.0, keys=running.keys) as learner:
        learner.resume(0)
        for number, request in enumerate(TAKEN, start=1):
            kind = type(request).__name__
            with pytest.raises(RefusedByReplay, match=f"{kind} with an actor's key: show the l"):
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
