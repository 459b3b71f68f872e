"""The scripts of `deploy/`, with `ray`, `forage`, `srun` and `scontrol` that only write down how
they were called.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
# Until SIGTERM: Ray with --block, and a run; `completes`, `stops` and `fails` end the run at once.
FAKE = """#!/usr/bin/env bash
name=$(basename "$0")
trap 'exit 0' TERM
[ "$name" != forage ] || trap 'echo "$name drained" >>"$CALLS"; exit 130' TERM
echo "$name $*" >>"$CALLS"
case "$name $*" in
*--block*) ;;
"ray drain-node"*) [ ! -e workers ] || xargs kill -TERM <workers; exit 0 ;;
"forage train"*|"forage resume"*)
    [ ! -e completes ] || exit 0
    [ ! -e stops ] || exit 3
    [ ! -e fails ] || exit 1
    ;;
*) exit 0 ;;
esac
while :; do sleep 0.02; done
"""
DEADLINE_S = 20.0
pytestmark = pytest.mark.slow


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """The environment of a host with those commands and a token, in a folder of its own."""
    (tmp_path / "bin").mkdir()
    for name in ("ray", "forage", "srun", "scontrol"):
        (tmp_path / "bin" / name).write_text(FAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "CALLS": str(tmp_path / "calls")}
    subprocess.run([DEPLOY / "token.sh"], env=environment, check=True)
    return environment


def start(host: dict[str, str], *command: str | Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=host["HOME"],
        env=host | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, "".join(said)


def calls(host: dict[str, str]) -> list[str]:
    path = Path(host["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def called(host: dict[str, str], *words: str) -> str:
    """The call that begins with a word and has the others, once it has been made."""

    def found() -> str:
        said = [each for each in calls(host) if each.startswith(words[0])]
        return next((each for each in said if all(word in each for word in words)), "")

    wait_for(lambda: bool(found()), f"{words} among {calls(host)}")
    return found()


def wait_for(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_a_token_is_made_once_and_is_its_owner_s(host: dict[str, str]) -> None:
    token = Path(host["HOME"], ".ray", "auth_token")
    made = token.read_text()
    assert len(made) == 64 and token.stat().st_mode & 0o777 == 0o600
    subprocess.run([DEPLOY / "token.sh"], env=host, check=True)
    assert token.read_text() == made


def test_ray_starts_with_a_token_alone(host: dict[str, str]) -> None:
    token = Path(host["HOME"], ".ray", "auth_token")
    token.chmod(0o644)
    code, said = ended(start(host, DEPLOY / "ray.sh", "head"))
    assert code == 2 and "chmod 600" in said
    token.unlink()
    code, said = ended(start(host, DEPLOY / "ray.sh", "head"))
    assert code == 2 and "deploy/token.sh" in said and not calls(host)
    assert ended(start(host, DEPLOY / "ray.sh", "head", RAY_AUTH_TOKEN="a"))[0] == 0


def test_head_and_worker_open_the_same_ports(host: dict[str, str]) -> None:
    assert ended(start(host, DEPLOY / "ray.sh", "head", "--num-cpus=1"))[0] == 0
    assert ended(start(host, DEPLOY / "ray.sh", "worker", "10.0.0.1"))[0] == 0
    head, worker = calls(host)
    assert head.startswith("ray start --head --port=6379 --include-dashboard=false")
    assert head.endswith("--num-cpus=1") and worker.startswith("ray start --address=10.0.0.1:6379")
    for call in (head, worker):
        assert "--node-manager-port=6380 --object-manager-port=6381" in call


REFUSED = [
    ("ray.sh", {}, "say head, or worker HEAD"),
    ("ray.sh tail", {}, "say head, or worker HEAD"),
    ("ray.sh worker", {}, "name the head: deploy/ray.sh worker HEAD"),
    ("ray.sh worker a:6379", {}, "HEAD = a:6379: name it without the port"),
    ("ray.sh head", {"HOME": ""}, "HOME is not set: name the token's file in RAY_AUTH_TOKEN_PATH"),
    ("ray.sh head", {"RAY_AUTH_TOKEN_PATH": "/none"}, "no token in /none: deploy/token.sh makes"),
    ("ray.sh head", {"RAY_AUTH_TOKEN_PATH": "/tmp"}, "no token in /tmp: deploy/token.sh makes"),
    ("ray.sh head", {"FORAGE_INTERFACE": "no0"}, "FORAGE_INTERFACE = no0 has no IPv4 address"),
    ("token.sh", {"HOME": ""}, "HOME is not set: name the token's file in RAY_AUTH_TOKEN_PATH"),
    ("token.sh", {"RAY_AUTH_TOKEN_PATH": "/proc/a/b"}, "no file can be made in /proc/a: make"),
    ("token.sh", {"RAY_AUTH_TOKEN_PATH": "/tmp"}, "/tmp is a folder: name a file in RAY_AUTH"),
    ("drain.sh soon", {}, "SECONDS = soon: give a whole number"),
    ("drain.sh 1", {"RAY_AUTH_TOKEN_PATH": "/none"}, "no token in /none: deploy/token.sh makes"),
    ("head.sh run 2", {}, "give run, nodes and configuration: deploy/head.sh RUN NODES CONFIG"),
    ("head.sh run two c.yaml", {}, "NODES = two: give a whole number"),
    ("head.sh run 2 c.yaml", {"RAY_AUTH_TOKEN_PATH": "/none"}, "no token in /none: deploy/token"),
    ("slurm.sbatch c.yaml", {}, "this is no job: sbatch deploy/slurm.sbatch CONFIG"),
    ("slurm.sbatch", {"SLURM_SUBMIT_DIR": "/"}, "name a configuration, for example configs/"),
    ("slurm.sbatch c.yaml", {"SLURM_SUBMIT_DIR": "/none"}, "/none is not seen on "),
    ("slurm.sbatch c.yaml", {"SLURM_SUBMIT_DIR": "/proc"}, "no .venv-gpu in /proc: submit from"),
    *(
        (words, {"PATH": "/usr/bin:/bin"}, "ray is not on the PATH: activate Forage's environment")
        for words in ("ray.sh head", "drain.sh 1", "head.sh run 2 c.yaml")
    ),
]


@pytest.mark.parametrize(("words", "changed", "said"), REFUSED)
def test_what_is_missing_is_one_line_with_its_remedy(
    host: dict[str, str], words: str, changed: dict[str, str], said: str
) -> None:
    name, *rest = words.split()
    code, told = ended(start(host, DEPLOY / name, *rest, **changed))
    assert code == 2 and told.startswith(f"{name}: {said}") and told.count("\n") == 1, told
    assert not calls(host)


def test_a_ray_that_takes_no_note_of_a_drain_is_said(host: dict[str, str]) -> None:
    ray = Path(host["PATH"].partition(":")[0], "ray")
    ray.write_text("#!/bin/sh\necho 'Traceback'\necho 'no Ray here' >&2\nexit 1\n")
    code, said = ended(start(host, DEPLOY / "drain.sh", "1"))
    line = "drain.sh: Ray takes no note (no Ray here): see that it is up on this node, with this"
    assert code == 1 and said.startswith(line) and said.count("\n") == 1


def head(host: dict[str, str], **more: str) -> subprocess.Popen[str]:
    return start(host, DEPLOY / "head.sh", "run", "2", "c.yaml", "model.path=m", **more)


def test_the_head_checks_all_hosts_and_trains(host: dict[str, str]) -> None:
    Path(host["HOME"], "completes").touch()
    assert ended(head(host))[0] == 0
    assert called(host, "forage doctor") == "forage doctor --cluster auto --nodes 2"
    train = called(host, "forage train")
    assert train == "forage train c.yaml run_dir=run cluster.address=auto model.path=m"


def test_the_head_goes_on_with_a_run_that_has_begun(host: dict[str, str]) -> None:
    home = Path(host["HOME"])
    (home / "completes").touch()
    (home / "run").mkdir()
    (home / "run" / "config.yaml").touch()
    assert ended(head(host))[0] == 0
    assert called(host, "forage resume") == "forage resume run --trust cluster.address=auto"


def test_a_signal_to_the_head_drains_the_run(host: dict[str, str]) -> None:
    process = head(host)
    called(host, "forage train")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 130 and "forage drained" in calls(host)


def test_the_head_ends_as_its_run_does(host: dict[str, str]) -> None:
    Path(host["HOME"], "fails").touch()
    assert ended(head(host, FORAGE_STAY="1"))[0] == 1


@pytest.mark.parametrize(("how", "code"), [("completes", 0), ("stops", 3)])
def test_the_head_of_a_run_that_is_over_stays_where_it_is_to(
    host: dict[str, str], how: str, code: int
) -> None:
    Path(host["HOME"], how).touch()
    process = head(host, FORAGE_STAY="1")
    assert process.stdout is not None
    while "stays up" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == code


def job(host: dict[str, str], nodes: int) -> subprocess.Popen[str]:
    """A Slurm job of so many nodes, on the first of them."""
    home = Path(host["HOME"])
    (home / ".venv-gpu" / "bin").mkdir(parents=True)
    (home / ".venv-gpu" / "bin" / "activate").touch()
    (home / "deploy").symlink_to(DEPLOY)
    variables = {
        "SLURM_SUBMIT_DIR": str(home),
        "SLURM_JOB_NAME": "forage",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURMD_NODENAME": "one",
    }
    return start(host, DEPLOY / "slurm.sbatch", "c.yaml", "model.path=m", **variables)


def test_a_job_that_slurm_gives_notice_drains_and_is_queued_again(host: dict[str, str]) -> None:
    process = job(host, nodes=4)
    srun = called(host, "srun")
    assert "--nodes=3 --ntasks=3 --exclude=one" in srun and "ray.sh worker one --block" in srun
    assert "run_dir=runs/forage-7 " in called(host, "forage train")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 130
    assert "forage drained" in calls(host) and calls(host)[-1] == "scontrol requeue 7"


def test_a_job_that_completes_is_not_queued_again(host: dict[str, str]) -> None:
    Path(host["HOME"], "completes").touch()
    assert ended(job(host, nodes=1))[0] == 0
    assert not [call for call in calls(host) if call.startswith(("srun", "scontrol"))]


WORKER = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print(1); signal.pause()"


def worker_of(host: dict[str, str], run: str, package: str = "actors") -> "subprocess.Popen[str]":
    """What looks like an actor or the learner of a run, once it can be told to end."""
    words = ("-m", f"{package}.worker", f"{host['HOME']}/{run}/config.yaml", "-")
    worker = start(host, sys.executable, "-u", "-c", WORKER, *words)
    assert worker.stdout is not None and worker.stdout.readline()
    return worker


def test_a_host_s_actors_and_learner_leave_before_it_does(host: dict[str, str]) -> None:
    leaving, staying = worker_of(host, "leaving"), worker_of(host, "staying")
    rank = worker_of(host, "leaving", "learner")
    Path(host["HOME"], "workers").write_text(f"{leaving.pid} {rank.pid}")  # the launcher's part
    drain = start(host, DEPLOY / "drain.sh", "10", f"{host['HOME']}/leaving")
    assert [ended(each)[0] for each in (drain, leaving, rank)] == [0, 0, 0]
    assert staying.poll() is None
    assert "--deadline-remaining-seconds=10" in called(host, "ray drain-node")
    Path(host["HOME"], "latest").symlink_to("staying")
    code, said = ended(start(host, DEPLOY / "drain.sh", "0", f"{host['HOME']}/latest/"))
    assert code == 1 and f"not drained in time: {staying.pid}" in said
    staying.kill()
    ended(staying)
