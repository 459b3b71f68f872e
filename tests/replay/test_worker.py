"""The process: its exit codes, its messages, what it leaves."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.keys import Addresses
from configs.load import ConfigError, load
from configs.runtime.files import MOST_IDS, vocabulary_of
from configs.runtime.process import socket_dir
from replay.clients.launcher import Observer
from replay.clients.learner import BatchReader
from replay.log.event_log import FILE_NAME, EventLog, read, read_whole
from replay.log.records import Reported, RunResumed, RunStarted, Stopped
from replay.protocol import RefusedByReplay
from replay.worker import main, make_ledger, make_log
from tests.children import ends_with_us

PYTHON = [sys.executable, "-m", "replay.worker"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    questions = tmp_path / "train.jsonl"
    questions.write_text('{"question": "who?", "answers": ["me"]}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\n"
        f"questions: {{train: {questions}, eval: {questions}}}\n"
        "seed: 7\n"
        "actors: {drain_deadline_s: 1}\n"
    )
    return path


@pytest.fixture
def worker(config: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PYTHON, str(config)], stderr=subprocess.PIPE, text=True, env=ends_with_us()
    )
    yield process
    process.kill()
    process.communicate()


def run_dir(config: Path) -> Path:
    return Path(load(config).run_dir)


def test_serves_and_exits_0_on_sigterm(config: Path, worker) -> None:
    endpoint = Addresses.of(load(config)).replay.endpoint
    with BatchReader(endpoint, 1, 30.0) as trainer, Observer(endpoint) as console:
        trainer.resume(0)
        trainer.report(1, {"learner/loss": 0.5})
        assert console.status().steps[0].gauges == {"learner/loss": 0.5}
    worker.send_signal(signal.SIGTERM)
    _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 0, errors
    facts = list(read(run_dir(config) / FILE_NAME))
    assert isinstance(facts[0], RunStarted)
    assert (facts[0].seed, "seed: 7" in facts[0].config) == (7, True)
    assert [fact.gauges for fact in facts if isinstance(fact, Reported)] == [{"learner/loss": 0.5}]
    assert [fact.cause for fact in facts if isinstance(fact, Stopped)] == ["SIGTERM"]
    assert not socket_dir(load(config).run_dir).exists()


def test_run_directory_in_use_is_bad_input(config: Path, capsys) -> None:
    run_dir(config).mkdir()
    (run_dir(config) / FILE_NAME).write_bytes(b"somebody's history")
    assert main([str(config)]) == 2
    assert "events.log already exists: choose another run_dir" in capsys.readouterr().err
    assert (run_dir(config) / FILE_NAME).read_bytes() == b"somebody's history"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["questions.train="], "questions.train = ''"),
        (["questions.train=/none.jsonl"], "/none.jsonl"),
        (["run_dir="], "run_dir = ''"),
        (["run_dir=/proc/none"], "run_dir = '/proc/none'"),
        (["replay.group_sise=3"], "replay.group_size"),
        (["replay.endpoint=ipc:///none/replay"], "replay.endpoint = 'ipc:///none/replay'"),
    ],
)
def test_bad_input_is_named(config: Path, capsys, overrides: list[str], words: str) -> None:
    assert main([str(config), *overrides]) == 2
    assert words in capsys.readouterr().err


def test_rows_that_cannot_be_used_are_left_out_and_named(config: Path) -> None:
    with Path(load(config).questions.train).open("a") as file:
        file.write('{"question": "who?"}\n{"question": "what?", "answers": ["it"]}\n{\n')
    told: list[str] = []
    make_ledger(load(config), told.append)
    assert len(told) == 4 and told[:2] == [line.replace("eval", "train") for line in told[2:]]
    assert told[0].startswith("questions.train: left out: 2 of 4 rows cannot be used: ")
    assert "train.jsonl:2: " in told[0] and "train.jsonl:4: not JSON" in told[1]


def test_no_configuration_shows_the_usage(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "usage" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_log(config: Path, worker) -> None:
    endpoint, path = Addresses.of(load(config)).replay.endpoint, run_dir(config) / FILE_NAME
    with BatchReader(endpoint, 1, 30.0) as trainer:
        trainer.resume(0)
        trainer.report(1, {"learner/loss": 0.5})
    worker.kill()
    worker.wait()
    path.write_bytes(path.read_bytes() + b"cut")
    before = list(read_whole(path))
    again = subprocess.Popen([*PYTHON, str(config), "--resume"], env=ends_with_us())
    try:
        with BatchReader(endpoint, 1, 30.0) as late, BatchReader(endpoint, 2, 30.0) as trainer:
            with pytest.raises(RefusedByReplay, match="must exceed 1"):
                late.resume(0)
            assert trainer.resume(1) == 0
            trainer.finish()
        assert again.wait(timeout=30) == 0
    finally:
        again.kill()
        again.wait()
    facts = list(read(path))
    assert facts[: len(before)] == before and isinstance(facts[len(before)], RunResumed)


def test_a_log_that_cannot_be_read_is_refused_and_kept(config: Path, capsys) -> None:
    assert main([str(config), "--resume"]) == 2
    assert "events.log: cannot be appended to: No such file" in capsys.readouterr().err
    run_dir(config).mkdir()
    (run_dir(config) / FILE_NAME).write_bytes(b"somebody's history")
    assert main([str(config), "--resume"]) == 2
    assert "offset 0: not an event log" in capsys.readouterr().err
    assert (run_dir(config) / FILE_NAME).read_bytes() == b"somebody's history"


def test_a_resumed_log_outlives_a_failed_start(config: Path) -> None:
    path = run_dir(config) / FILE_NAME
    path.parent.mkdir()
    with EventLog.create(path) as log:
        log.append([RunStarted(0.0, 7, "")])
    before = path.read_bytes()
    assert main([str(config), "--resume", "replay.endpoint=ipc:///none/replay"]) == 2
    assert path.read_bytes() == before


def test_the_log_goes_on_in_segments_of_the_configured_size(config: Path) -> None:
    settings = load(config, [f"replay.segment_bytes={1 << 20}"])
    large = Stopped(1.0, "x" * (1 << 20))
    log, _ = make_log(settings, make_ledger(settings), resume=False, restart=False)
    with log:
        log.append([large])
        log.sync()
        log.append([large])
    assert log.path.with_name("events.log.000001").is_file()
    log, _ = make_log(settings, make_ledger(settings), resume=True, restart=False)
    with log:
        log.append([large])
    assert log.path.with_name("events.log.000002").is_file() and list(read(log.path)) == [large] * 3
    with pytest.raises(ConfigError, match=r"replay\.segment_bytes = 1000"):
        load(config, ["replay.segment_bytes=1000"])


def test_failed_start_leaves_nothing_behind(config: Path) -> None:
    assert main([str(config), "replay.endpoint=ipc:///none/replay"]) == 2
    assert main([str(config), "questions.train=/none.jsonl"]) == 2
    assert not (run_dir(config) / FILE_NAME).exists()


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ('{"vocab_size": 320}', 320),
        ('{"text_config": {"vocab_size": 64}}', 64),
        ('{"vocab_size": null}', MOST_IDS),
        ("{", MOST_IDS),
        ("", MOST_IDS),
    ],
)
def test_the_vocabulary_is_the_models(tmp_path: Path, told: str, count: int) -> None:
    if told:
        (tmp_path / "config.json").write_text(told)
    assert vocabulary_of(str(tmp_path)) == count
