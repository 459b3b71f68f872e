"""A small run's event log, written by a real ledger: one actor that serves every version at once,
and a learner; and a run's directory as a killed run leaves it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from configs.load import ConfigError, parse, save
from configs.schema import Config, LearnerConfig, ModelConfig, ReplayConfig
from learner import checkpoint
from replay.codec import decode_trajectory, encode_trajectory
from replay.ledger.events import Event
from replay.ledger.ledger import Ledger
from replay.log.event_log import FILE_NAME, SEGMENT_BYTES, EventLog
from replay.log.records import Record, RunStarted
from replay.log.summary import summarise
from replay.protocol import (
    Batch,
    Deliver,
    Evaluate,
    Hello,
    Lease,
    Leases,
    Ready,
    Report,
    Resume,
    Sample,
)
from replay.questions import Questions
from replay.trajectory import Question, Sampling, TokenSequence, Trajectory, Turn
from scripts.fleet import resume
from tests.replay.conftest import trajectory_for

QUESTIONS = tuple(Question(f"q-{i}", f"question {i} ?", (str(i),), 1) for i in range(20))


def as_text(config: Config) -> str:
    """The configuration as a log holds it."""
    return yaml.safe_dump(msgspec.to_builtins(config))


def rollout_of(lease: Lease, version: int, reward: float, sequences: int = 1) -> Trajectory:
    """Two turns a sequence of tokens that any model has, seeded by the lease."""
    random = np.random.default_rng((lease.group_id, lease.sibling))
    made = [_sequence(random, version, "" if n == 1 else str(n)) for n in range(1, sequences + 1)]
    return msgspec.structs.replace(trajectory_for(lease, "actor", reward), sequences=tuple(made))


def _sequence(random: np.random.Generator, version: int, name: str) -> TokenSequence:
    turns = tuple(
        Turn(
            action_tokens=random.integers(3, 20, 4, np.int32),
            behaviour_logprobs=-random.random(4, np.float32) - 1,
            policy_versions=np.full(4, version, np.int32),
            observation_tokens=random.integers(3, 20, 2 - 2 * turn, np.int32),
        )
        for turn in range(2)
    )
    return TokenSequence(random.integers(3, 20, 5, np.int32), turns, name)


class RecordedRun:
    """Its log is at `path`; sibling i is rewarded i unless told otherwise."""

    def __init__(
        self, path: Path, config: Config, segment_bytes: int, digest: str = "digest"
    ) -> None:
        self.path, self.now, self.incarnation = path, 1.0, 1
        self.leases: list[Lease] = []
        self.ledger = Ledger(
            config.replay,
            Questions(QUESTIONS, config.seed),
            QUESTIONS[:2],
            Sampling(1.0, config.seed),
            lambda payload: summarise(decode_trajectory(payload)),
        )
        self.log = EventLog.create(path / FILE_NAME, segment_bytes)
        self.append(RunStarted(0.0, config.seed, as_text(config)))
        self.send("learner", Resume(1, 0))
        self.send("actor", Hello("actor", digest))
        self.send("actor", Ready("actor", 100, 1, 0))

    def append(self, *facts: Record) -> None:
        """Write to the log what the ledger does not know."""
        self.log.append(facts)
        self.log.sync()

    def send(self, peer: str, message: Any) -> Any:
        """Apply, write, then hand out; the direct reply."""
        outcome = self.ledger.apply(Event(peer, message), self.now)
        self.log.append(outcome.records)
        self.log.sync()
        direct = None
        for _, reply in outcome.replies:
            if isinstance(reply, Leases):
                self.leases += reply.leases
            else:
                direct = reply
        return direct

    def deliver_all(
        self, version: int = 0, reward: float | None = None, sequences: int = 1
    ) -> None:
        """Deliver what the actor holds now."""
        held, self.leases = self.leases, []
        for lease in held:
            earned = float(lease.sibling) if reward is None else reward
            payload = encode_trajectory(rollout_of(lease, version, earned, sequences))
            self.send("actor", Deliver("actor", lease.group_id, lease.sibling, payload))

    def evaluate(self, step: int) -> None:
        """The learner asks for an evaluation."""
        self.send("learner", Evaluate(self.incarnation, step))

    def sample(self, step: int) -> Batch:
        """The learner asks for the batch of step + 1."""
        batch = self.send("learner", Sample(self.incarnation, step))
        assert isinstance(batch, Batch)
        return batch

    def train(self, step: int, sequences: int = 1) -> Batch:
        """The actor serves version `step` and rolls out; the learner is given its batch."""
        self.send("actor", Ready("actor", 100, self.incarnation, step))
        self.deliver_all(step, sequences=sequences)
        return self.sample(step)

    def report(self, step: int, gauges: dict[str, float]) -> None:
        """The learner's numbers after `step`."""
        self.send("learner", Report(self.incarnation, step, gauges))

    def resume(self, step: int) -> None:
        """Another learner goes on after `step`."""
        self.incarnation += 1
        self.send("learner", Resume(self.incarnation, step))


class Exporter:
    """A trainer without weights."""

    def export(self, folder: Path) -> None:
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "rank-0.safetensors").touch()


class Folder:
    """A run's directory as a killed run leaves it."""

    def __init__(self, path: Path, inputs: dict[str, str]) -> None:
        self.path = path
        path.mkdir()
        overrides = [f"{k}={v}" for k, v in inputs.items()]
        given = [*overrides, f"run_dir={path}", "learner.total_steps=40", "seed=3"]
        self.config = parse("", given, "the schema's defaults")
        save(self.config, path / "config.yaml")

    def log(self, *records: Record) -> "Folder":
        started = RunStarted(1.0, self.config.seed, as_text(self.config))
        with EventLog.create(self.path / "events.log") as log:
            log.append([started, *records])
        return self

    def edited(self, field: str, value: object) -> "Folder":
        tree = yaml.safe_load((self.path / "config.yaml").read_text())
        *sections, name = field.split(".")
        (tree[sections[0]] if sections else tree)[name] = value
        (self.path / "config.yaml").write_text(yaml.safe_dump(tree))
        return self

    def saved(self, step: int) -> "Folder":
        checkpoint.save(self.config, step, Exporter(), None)
        return self

    def checked(self, *overrides: str, path: str | None = None) -> tuple[Config, resume.Progress]:
        return resume.checked(str(self.path), path, overrides)

    def refused(self, *overrides: str, path: str | None = None) -> str:
        before = {p: p.read_bytes() for p in self.path.rglob("*") if p.is_file()}
        with pytest.raises(ConfigError) as raised:
            self.checked(*overrides, path=path)
        assert before == {p: p.read_bytes() for p in self.path.rglob("*") if p.is_file()}
        return str(raised.value)


@pytest.fixture
def make_recorded_run(tmp_path: Path) -> Iterator[Callable[..., RecordedRun]]:
    """make_recorded_run(model, segment_bytes, digest, **replay): a run of 3 steps of two groups of
    two; `digest` is the tokenizer's.
    """
    runs: list[RecordedRun] = []

    def make(
        model: str = "", segment_bytes: int = SEGMENT_BYTES, digest: str = "digest", **replay: Any
    ) -> RecordedRun:
        config = Config(
            model=ModelConfig(path=model, dtype="float32", max_model_len=256),
            replay=ReplayConfig(groups_per_step=2, group_size=2, max_staleness=0, **replay),
            learner=LearnerConfig(total_steps=3, lr=1e-3, warmup_steps=0),
        )
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        runs.append(RecordedRun(folder, config, segment_bytes, digest))
        return runs[-1]

    yield make
    for run in runs:
        run.log.close()


@pytest.fixture
def recorded_run(make_recorded_run: Callable[..., RecordedRun]) -> RecordedRun:
    """One such run, with nothing trained yet."""
    return make_recorded_run()


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    """Overrides that name a model, questions and a corpus."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 96, "max_position_embeddings": 4096}')
    (model / "model.safetensors").write_bytes(b"0" * 8)
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["me"]}\n')
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "Title\\ntext"}\n')
    return {
        "model.path": str(model),
        "questions.train": str(tmp_path / "q.jsonl"),
        "questions.eval": str(tmp_path / "q.jsonl"),
        "retrieval.corpus": str(tmp_path / "c.jsonl"),
        "actors.kv_cache_bytes": "1000000",
    }


@pytest.fixture
def folder(tmp_path: Path, inputs: dict[str, str]) -> Folder:
    return Folder(tmp_path / "run", inputs)


class Averaged:
    """A trainer whose weights, and their average, are a word each."""

    def export(self, folder: Path) -> None:
        for part in ("model", "ema"):
            (folder / part).mkdir(parents=True)
            (folder / part / "config.json").write_text("{}")
            (folder / part / "model.safetensors").write_text(part)


class Tokenizer:
    """Saves itself as one file."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def checkpointed(folder: Folder) -> Path:
    """A run with the checkpoints of steps 10 and 20; 10 is the best."""
    tokenizer: Any = Tokenizer()
    for step in (10, 20):
        checkpoint.save(folder.config, step, Averaged(), tokenizer)
    checkpoint.retain(folder.path, 2, lambda _: 10)
    return folder.path
