"""The launcher of a run, `forage train` and `forage resume`: trains a model (with total_steps 0,
evaluates it), or goes on with a run. `scripts/launch.py` only calls it.

Checks everything first, then places retrieval server, replay, learner and actors, shows the run,
ends it with the first cause when a process dies, and leaves `summary.json` whatever happens.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from configs.keys import Address, Addresses, keys_of
from configs.load import ConfigError, save
from configs.runtime.files import replacing
from configs.runtime.process import REPOSITORY, Exit, make_socket_dir
from configs.runtime.signals import Interrupt
from configs.schema import Config
from configs.trust import FLAG, TRUSTING, flag_for
from replay.clients.launcher import Observer
from replay.log.event_log import FILE_NAME
from replay.protocol import ReplayError
from replay.questions import left_out
from scripts.command.options import argument, option, overrides
from scripts.fleet import detach, disk_forecast, head
from scripts.fleet import resume as resuming
from scripts.fleet.cluster import Cluster, joined
from scripts.fleet.console import Console
from scripts.fleet.fleet import Fleet
from scripts.fleet.guardian import PID_FILE
from scripts.fleet.host import FleetError
from scripts.fleet.resume import Progress
from scripts.fleet.supervisor import RunFailed, Supervisor
from scripts.runs import plot, summary
from scripts.setup import machine, preflight

ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
FIRST = "starting engines, verifying weights, evaluating the start"
AGAIN = "starting engines, training recorded batches again, verifying weights"
DETACH = "return once all is placed; the run goes on without the terminal, and logs to its folder"
STATUS_S = 2.0  # for an answer of replay; it may be silent for longer (fleet.silence_deadline_s)
EXIT_CODES = {
    "completed": Exit.DONE,
    "failed": Exit.FAILED,
    "stopped": Exit.STOPPED,
    "interrupted": Exit.INTERRUPTED,
}


@dataclass(frozen=True)
class TrainOptions:
    config: str = argument("a YAML file, for example configs/base.yaml")
    overrides: tuple[str, ...] = overrides()
    prepare_only: bool = option(
        "make the run directory and print the commands to run by hand", default=False
    )
    detach: bool = option(DETACH, default=False)


@dataclass(frozen=True)
class ResumeOptions:
    run: Path = argument("the run's directory, for example runs/latest")
    overrides: tuple[str, ...] = overrides()
    config: str | None = option("a YAML file of what is to be different", metavar="FILE")
    trust: bool = option(TRUSTING, default=False)
    prepare_only: bool = option("print the commands to run by hand", default=False)
    detach: bool = option(DETACH, default=False)


def train(options: TrainOptions) -> int:
    """Train from the start. Raises ConfigError before anything is started."""
    if options.detach:
        return _detach(options.prepare_only, "train", options.config, *options.overrides)
    here = not options.prepare_only
    config = preflight.checked(options.config, options.overrides, here, nodes=True)
    return _launch(config, None, options.prepare_only)


def resume(options: ResumeOptions) -> int:
    """Go on with a run. Raises ConfigError before anything is started."""
    if options.detach:
        given = ["--config", options.config] if options.config else []
        given += [FLAG] if options.trust else []
        words = [str(options.run), *given, *options.overrides]
        return _detach(options.prepare_only, "resume", *words)
    here = not options.prepare_only
    config, progress = resuming.checked(
        str(options.run), options.config, options.overrides, here, options.trust
    )
    known = not options.trust and not config.keys  # to who wrote the record
    return _launch(config, progress, options.prepare_only, known)


def _detach(prepare_only: bool, *words: str) -> int:
    if prepare_only:
        raise ConfigError("--detach with --prepare-only, which starts nothing: leave one out")
    return detach.detached(["-m", "scripts.cli", *words])


def _launch(
    config: Config, progress: Progress | None, prepare_only: bool, known_keys: bool = False
) -> int:
    console = Console(record=detach.is_detached())
    for line in left_out(config):
        console.say(line, "yellow")
    if progress and progress.compacted:
        console.say(
            "older segments of the event log hold no trajectories any more (replay.keep, forage "
            "compact): show and relearn lack them",
            "yellow",
        )
    if known_keys and keys_of(config).discard():
        console.say(
            f"{keys_of(config).folder} is drawn anew, as {FLAG} was not given: copies of the old "
            "keys open nothing",
            "yellow",
        )
    if prepare_only:
        _refuse_nodes(config)
        save(config, Path(config.run_dir) / "config.yaml")
        _print_commands(commands(config, progress))
        return Exit.DONE
    if not progress:
        _reckon_disk(config, console)
    if config.cluster.address:
        return _launch_on_nodes(config, console, progress)
    for line, _ in machine.gpu_plan(config):
        console.say(line, short=True)
    console.say(f"weights will travel by {machine.transport(config)}", short=True)
    return run(config, console, progress)


def _reckon_disk(config: Config, console: Console) -> None:
    above = next(each for each in Path(config.run_dir).resolve().parents if each.exists())
    line, fits = disk_forecast.reckoned(config, shutil.disk_usage(above).free)
    if line:
        console.say(line, "" if fits else "bold yellow", short=True)


def _launch_on_nodes(config: Config, console: Console, progress: Progress | None) -> int:
    if not head.token():
        console.say(
            "Ray has no token here: who reaches its ports may run programs on every node "
            "(deploy/token.sh)",
            "bold yellow",
        )
    console.phase(f"looking at the nodes of {config.cluster.address}")
    with joined(config) as cluster:
        for line in cluster.news():
            console.say(line, "bold yellow")
        for line in cluster.arrangement.table():
            console.say(line)
        return run(cluster.arrangement.config, console, progress, cluster)


def _refuse_nodes(config: Config) -> None:
    if config.cluster.address:
        raise ConfigError(
            f"cluster.address = {config.cluster.address!r}: --prepare-only prepares processes of "
            "this machine alone: set it to '', and give the endpoints of the others yourself"
        )


def _print_commands(commands: dict[str, list[str]]) -> None:
    variables = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    print("# Run these in this order, each in a terminal of its own. In every terminal, first:")
    print(f"cd {shlex.quote(str(REPOSITORY))}\nexport {variables}")
    for number, (name, command) in enumerate(commands.items(), 1):
        print(f"# terminal {number}: {name}\n{shlex.join([sys.executable, *command])}")
    print("# Once the learner and the actors have ended, end the others with Ctrl-C.")


def commands(
    config: Config, progress: Progress | None = None, servers: Sequence[str] = ()
) -> dict[str, list[str]]:
    """The worker command of every process; with `progress` replay and learner go on. `servers`: the
    names of the retrieval servers, where there are several.
    """
    path = str(Path(config.run_dir) / "config.yaml")
    members = {
        "retrieval_server": ["-m", "retrieval_server.worker", path],
        "replay": ["-m", "replay.worker", path],
        "learner": ["-m", "learner.worker", path],
    }
    if not config.starts_retrieval_server:
        del members["retrieval_server"]
    elif servers:
        command = members.pop("retrieval_server")
        members = dict.fromkeys(servers, command) | members
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


def run(
    config: Config,
    console: Console,
    progress: Progress | None = None,
    cluster: Cluster | None = None,
) -> int:
    """Run one resolved configuration, from its start or from where it is, on this machine or on the
    nodes of a cluster; return the exit code.
    """
    begun, run_dir = time.monotonic(), Path(config.run_dir)
    addresses = Addresses.of(cluster.arrangement.wired() if cluster else config)
    directory = _prepare(config, addresses, resumed=progress is not None)
    outcome, cause, gauges = "failed", "", {}
    with Interrupt(polled=True) as stop, detach.loose(console, run_dir / detach.LOG) as started:
        try:
            console.open(config, "starting Ray and placing processes")
            with Fleet(run_dir / "logs", directory, ENVIRONMENT, cluster) as fleet:
                stop.arm()  # Ray has put handlers of its own in the way
                fleet.start(commands(config, progress, cluster.servers if cluster else ()))
                started()
                console.phase(AGAIN if progress else FIRST)
                shown, start = progress or Progress(), partial(actor_command, config)
                supervisor = Supervisor(config, fleet, console, stop, shown, start)
                gauges = supervisor.gauges
                with _observer(addresses.replay, fleet) as observer:
                    cause = supervisor.watch(observer)
                console.phase("draining")
                supervisor.drain()
                outcome = "completed" if cause == "completed" else "stopped"  # by a rule
        except (RunFailed, FleetError, ReplayError) as error:
            cause = str(error)
        except KeyboardInterrupt:
            pass
        finally:
            if stop.cause:
                outcome, cause = "interrupted", f"interrupted by {stop.cause}"
            elif not cause:
                cause = repr(sys.exception())
            _leave(config, console, outcome, cause, time.monotonic() - begun, gauges)
    return EXIT_CODES[outcome]


def _observer(replay: Address, fleet: Fleet) -> Observer:
    """Replay's client of the launcher, which does not wait for replay to come back."""
    observer = Observer(replay.endpoint, STATUS_S, replay.keys, restart_deadline_s=0.0)
    observer.gone = lambda: fleet.members["replay"].poll() is not None
    return observer


def how_to_go_on(config: Config, outcome: str) -> str:
    """The command that goes on with a run that failed or was interrupted; '' where none can."""
    run_dir = Path(config.run_dir)
    if outcome not in ("failed", "interrupted") or not (run_dir / FILE_NAME).exists():
        return ""
    return f"forage resume {run_dir}{flag_for(config)}"


def _leave(
    config: Config,
    console: Console,
    outcome: str,
    cause: str,
    wall_s: float,
    gauges: dict[str, dict[str, float]],
) -> None:
    console.close()
    console.phase("")
    run_dir = Path(config.run_dir)
    report = summary.build(config, outcome, cause, wall_s, console.phases_s, gauges)
    path, curve = summary.write(run_dir, report), plot.draw(run_dir)
    style = "bold green" if outcome == "completed" else "bold red"
    console.say(outcome if cause == outcome else f"{outcome}: {cause}", style)
    console.say(f"{outcome_of(report)}; {path}")
    for line in summary.set_lines(report):
        console.say(f"  {line}")
    if curve:
        console.say(f"learning curve: {curve}")
    if command := how_to_go_on(config, outcome):
        console.say(f"to go on with it: {command}")


def outcome_of(report: dict[str, Any]) -> str:
    """The exact match and the steps of a summary, in words."""
    found = [report[name] for name in ("em_start", "em_final")]
    start, final = ("not evaluated" if em is None else str(em) for em in found)
    em = "nothing was evaluated" if start == final == "not evaluated" else f"EM {start} -> {final}"
    return f"{em}, {report['steps']} steps"


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
