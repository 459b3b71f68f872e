"""A real replay server in a thread, on a socket of its own, and trajectories to send it."""

import shutil
import socket as socketlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
import zmq

from configs.keys import LEARNER, Addresses, Keys
from configs.load import dump
from configs.schema import ActorsConfig, Config, LearnerConfig, ReplayConfig
from replay.codec import decode_trajectory, encode, encode_trajectory
from replay.ledger.ledger import Ledger
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.history import Searched
from replay.log.records import Delivered, GroupOpened, RunStarted
from replay.log.summary import summarise
from replay.protocol import Lease, LogError, Observe
from replay.questions import Questions
from replay.server.server import ReplayServer
from replay.trajectory import Question, Sampling, StopReason, TokenSequence, Trajectory, Turn

QUESTIONS = tuple(Question(f"q-{i}", f"question {i}?", (f"answer {i}",), 1) for i in range(50))
EVAL_QUESTIONS = (Question("e-1", "evaluation?", ("yes",), 2),)


def trajectory_for(
    lease: Lease, actor_id: str = "actor-0", reward: float = 1.0, version: int = 0
) -> Trajectory:
    """A short rollout of `lease` under one version."""
    turn = Turn(
        action_tokens=np.array([5, 6, 7], np.int32),
        behaviour_logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
        policy_versions=np.full(3, version, np.int32),
        observation_tokens=np.array([8], np.int32),
    )
    return Trajectory(
        group_id=lease.group_id,
        sibling=lease.sibling,
        question_id=lease.question.id,
        kind=lease.kind,
        actor_id=actor_id,
        sampling=lease.sampling,
        sequences=(TokenSequence(np.array([1, 2], np.int32), (turn,)),),
        stop_reason=StopReason.ANSWERED,
        answer="an answer",
        reward=reward,
        attempt=lease.attempt,
    )


def record_searches(run_dir: Path, config: Config, *rollouts: Searched) -> Path:
    """A run's directory with the log of rollouts that searched thus."""
    run_dir.mkdir(exist_ok=True)
    opened: set[int] = set()
    with EventLog.create(run_dir / FILE_NAME) as log:
        log.append([RunStarted(0.0, config.seed, dump(config))])
        for each in rollouts:
            if each.group_id not in opened:
                log.append([GroupOpened(0.0, each.group_id, each.kind, each.question, 1, 0)])
            opened.add(each.group_id)
            log.append([_delivered(each)])
    return run_dir


def _delivered(searched: Searched) -> Delivered:
    group_id, sibling = searched.group_id, searched.sibling
    how = Sampling(1.0, searched.seed)
    made = trajectory_for(Lease(group_id, sibling, searched.kind, searched.question, how))
    turns = tuple(msgspec.structs.replace(made.turns[0], searches=s) for s in searched.turns)
    only = TokenSequence(made.prompt_tokens, turns)
    made = msgspec.structs.replace(made, sequences=(only,))
    payload, summary = encode_trajectory(made), summarise(made)
    return Delivered(searched.now, searched.actor_id, group_id, sibling, payload, summary)


def free_port() -> str:
    """An endpoint on the loopback that nobody uses."""
    with socketlib.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def new_ledger(config: Config, eval_questions: tuple[Question, ...] = EVAL_QUESTIONS) -> Ledger:
    return Ledger(
        config.replay,
        Questions(QUESTIONS, config.seed),
        eval_questions,
        Sampling(1.0, config.seed),
        lambda payload: summarise(decode_trajectory(payload)),
    )


@contextmanager
def served(config: Config, log_path: Path) -> Iterator[None]:
    """Replay serves this in a thread meanwhile."""
    with EventLog.create(log_path) as log:
        server = ReplayServer(config, new_ledger(config), log)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield
        finally:
            server.stop("test")
            server.stop("test")
            thread.join(30.0)
        assert not thread.is_alive()


@dataclass
class Running:
    """A served run."""

    config: Config
    ledger: Ledger
    server: ReplayServer
    thread: threading.Thread
    log_path: Path
    errors: list[LogError] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return self.config.replay.endpoint

    @property
    def keys(self) -> Keys | None:
        return Addresses.of(self.config).replay.keys

    def end(self, seconds: float = 30.0) -> None:
        """Stop at once; the thread must end."""
        self.server.stop("test")
        self.server.stop("test")
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            if self.keys:
                self.keys.present(socket, LEARNER)
            socket.connect(self.endpoint)
            socket.send(encode(Observe(0, 0)))  # wakes it up
            self.thread.join(seconds)
        assert not self.thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """serve(log_class, **replay settings) → Running; everything is gone after the test."""
    folder = Path(tempfile.mkdtemp(prefix="forage-test-"))
    started: list[Running] = []

    def start(
        log_class: type[EventLog] = EventLog,
        drain_deadline_s: float = 2.0,
        tcp: bool = False,
        **replay: object,
    ) -> Running:
        place = free_port() if tcp else f"ipc://{folder}/replay{len(started)}"
        settings = {"groups_per_step": 1, "group_size": 2, "heartbeat_s": 0.05, **replay}
        config = Config(
            run_dir=str(folder),
            replay=msgspec.convert({"endpoint": place, **settings}, ReplayConfig),
            actors=ActorsConfig(drain_deadline_s=drain_deadline_s),
            learner=LearnerConfig(step_deadline_s=2.0),
        )
        path = folder / f"{len(started)}-{FILE_NAME}"
        ledger, log = new_ledger(config), log_class.create(path)
        text = yaml.safe_dump(msgspec.to_builtins(config))
        began = RunStarted(time.time(), config.seed, text)
        ledger.restore([began])
        log.append([began])
        server = ReplayServer(config, ledger, log)
        errors: list[LogError] = []
        thread = threading.Thread(target=_serve, args=(server, log, errors))
        started.append(Running(config, ledger, server, thread, path, errors))
        thread.start()
        return started[-1]

    yield start
    for running in started:
        running.end()
    shutil.rmtree(folder)


def _serve(server: ReplayServer, log: EventLog, errors: list[LogError]) -> None:
    try:
        with log:
            server.run()
    except LogError as error:
        errors.append(error)


@pytest.fixture
def rollout() -> Callable[..., Trajectory]:
    """rollout(lease, actor_id, reward, version) → Trajectory."""
    return trajectory_for


@pytest.fixture
def fresh_ledger() -> Callable[..., Ledger]:
    """fresh_ledger(config) → the ledger that a served run began with."""
    return new_ledger


@pytest.fixture
def endpoint() -> Callable[[], str]:
    """endpoint() → one on the loopback that nobody uses."""
    return free_port
