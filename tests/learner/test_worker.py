"""The learner's process against a real replay and an actor around a transformers model."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from configs.keys import Addresses
from configs.load import load, save
from configs.runtime.process import Exit, socket_dir
from configs.runtime.signals import MAKE_WAY
from configs.schema import (
    ActorsConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    QuestionsConfig,
    ReplayConfig,
    ViewConfig,
    WeightSyncConfig,
)
from learner import worker
from learner.checkpoint import steps
from learner.metrics.applications import Applications
from learner.worker import main
from replay.clients.actor import TrajectoryWriter
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered, LearnerResumed, Reported, Resampled, Sampled
from replay.protocol import Hello, Lease
from replay.trajectory import StopReason, TokenSequence, Trajectory, Turn
from scripts.view.rollouts.tokens import values_of
from tests.children import ends_with_us
from weight_sync.buckets import Layout, NamedTensors, digest, dtype_name
from weight_sync.protocol import EngineDiffers
from weight_sync.receiver import Receiver
from weight_sync.subscriber import Subscriber


class Actor:
    """Samples four tokens after a fixed prompt; a ServingEngine of a transformers model."""

    prompt = (3, 4, 5)

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.receiver = Receiver(self._layout, self._load, self._checksum)
        self.version = 0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def set_policy_version(self, version: int) -> None:
        self.version = version

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[bytes]:
        name = method.removeprefix("weight_sync_")
        return [await asyncio.to_thread(getattr(self.receiver, name), *args)]

    async def score(self, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        row = torch.tensor([list(tokens)])
        logprobs = self.model(input_ids=row).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, row[0, 1:, None])[:, 0].numpy(), self.version

    def roll_out(self, lease: Lease) -> Trajectory:
        torch.manual_seed(lease.group_id * 10 + lease.sibling)
        tokens, logprobs = list(self.prompt), []
        for _ in range(4):
            distribution = self.model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(0)
            tokens.append(int(distribution.exp().multinomial(1)))
            logprobs.append(float(distribution[tokens[-1]]))
        turn = Turn(
            np.array(tokens[3:], np.int32),
            np.array(logprobs, np.float32),
            np.full(4, self.version, np.int32),
            np.zeros(0, np.int32),
        )
        return Trajectory(
            **{name: getattr(lease, name) for name in ("group_id", "sibling", "kind", "sampling")},
            question_id=lease.question.id,
            actor_id="actor-0",
            sequences=(TokenSequence(np.array(self.prompt, np.int32), (turn,)),),
            stop_reason=StopReason.ANSWERED,
            answer=None,
            reward=float(lease.sibling % 2),
        )

    async def serve(self, config: Config) -> None:
        """Follow versions and work off leases until replay says Stop."""
        verified: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        note: Callable[[int, int], None] = lambda i, v: verified.put_nowait((i, v))  # noqa: E731
        addresses = Addresses.of(config)
        endpoint = addresses.weight_sync.endpoint
        sync = Subscriber("actor-0", endpoint, self, config.weight_sync, note)
        background = [asyncio.create_task(sync.run())]
        hello, limits = Hello("actor-0", "digest"), config.replay
        endpoint = addresses.replay.endpoint
        try:
            first = await verified.get()
            async with TrajectoryWriter(endpoint, hello, limits.heartbeat_s, 20.0) as writer:
                writer.gauges = lambda: {"actor/tokens_per_s": 7.0}
                await writer.ready(8, *first)
                background.append(asyncio.create_task(self.announce(verified, writer)))
                while isinstance(lease := await writer.next(), Lease):
                    await sync.serving.wait()
                    await writer.deliver(self.roll_out(lease))
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)

    async def announce(
        self, verified: "asyncio.Queue[tuple[int, int]]", writer: TrajectoryWriter
    ) -> None:
        """State every verified version, leases or none: replay may wait for it to lease more."""
        while True:
            await writer.ready(8, *await verified.get())

    def _layout(self) -> Layout:
        return {n: (tuple(w.shape), dtype_name(w.dtype)) for n, w in self.weights.items()}

    def _load(self, named_tensors: NamedTensors) -> None:
        for name, tensor in named_tensors:
            self.weights[name].copy_(tensor)

    def _checksum(self, _: NamedTensors) -> str:
        return digest(
            weight.detach().view(torch.uint8).flatten() for weight in self.weights.values()
        )


@pytest.fixture
def whole(tmp_path: Path, tiny_model_path: Path) -> Config:
    """A run of four steps on one actor."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "who?", "answers": ["me"]}\n')
    config = Config(
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        questions=QuestionsConfig(train=str(questions), eval=str(questions)),
        actors=ActorsConfig(count=1, rollouts_in_flight=8),
        replay=ReplayConfig(groups_per_step=2, group_size=4, max_staleness=1),
        weight_sync=WeightSyncConfig(probe_tokens=16, probe_tolerance=1e-4),
        learner=LearnerConfig(total_steps=4, eval_every=2, checkpoint_every=2, lr=1e-3),
        view=ViewConfig(keep_steps=3),
    )
    save(config, tmp_path / "config.yaml")
    return config


@contextmanager
def processes(tmp_path: Path, *flags: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Replay, learner and its other ranks; killed if they are left."""
    path, started = tmp_path / "config.yaml", []
    ranks = range(1, load(path).learner.ranks)
    commands = [
        ("replay", *flags),
        ("learner", *flags),
        *(("learner", f"--rank={r}") for r in ranks),
    ]
    for package, *rest in commands:
        command = [sys.executable, "-m", f"{package}.worker", str(path), *rest]
        with (tmp_path / f"{package}.log").open("a") as log:
            started.append(subprocess.Popen(command, stderr=log, env=ends_with_us()))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


async def run_with(
    config: Config, tmp_path: Path, until: Callable[[Actor], bool], *flags: str
) -> tuple[Actor, str]:
    """Start replay and learner and act; SIGTERM the learner once `until`; returns its log."""
    actor = Actor(config.model.path)
    acting = asyncio.create_task(actor.serve(config))
    try:
        with processes(tmp_path, *flags) as (replay, learner, *ranks):
            while learner.poll() is None:
                await asyncio.wait([acting], timeout=0.1)
                assert not (acting.done() and acting.exception()), acting.exception()
                if until(actor):
                    learner.send_signal(signal.SIGTERM)
                    await asyncio.to_thread(learner.wait, 120)
            text = (tmp_path / "learner.log").read_text()
            assert learner.returncode == 0, text
            await asyncio.wait_for(acting, 60)
            assert [await asyncio.to_thread(p.wait, 60) for p in (replay, *ranks)] == [0] * (
                1 + len(ranks)
            )
    finally:
        shutil.rmtree(socket_dir(config.run_dir), ignore_errors=True)
    return actor, text


async def run_until_killed(config: Config, tmp_path: Path, until: Callable[[Actor], bool]) -> None:
    """Start replay and learner and act; SIGKILL both once `until`."""
    actor = Actor(config.model.path)
    acting = asyncio.create_task(actor.serve(config))
    with processes(tmp_path):
        while not until(actor):
            await asyncio.wait([acting], timeout=0.05)
            assert not acting.done(), acting.exception()
    acting.cancel()
    await asyncio.wait([acting])
    shutil.rmtree(socket_dir(config.run_dir))


@pytest.mark.slow
async def test_a_run_from_the_first_version_to_the_last(whole: Config, tmp_path: Path) -> None:
    actor, log = await run_with(whole, tmp_path, lambda _: False)
    assert "ended after step 4: completed" in log
    applied = [(each.actor, each.version) for each in Applications(whole.run_dir).news()]
    assert applied[0] == ("actor-0", 0) and applied[-1] == ("actor-0", 4)
    folder = Path(whole.run_dir) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step-2", "step-4"]
    trained = AutoModelForCausalLM.from_pretrained(folder / "step-4" / "model", dtype=torch.float32)
    for name, weight in trained.named_parameters():
        assert torch.equal(actor.weights[name], weight), "the actor serves the last version"
    events = EventAccumulator(str(Path(whole.run_dir) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/em")] == [0, 2, 4]
    assert [event.step for event in events.Scalars("learner/loss")] == [1, 2, 3, 4]
    assert max(event.value for event in events.Scalars("learner/mismatch_max")) < 1e-4
    assert max(event.value for event in events.Scalars("replay/staleness_max")) <= 1
    assert {"sync/publish_s", "replay/ready_groups", "actor/reward", "actor/tokens_per_s"} <= set(
        events.Tags()["scalars"]
    )
    look_at_tokens(Path(whole.run_dir))


def look_at_tokens(run: Path) -> None:
    """Of the newest three steps each rollout on record has its values, and what the weights of the
    step sampled has, under these, the log-prob that was recorded.
    """
    kept = {path.name for path in (run / "tokens").iterdir()}
    assert kept == {f"step-{step}.safetensors" for step in (2, 3, 4)}
    records = list(read(run / "events.log"))
    steps_of = {g: r.step for r in records if isinstance(r, Sampled) for g in r.group_ids}
    fresh = 0
    for record in (r for r in records if isinstance(r, Delivered)):
        if (step := steps_of.get(record.group_id, 1)) == 1:
            continue
        trajectory = decode_trajectory(record.payload)
        (values,) = values_of(run, step, (record.group_id, record.sibling), [4])
        if trajectory.newest_version == trajectory.oldest_version == step - 1:
            (turn,) = trajectory.turns
            assert values["current"] == pytest.approx(turn.behaviour_logprobs, abs=5e-3)
            fresh += 1
    assert fresh


@pytest.mark.soak("ranks")
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 2)])
async def test_a_killed_run_goes_on_from_its_checkpoint(
    whole: Config, tmp_path: Path, ranks: int, zero_stage: int
) -> None:
    learner = msgspec.structs.replace(
        whole.learner, total_steps=12, checkpoint_every=5, ranks=ranks, zero_stage=zero_stage
    )
    config = msgspec.structs.replace(whole, learner=learner)
    save(config, tmp_path / "config.yaml")
    await run_until_killed(config, tmp_path, lambda actor: actor.version >= 7)
    actor, log = await run_with(config, tmp_path, lambda _: False, "--resume")
    assert "resumed after step 5" in log and "ended after step 12: completed" in log
    records = list(read(Path(config.run_dir) / "events.log"))
    resumes = [(r.incarnation, r.step) for r in records if isinstance(r, LearnerResumed)]
    assert resumes == [(1, 0), (2, 5)]
    assert [r.step for r in records if isinstance(r, Sampled)] == list(range(1, 13))
    again = [r.step for r in records if isinstance(r, Resampled)]
    assert again == list(range(6, 6 + len(again))) and len(again) >= 2
    events = EventAccumulator(str(Path(config.run_dir) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("learner/loss")] == list(range(1, 13))
    assert [event.step for event in events.Scalars("eval/em")] == [0, 2, 4, 6, 8, 10, 12]
    assert actor.version == 12


@pytest.mark.slow
@pytest.mark.soak("ranks")
async def test_sigterm_ends_it_with_a_checkpoint(whole: Config, tmp_path: Path) -> None:
    endless = msgspec.structs.replace(
        whole, learner=LearnerConfig(total_steps=10_000, checkpoint_every=10_000, lr=1e-3)
    )
    save(endless, tmp_path / "config.yaml")
    _, log = await run_with(endless, tmp_path, lambda actor: actor.version >= 3)
    assert "stopping: SIGTERM" in log
    (saved,) = (Path(endless.run_dir) / "checkpoints").iterdir()
    assert f"ended after {saved.name.replace('-', ' ')}: SIGTERM" in log


@pytest.mark.slow
async def test_who_follows_a_learner_that_made_way_trains_nothing_again(
    whole: Config, tmp_path: Path
) -> None:
    learner = msgspec.structs.replace(whole.learner, total_steps=10, checkpoint_every=1000)
    config = msgspec.structs.replace(whole, learner=learner)
    save(config, tmp_path / "config.yaml")
    actor = Actor(config.model.path)
    acting = asyncio.create_task(actor.serve(config))
    with processes(tmp_path) as started:
        while actor.version < 1:
            await asyncio.wait([acting], timeout=0.05)
            assert not acting.done(), acting.exception()
        started[1].send_signal(MAKE_WAY)
        assert await asyncio.to_thread(started[1].wait, 120) == Exit.MADE_WAY
        (saved,) = steps(config.run_dir)
        assert 1 <= saved < 10 and started[0].poll() is None and not acting.done()
        command = [sys.executable, "-m", "learner.worker", str(tmp_path / "config.yaml")]
        started.append(subprocess.Popen([*command, "--resume"], env=ends_with_us()))
        assert await asyncio.to_thread(started[2].wait, 120) == 0
        await asyncio.wait_for(acting, 60)
        assert await asyncio.to_thread(started[0].wait, 60) == 0
    records = list(read(Path(config.run_dir) / "events.log"))
    resumes = [(r.incarnation, r.step) for r in records if isinstance(r, LearnerResumed)]
    assert resumes == [(1, 0), (2, saved)]
    assert [r.step for r in records if isinstance(r, Reported)] == list(range(1, 11))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(whole: Config, tmp_path: Path) -> None:
    learner = msgspec.structs.replace(whole.learner, ranks=2, step_deadline_s=2.0)
    config = msgspec.structs.replace(whole, learner=learner)
    save(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "learner.worker", str(tmp_path / "config.yaml")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=ends_with_us()
    )
    shutil.rmtree(socket_dir(config.run_dir))
    assert done.returncode == Exit.CONSEQUENCE, done.stderr
    assert "ranks [1] of the learner have not joined within 2 s" in done.stderr


def test_bad_input_is_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert main([str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml' does not exist" in capsys.readouterr().err


def test_an_engine_that_computes_another_model_ends_the_run_for_good(
    whole: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: object) -> None:
        raise EngineDiffers("mean 1.3: set model.dtype")

    for name in ("begin", "make_socket_dir", "on_stop"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    monkeypatch.setattr(worker, "work", work)
    save(whole, tmp_path / "config.yaml")
    assert main([str(tmp_path / "config.yaml")]) == Exit.FINAL
    assert capsys.readouterr().err == "learner: mean 1.3: set model.dtype\n"
