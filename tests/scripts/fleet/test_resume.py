"""What may go on and what is refused, before anything is started and without a change."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from configs.keys import Keys
from configs.load import ConfigError, load
from configs.runtime.process import socket_dir
from replay.log import compaction, tail
from replay.log.event_log import EventLog
from replay.log.format import HEADER
from replay.log.records import LearnerResumed, Reported, RunResumed, StepsCommitted, Stopped
from replay.log.segments import opened
from replay.log.snapshots import Snapshot, write_snapshot
from replay.restoring import restore
from replay.worker import make_ledger
from scripts import cli
from scripts.fleet import resume
from scripts.fleet.guardian import PID_FILE
from scripts.setup.fit import fitted
from scripts.setup.resolve import with_port
from tests.replay.conftest import record_searches
from tests.retrieval_server.conftest import serving
from tests.scripts.conftest import Folder, as_text

BEGUN = [LearnerResumed(2.0, 1, 0)]
TRAINED = [LearnerResumed(3.0, 1, 20), StepsCommitted(4.0, 1, 20), Reported(5.0, 1, 20, {})]


def test_a_killed_run_goes_on_as_recorded(folder: Folder) -> None:
    config, progress = folder.log(*BEGUN, *TRAINED).saved(20).checked()
    assert config.retrieval.port > 0
    same = msgspec.structs.replace(config, retrieval=folder.config.retrieval)
    assert same == folder.config
    assert progress == resume.Progress(log=True, reports=1, step=20)


def test_a_run_killed_before_its_first_record_goes_on(folder: Folder) -> None:
    assert folder.checked()[1] == resume.Progress()


def test_a_log_cut_short_in_its_last_record_is_no_obstacle(folder: Folder) -> None:
    log = folder.log(*BEGUN, *TRAINED).saved(20).path / "events.log"
    log.write_bytes(log.read_bytes()[:-3])
    assert folder.checked()[1].reports == 0


def test_no_closed_segment_is_read_but_the_oldest(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.log(*BEGUN).saved(20).path / "events.log"
    for _ in range(4):
        with EventLog.open(path, segment_bytes=1) as log:
            log.append(TRAINED)
    ledger = make_ledger(folder.config)
    restore(ledger, path, lambda *_: None)
    with EventLog.open(path) as log:
        write_snapshot(path, log.segment, Snapshot(log.name, log.records, ledger.image))
    seen: list[str] = []
    for module in (tail, compaction):
        monkeypatch.setattr(module, "opened", lambda p: seen.append(p.name) or opened(p))
    assert folder.checked()[1] == resume.Progress(log=True, reports=4, step=20)
    assert set(seen) == {"events.log", "events.log.000004"}


def test_cadence_and_length_may_change(folder: Folder, tmp_path: Path) -> None:
    folder.log(*BEGUN)
    (tmp_path / "more.yaml").write_text(
        "learner: {checkpoint_every: 7, total_steps: 50}\nseed: 3\n"
    )
    config, _ = folder.checked("learner.eval_every=9", path=str(tmp_path / "more.yaml"))
    learner = msgspec.structs.replace(
        folder.config.learner, total_steps=50, eval_every=9, checkpoint_every=7
    )
    assert config.learner == learner


def test_ranks_stage_and_offload_may_change_together(folder: Folder) -> None:
    folder.log(*BEGUN, *TRAINED).saved(20)
    words = ["learner.offload=cpu", "learner.zero_stage=0"]
    assert "learner.offload = 'cpu' moves what ZeRO keeps" in folder.refused(*words)
    given = {"ranks": 2, "zero_stage": 3, "offload": "cpu", "rendezvous": "tcp://10.0.0.1:4000"}
    learner = folder.checked(*(f"learner.{name}={value}" for name, value in given.items()))[
        0
    ].learner
    assert learner == msgspec.structs.replace(folder.config.learner, **given)


def test_the_defaults_of_a_device_are_no_differences(folder: Folder, tmp_path: Path) -> None:
    folder.log(*BEGUN)
    (tmp_path / "more.yaml").write_text("defaults: cpu\nlearner: {total_steps: 50}\n")
    config, _ = folder.checked("defaults=cpu", path=str(tmp_path / "more.yaml"))
    learner = msgspec.structs.replace(folder.config.learner, total_steps=50)
    assert (config.learner, config.replay) == (learner, folder.config.replay)


def test_what_follows_the_machine_is_taken_up(folder: Folder, tmp_path: Path) -> None:
    judge = {"url": "http://old:1/v1", "model": "judge", "key_file": "/gone/key"}
    folder.edited("rewards", {"weights": {"judge": 0.5}, "judge": judge})
    key, token = tmp_path / "key", tmp_path / "token"
    for path in (key, token):
        path.write_text("secret")
        path.chmod(0o600)
    config = resume.merged(
        load(folder.path / "config.yaml"),
        None,
        [
            *("rewards.judge.url=http://new:2/v1", f"rewards.judge.key_file={key}"),
            *(f"retrieval.token_file={token}", "actors.count=3", "retrieval.port=0"),
            *("fleet.restarts=99", "fleet.start_deadline_s=60"),
        ],
        folder.path,
    )
    assert (config.rewards.judge.url, config.rewards.judge.model) == ("http://new:2/v1", "judge")
    assert config.rewards.judge.key_file == str(key)
    assert config.retrieval.token_file == str(token) and config.retrieval.port > 0
    assert config.actors == msgspec.structs.replace(folder.config.actors, count=3)
    assert (config.fleet.restarts, config.fleet.start_deadline_s) == (99, 60.0)


def test_other_servers_take_the_place_of_such_alone(folder: Folder) -> None:
    with serving() as one, serving() as other:
        said = folder.refused(f"retrieval.url={one}")
        assert f"retrieval.url = '{one}': the run was started with []: other servers" in said
        folder.edited("retrieval.url", [one])
        folder.config = load(folder.path / "config.yaml")
        config, _ = folder.log(*BEGUN).checked(f"retrieval.url=[{one},{other}]")
        assert config.retrieval.url == (one, other) and config.retrieval.index_version
        assert "the run was started with" in folder.refused("retrieval.url=")


def test_keys_and_values_are_found_anew_for_another_machine(folder: Folder) -> None:
    folder.log(*BEGUN)
    assert folder.checked()[0].actors == folder.config.actors
    given, _ = folder.checked("actors.kv_cache_bytes=2000000")
    found, _ = folder.checked("actors.kv_cache_bytes=0")
    assert given.actors.kv_cache_bytes == 2_000_000 and found == fitted(found)
    assert found.actors.kv_cache_bytes not in (0, folder.config.actors.kv_cache_bytes)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "learner.lr=0.5",
            "learner.lr = 0.5: the run was started with 1e-06; only retrieval.live.price_usd",
        ),
        ("seed=0", "seed = 0: the run was started with 3"),
        ("replay.group_size=4", "replay.group_size = 4: the run was started with"),
        ("model.path=elsewhere", "elsewhere': the run was started with"),
        ("learner={lr: 0.5}", "learner.lr = 0.5"),
        ("learner.lrr=1", "did you mean 'learner.lr'"),
    ],
)
def test_any_other_difference_is_named(folder: Folder, override: str, words: str) -> None:
    assert words in folder.log(*BEGUN).refused(override)


@pytest.mark.parametrize(
    ("field", "there", "here"),
    [
        ("learner.lr", 1e-6, 0.5),
        ("replay.groups_per_step", 16, 8),
        ("replay.group_size", 8, 4),
        ("model.dtype", "bfloat16", "float32"),
    ],
)
def test_a_configuration_that_is_not_on_record_is_refused(
    folder: Folder, field: str, there: object, here: object
) -> None:
    said = folder.log(*BEGUN, *TRAINED).saved(20).edited(field, here).refused()
    assert f"config.yaml: {field} = {here!r}: the event log has {there!r}: put that back" in said


def test_the_last_start_on_record_counts(folder: Folder) -> None:
    folder.log(*BEGUN, RunResumed(6.0, as_text(msgspec.structs.replace(folder.config, seed=9))))
    assert "seed = 3: the event log has 9" in folder.refused()
    assert folder.edited("seed", 9).edited("learner.total_steps", 60).checked()[0].seed == 9


@pytest.mark.parametrize("text", ["", "learner: {strange: 1}", "learner: {"])
def test_a_record_of_another_program_is_refused(folder: Folder, text: str) -> None:
    said = folder.log(*BEGUN, RunResumed(6.0, text)).refused()
    assert "the configuration on record cannot be read" in said and "start a new run with" in said


def test_a_replay_that_was_started_by_hand_is_missed_by_nobody(folder: Folder) -> None:
    with EventLog.open(folder.log(*BEGUN).path / "events.log"):
        assert (
            "another process writes it (replay, or forage compact): end it first"
            in folder.refused()
        )
    folder.checked()


def test_another_directory_is_refused_and_another_port_taken(folder: Folder) -> None:
    said = folder.log(*BEGUN).refused("run_dir=elsewhere")
    assert "elsewhere': the run goes on in" in said and "leave it out" in said
    port = with_port(folder.config.retrieval).port
    config, _ = folder.checked(f"retrieval.port={port}", f"run_dir={folder.path}")
    assert config.retrieval.port == port


def test_every_difference_is_named_at_once(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("seed: 4\nactors: {count: 3, max_turns: 2}\nlearner:\n")
    said = folder.log(*BEGUN).refused(path=str(tmp_path / "other.yaml"))
    assert "seed = 4" in said and "actors.max_turns = 2" in said
    assert "actors.count" not in said and "learner =" not in said


def test_relative_paths_are_the_same_paths(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.log(*BEGUN)
    monkeypatch.chdir(tmp_path)
    config, _ = folder.checked("model.path=model", "retrieval.port=0")
    assert config.model == folder.config.model


def test_a_run_without_a_server_goes_on_without_one(folder: Folder, tmp_path: Path) -> None:
    recorded = record_searches(tmp_path / "recorded", folder.config)
    folder.edited("retrieval", {"recorded": str(recorded)})
    folder.config = load(folder.path / "config.yaml")
    config, _ = folder.log(*BEGUN).checked()
    assert config.retrieval == folder.config.retrieval and config.retrieval.port == 0
    assert "retrieval.recorded = '/else': the run was" in folder.refused("retrieval.recorded=/else")


def test_a_moved_run_goes_on_where_it_is(folder: Folder, tmp_path: Path) -> None:
    folder.log(*BEGUN)
    folder.path.rename(tmp_path / "moved")
    config, _ = resume.checked(str(tmp_path / "moved"), None, [])
    assert config.run_dir == str(tmp_path / "moved")


@pytest.fixture
def living(folder: Folder) -> Iterator[int]:
    """A process that stands for the run's launcher."""
    directory = socket_dir(str(folder.path))
    directory.mkdir()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (directory / PID_FILE).write_text(str(process.pid))
    yield process.pid
    process.communicate(b"\n")
    (directory / PID_FILE).unlink()
    directory.rmdir()


def test_a_run_that_lives_is_refused(folder: Folder, living: int, tmp_path: Path) -> None:
    assert f"it is still running (launcher {living})" in folder.log(*BEGUN).refused()
    folder.path.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="still running"):
        resume.checked(str(tmp_path / "moved"), None, [])


def test_a_number_that_another_process_has_now_is_no_launcher(folder: Folder, living: int) -> None:
    os.utime(socket_dir(str(folder.path)) / PID_FILE, (1.0, 1.0))
    folder.log(*BEGUN).checked()


def test_a_completed_run_has_nothing_to_continue(folder: Folder) -> None:
    done = [LearnerResumed(3.0, 1, 40), StepsCommitted(4.0, 1, 40), Stopped(6.0, "completed")]
    folder.log(*BEGUN, *done).saved(40)
    assert "nothing to continue: it completed its 40 steps; raise" in folder.refused()
    assert folder.checked("learner.total_steps=50")[0].learner.total_steps == 50
    words = "learner.total_steps = 30: the run has come to step 40"
    assert words in folder.refused("learner.total_steps=30")


def test_a_checkpoint_that_was_taken_away_is_missed(folder: Folder) -> None:
    said = folder.log(*BEGUN, *TRAINED).saved(10).refused()
    assert "the newest is of step 10" in said and "put checkpoints/step-20 back" in said


def test_a_checkpoint_of_another_architecture_is_refused(
    folder: Folder, inputs: dict[str, str]
) -> None:
    folder.log(*BEGUN, *TRAINED).saved(20)
    Path(inputs["model.path"], "config.json").write_text('{"hidden_size": 128}')
    said = folder.refused()
    assert "another architecture: hidden_size of model.path = 96 there, 128 here" in said


@pytest.mark.parametrize(
    "name", ["checkpoints/step-20/checkpoint.json", "evaluations.json", "incarnation"]
)
def test_a_spoilt_file_is_named(folder: Folder, name: str) -> None:
    folder.log(*BEGUN, *TRAINED).saved(20)
    (folder.path / name).write_text("{")
    assert Path(name).name in folder.refused()


def test_a_missing_state_is_named(folder: Folder) -> None:
    folder.log(*BEGUN, *TRAINED).saved(20)
    next(folder.path.rglob("rank-0.safetensors")).unlink()
    assert "rank-0.safetensors is missing" in folder.refused()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"something else entirely", "offset 0: not an event log"), (b"", "offset 0")],
)
def test_a_log_that_cannot_be_read_is_refused(folder: Folder, content: bytes, words: str) -> None:
    (folder.path / "events.log").write_bytes(content)
    assert words in folder.refused()


def test_a_spoilt_record_is_refused(folder: Folder) -> None:
    path = folder.log(*BEGUN, *TRAINED).saved(20).path / "events.log"
    content = bytearray(path.read_bytes())
    content[HEADER.size + 13] ^= 1
    path.write_bytes(content)
    assert "the record's checksum does not agree" in folder.refused()


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml or events\.log there: name"):
        resume.checked(str(tmp_path), None, [])


@pytest.mark.parametrize("command", ["resume", "show"])
def test_a_run_without_its_configuration_is_told_what_it_lacks(
    folder: Folder, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (folder.log(*BEGUN).path / "config.yaml").unlink()
    assert cli.main([command, str(folder.path)]) == 2
    words = "no config.yaml there, but an event log: put the run's own back"
    assert f"RUN = {str(folder.path)!r}: {words}" in capsys.readouterr().err


def test_the_command_refuses_with_exit_code_2(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(*BEGUN)
    assert cli.main(["resume", str(folder.path), "seed=9"]) == 2
    assert "seed = 9: the run was started with 3" in capsys.readouterr().err


def test_the_command_hands_on_what_is_to_be_resumed(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(*BEGUN)
    arguments = [str(folder.path), "learner.total_steps=50", "--prepare-only"]
    assert cli.main(["resume", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    again = [line.split("-m ")[1].split()[0] for line in lines if "--resume" in line]
    assert again == ["replay.worker", "learner.worker"]
    written = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert written["learner"]["total_steps"] == 50 and written["seed"] == 3


def test_keys_that_lie_in_a_record_open_nothing(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keys(folder.log(*BEGUN).path / "keys").make()
    known, words = keys.proof(), ["resume", str(folder.path), "--prepare-only"]
    words += ["replay.endpoint=tcp://127.0.0.1:4000", "weight_sync.endpoint=tcp://127.0.0.1:4001"]
    assert cli.main([*words, "--trust"]) == 0
    assert keys.proof() == known and "drawn anew" not in capsys.readouterr().out
    assert cli.main(words) == 0
    assert not keys.folder.exists()
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "keys is drawn anew, as --trust was not given: copies of the old keys open nothing" in said
    )


def test_what_a_record_does_not_decide_is_its_user_s_word(folder: Folder, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame")
    token.chmod(0o600)
    folder.edited("retrieval.token_file", str(token)).log()
    folder.edited("weight_sync.snapshot_dir", str(tmp_path))
    said = folder.refused().splitlines()
    assert [line.partition(" = ")[0] for line in said] == [
        "retrieval.token_file", "weight_sync.snapshot_dir",
    ]  # fmt: skip
    own = tmp_path / "own.yaml"
    own.write_text(f"retrieval: {{token_file: {token}}}\n")
    (line,) = folder.refused(path=str(own)).splitlines()
    assert line.startswith("weight_sync.snapshot_dir") and line.endswith("snapshot_dir=VALUE")
    folder.edited("weight_sync.snapshot_dir", "")
    given, _ = folder.checked(f"retrieval.token_file={token}")
    trusted, _ = resume.checked(str(folder.path), None, [], trusted=True)
    assert given.retrieval.token_file == trusted.retrieval.token_file == str(token)
