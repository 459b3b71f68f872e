"""The command: `python scripts/launch.py CONFIG [a.b=c ...]` trains (or, with total_steps 0,
evaluates) a model; `python scripts/launch.py --resume runs/x [a.b=c ...]` goes on with a run.

Checks everything first (exit 2 with a message), then places retrieval server, replay, learner and
actors, shows the run, ends it with the first cause when a process dies, and leaves `summary.json`
whatever happens. Exit codes: 0 completed, 1 failed, 2 bad input, 3 stopped early by rule, 130
interrupted.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from configs.files import replacing
from configs.keys import Addresses
from configs.load import ConfigError, load, save
from configs.process import make_socket_dir
from configs.schema import Config
from replay.launcher_client import Observer
from replay.log import FILE_NAME
from replay.protocol import ReplayError
from replay.question_files import left_out
from scripts import plot, preflight, resume, summary
from scripts.console import Console
from scripts.fleet import Fleet, FleetError
from scripts.guardian import PID_FILE
from scripts.resolve import resolve
from scripts.resume import Progress
from scripts.supervise import Interrupt, RunFailed, Supervisor

ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
FIRST = "starting engines, verifying weights, evaluating the start"
AGAIN = "starting engines, training recorded batches again, verifying weights"
STATUS_S = 2.0  # for an answer of replay; it may be silent for longer (fleet.silence_deadline_s)
OUTCOMES = {"completed": "completed"}  # any other cause is an early stop by rule
EXIT_CODES = {"completed": 0, "failed": 1, "stopped": 3, "interrupted": 130}


def commands(config: Config, progress: Progress | None = None) -> dict[str, list[str]]:
    """The worker command of every process, by name; each can be run by hand.

    With `progress` the run goes on: replay with its log, where there is one, and the learner.
    """
    path = str(Path(config.run_dir) / "config.yaml")
    members = {
        "retrieval_server": ["-m", "retrieval_server.worker", path],
        "replay": ["-m", "replay.worker", path],
        "learner": ["-m", "learner.worker", path],
    }
    if not config.starts_retrieval_server:
        del members["retrieval_server"]
    if progress:
        members["learner"].append("--resume")
        members["replay"] += ["--resume"] if progress.log else []
    for rank in range(1, config.learner.ranks):
        members[f"learner-{rank}"] = ["-m", "learner.worker", path, "--rank", str(rank)]
    for index in range(config.actors.count):
        members[f"actor-{index}"] = actor_command(config, f"actor-{index}")
    return members


def actor_command(config: Config, name: str) -> list[str]:
    """The worker command of one actor."""
    path = str(Path(config.run_dir) / "config.yaml")
    return ["-m", "actors.worker", path, "--actor-id", name]


def run(config: Config, console: Console, progress: Progress | None = None) -> int:
    """Run one resolved configuration, from its start or from where it is; return the exit code."""
    begun, run_dir = time.monotonic(), Path(config.run_dir)
    addresses = Addresses.of(config)
    directory = _prepare(config, addresses, resumed=progress is not None)
    outcome, cause, gauges = "failed", "", {}
    stop = Interrupt()
    try:
        console.phase("starting Ray and placing processes")
        with Fleet(run_dir / "logs", directory, ENVIRONMENT) as fleet:
            stop.arm()  # Ray has put handlers of its own in the way
            fleet.start(commands(config, progress))
            console.phase(AGAIN if progress else FIRST)
            shown, start = progress or Progress(), partial(actor_command, config)
            supervisor = Supervisor(config, fleet, console, stop, shown, start)
            gauges = supervisor.gauges
            replay = addresses.replay
            # It looks at the processes meanwhile, so it does not wait for replay to come back.
            with Observer(
                replay.endpoint, STATUS_S, replay.keys, restart_deadline_s=0.0
            ) as observer:
                observer.gone = lambda: fleet.members["replay"].poll() is not None
                cause = supervisor.watch(observer)
            console.phase("draining")
            supervisor.drain()
            outcome = OUTCOMES.get(cause, "stopped")
    except (RunFailed, FleetError, ReplayError) as error:
        cause = str(error)
    except KeyboardInterrupt:
        pass
    finally:
        if stop.cause:
            outcome, cause = "interrupted", stop.cause
        elif not cause:
            cause = repr(sys.exception())
        console.phase("")
        _leave(config, console, outcome, cause, time.monotonic() - begun, gauges)
    return EXIT_CODES[outcome]


def how_to_go_on(run_dir: Path, outcome: str) -> str:
    """The command that goes on with a run that failed or was interrupted; '' where none can."""
    if outcome not in ("failed", "interrupted") or not (run_dir / FILE_NAME).exists():
        return ""
    return f"python scripts/launch.py --resume {run_dir}"


def _leave(
    config: Config,
    console: Console,
    outcome: str,
    cause: str,
    wall_s: float,
    gauges: dict[str, dict[str, float]],
) -> None:
    """Write what a run leaves, and say where it is."""
    run_dir = Path(config.run_dir)
    report = summary.build(config, outcome, cause, wall_s, console.phases_s, gauges)
    path, curve = summary.write(run_dir, report), plot.draw(run_dir)
    style = "bold green" if outcome == "completed" else "bold red"
    console.say(outcome if cause == outcome else f"{outcome}: {cause}", style)
    console.say(f"EM {report['em_start']} -> {report['em_final']}, {report['steps']} steps; {path}")
    if curve:
        console.say(f"learning curve: {curve}")
    if command := how_to_go_on(run_dir, outcome):
        console.say(f"to go on with it: {command}")


def _prepare(config: Config, addresses: Addresses, resumed: bool) -> Path:
    """Make the run's directories and say that it runs; return that of its sockets."""
    run_dir = Path(config.run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=resumed)
    if addresses.keys:
        addresses.keys.make()  # before several processes ask for them
    save(config, run_dir / "config.yaml")
    _point_latest(run_dir)
    _remove_stale_socket_dirs()
    directory = make_socket_dir(config.run_dir)
    (directory / PID_FILE).write_text(str(os.getpid()))
    return directory


def _point_latest(run_dir: Path) -> None:
    latest = run_dir.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        with replacing(latest, durable=False, contended=True) as draft:
            draft.symlink_to(run_dir.name)


def _remove_stale_socket_dirs() -> None:
    """Remove what a launcher that was killed together with its guardian left in /tmp."""
    for path in Path("/tmp").glob(f"forage-{os.getuid()}-*"):
        try:
            os.kill(int((path / PID_FILE).read_text()), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (OSError, ValueError):
            continue  # started by hand, or just being made: not ours to remove


def checked(path: str, overrides: Sequence[str]) -> Config:
    """Load, resolve and check a configuration. Raises ConfigError before anything is started."""
    config = resolve(load(path, overrides), Path(path).stem)
    preflight.check(config)
    return config


def main(argv: list[str] | None = None) -> int:
    """Parse, check, run."""
    parser = argparse.ArgumentParser(description="Train a search agent.")
    parser.add_argument("config", nargs="?", help="a YAML file, for example configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields to override")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this directory")
    by_hand = "make the run directory and print the commands to run by hand"
    parser.add_argument("--prepare-only", action="store_true", help=by_hand)
    arguments = parser.parse_intermixed_args(argv)
    path, overrides, progress = arguments.config, arguments.overrides, None
    if path and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    try:
        if arguments.resume:
            config, progress = resume.checked(arguments.resume, path, overrides)
        elif path:
            config = checked(path, overrides)
        else:
            parser.error("name a configuration, for example configs/base.yaml, or --resume RUN")
    except ConfigError as error:
        print(f"forage: {error}", file=sys.stderr)
        return 2
    console = Console()
    for line in left_out(config.questions):
        console.say(line, "yellow")
    if arguments.prepare_only:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        save(config, Path(config.run_dir) / "config.yaml")
        for command in commands(config, progress).values():
            print(f"{sys.executable} {' '.join(command)}")
        return 0
    for line, _ in preflight.gpu_plan(config):
        console.say(line)
    console.say(f"weights will travel by {preflight.transport(config)}")
    return run(config, console, progress)


if __name__ == "__main__":
    sys.exit(main())
