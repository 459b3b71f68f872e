"""Hosts on one machine: network namespaces on a bridge, each with an address, processes and a Ray
node of its own. They share the file system and the table of processes.

`with hosts(2) as (one, two)` makes them; all that runs in them, their interfaces and their folder
are gone afterwards. A maker that is killed leaves what the next one removes: whatever belongs to a
folder `/tmp/fhostN` that nobody has locked. Nothing here reaches out of the bridge: it has no
address, and the machine no route to it.
"""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.runtime.files import Locked, open_locked
from configs.runtime.process import REPOSITORY

FOLDERS, PREFIX = Path("/tmp"), "fhost"
NAMESPACES = Path("/run/netns")  # of iproute2
FILES = Path("/etc/netns")  # of iproute2: NAME/FILE is seen in namespace NAME as /etc/FILE
NETWORK = "10.77"
SUBNETS = range(1, 255)
INTERFACE = "eth0"  # of every host, inside
RAY_PORT = 6379
RAY_STORE_BYTES = 80_000_000
COMMAND_S, RAY_START_S, END_S = 20.0, 120.0, 20.0
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
# A node that says nothing is given up after about 6 s; Ray's own defaults take half a minute.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class HostError(RuntimeError):
    """A command in a host, or one that makes it, failed; the message holds what it said."""


class Traffic(NamedTuple):
    """Bytes through a host's interface since it was made, headers included."""

    sent: int
    received: int


def supported() -> str:
    """Why no hosts can be made here; empty where they can."""
    if not shutil.which("ip"):
        return "no command `ip`: install iproute2"
    held = capabilities(Path("/proc/self/status").read_text())
    lacking = {CAP_NET_ADMIN: "CAP_NET_ADMIN", CAP_SYS_ADMIN: "CAP_SYS_ADMIN"}
    for bit, name in lacking.items():
        if not held >> bit & 1:
            return f"no {name}, which network namespaces need: run as root"
    return ""


def capabilities(status: str) -> int:
    """The effective capabilities in the text of `/proc/PID/status`, as bits."""
    (line,) = (line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(line.split()[1], 16)


class Host:
    """One host: its address, what runs in it, and its cable. `number` counts from 1."""

    def __init__(self, subnet: int, number: int, folder: Path, environment: dict[str, str]) -> None:
        """`environment` is added to that of all that is started in it."""
        self.name = f"{PREFIX}{subnet}-{number}"
        self.address = f"{NETWORK}.{subnet}.{number}"
        self.folder = folder / str(number)  # short: sockets lie in it
        self.environment = environment
        self._bridge, self._cable = f"{PREFIX}{subnet}", f"{PREFIX}{subnet}v{number}"

    def make(self, names: str) -> None:
        """Make its namespace, its interface and the cable; `names` is what its /etc/hosts holds."""
        self.folder.mkdir()
        files = FILES / self.name
        files.mkdir(parents=True)
        (files / "hosts").write_text(names)
        (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once
        inner = f"{self._cable}i"
        _ip("netns", "add", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", self.name, "name", INTERFACE)
        self._inside("address", "add", f"{self.address}/24", "dev", INTERFACE)
        for each in ("lo", INTERFACE):
            self._inside("link", "set", each, "up")
        # To nowhere; a host asks its routes which address is its own.
        self._inside("route", "add", "default", "dev", INTERFACE)
        _ip("link", "set", self._cable, "up")
        self.mend()

    def run(self, *words: str, timeout_s: float = COMMAND_S) -> str:
        """What a command prints in this host. Raises HostError when it fails or does not end."""
        return _output(self._entering(words), timeout_s, os.environ | self.environment)

    def start(
        self, *words: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command in this host, in a session of its own; its output goes to `log`."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                self._entering(words),
                cwd=REPOSITORY,
                env=os.environ | self.environment | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._see_inside(process)
        return process

    def listens(self, port: int) -> bool:
        """True where a process in this host listens on the port."""
        return bool(self.run("ss", "-H", "-l", "-t", "-n", f"sport = :{port}"))

    def ray_command(self, head: "Host", cpus: int) -> list[str]:
        """The command that starts a Ray node in this host, of the cluster of `head`."""
        place = [f"--address={head.address}:{RAY_PORT}"]
        if head is self:
            place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        return [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *place,
            f"--node-ip-address={self.address}",
            f"--num-cpus={cpus}",
            "--node-manager-port=6380",
            "--object-manager-port=6381",
            f"--object-store-memory={RAY_STORE_BYTES}",
            f"--temp-dir={self.folder}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
        ]

    def cut(self) -> None:
        """Pull the cable out: what is sent is lost, and neither side is told."""
        _ip("link", "set", self._cable, "nomaster")

    def mend(self) -> None:
        """Put the cable in."""
        _ip("link", "set", self._cable, "master", self._bridge)

    def die(self) -> None:
        """Lose power: cut off, then without a process. `mend` and `start_ray` bring it
        back."""
        self.cut()
        kill_inside(self.name)

    def pids(self) -> list[int]:
        """The processes that run in this host."""
        return pids_inside(self.name)

    def traffic(self) -> Traffic:
        """What went through its interface so far."""
        return traffic_of(_ip("-n", self.name, "-s", "-j", "link", "show", "dev", INTERFACE))

    def _see_inside(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait until a process is in here, where `die` finds it, or has ended."""
        end = time.monotonic() + COMMAND_S
        inside = (NAMESPACES / self.name).stat()
        with contextlib.suppress(FileNotFoundError):
            while not os.path.samestat(Path(f"/proc/{process.pid}/ns/net").stat(), inside):
                if time.monotonic() > end:
                    raise HostError(f"{self.name}: {process.args!r} has not entered it")
                if process.poll() is not None:
                    return
                time.sleep(0.005)

    def _entering(self, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def _inside(self, *words: str) -> None:
        _ip("-n", self.name, *words)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make so many hosts that reach each other; nothing of them is left afterwards.

    All Ray nodes in them share a token, drawn here. Raises HostError.
    """
    for subnet in SUBNETS:
        remove_left_behind(subnet)
    subnet, descriptor = _own_subnet()
    folder = folder_of(subnet)
    try:
        _ip("link", "add", f"{PREFIX}{subnet}", "type", "bridge")
        _ip("link", "set", f"{PREFIX}{subnet}", "up")
        environment = {"PYTHONPATH": str(REPOSITORY), **ray_environment(secrets.token_hex(32))}
        made = [Host(subnet, number, folder, environment) for number in range(1, count + 1)]
        names = names_for(made)
        for host in made:
            host.make(names)
        yield made
    finally:
        remove(subnet)
        os.close(descriptor)


def start_ray(made: Sequence[Host], head: Host | None = None, cpus: int = 2) -> str:
    """Start a Ray node in each host, beside each other; returns the address of their cluster.

    It is that of `head`, which runs already; without one the first host is the head.
    """
    head = head or made[0]
    begun: dict[Host, subprocess.Popen[bytes]] = {}
    end = time.monotonic() + RAY_START_S
    for host in made:
        log = host.folder.with_suffix(".ray")
        begun[host] = host.start(*host.ray_command(head, cpus), log=log)
        while not head.listens(RAY_PORT) and time.monotonic() < end and begun[host].poll() is None:
            time.sleep(0.1)
    for host, process in begun.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        if process.returncode != 0:
            said = host.folder.with_suffix(".ray").read_text(errors="replace")
            raise HostError(f"{host.name}: Ray has not started within {RAY_START_S:g} s: {said}")
    return f"{head.address}:{RAY_PORT}"


def ray_environment(token: str) -> dict[str, str]:
    """What a Ray node and all that speak to it need: the cluster's token, and settings."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "false",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "false",  # each takes seconds of a core
        **HEALTH,
    }


def names_for(made: Sequence[Host]) -> str:
    """An /etc/hosts of these: as on Debian, the machine's own name is of no use to others."""
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {socket.gethostname()}"]
    return "\n".join([*lines, *(f"{each.address} {each.name}" for each in made), ""])


def folder_of(subnet: int) -> Path:
    """The folder of the hosts of a subnet, which their maker has locked."""
    return FOLDERS / f"{PREFIX}{subnet}"


def remove_left_behind(subnet: int) -> None:
    """Remove the hosts of a maker that is gone; those of one that lives, or of another user, stay.

    What has no folder is nobody's of ours.
    """
    folder = folder_of(subnet)
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        descriptor = open_locked(folder, "who made these hosts", os.O_RDONLY | os.O_DIRECTORY)
    except (Locked, FileNotFoundError):
        return
    try:
        remove(subnet)
    finally:
        os.close(descriptor)


def remove(subnet: int) -> None:
    """Kill all that runs in the hosts of a subnet; remove them, their bridge and their folder."""
    listed = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    names = names_of(subnet, listed)
    for name in names:
        kill_inside(name)
    links = [each["ifname"] for each in json.loads(_ip("-j", "link", "show"))]
    for name in interfaces_of(subnet, links):
        _ip("link", "delete", name)
    for name in names:
        _ip("netns", "delete", name)
    for files in FILES.glob(f"{PREFIX}{subnet}-*"):  # also of one that somebody else has deleted
        shutil.rmtree(files, ignore_errors=True)
    shutil.rmtree(folder_of(subnet), ignore_errors=True)


def names_of(subnet: int, listed: Sequence[str]) -> list[str]:
    """Those of the listed namespaces that are hosts of this subnet."""
    own = f"{PREFIX}{subnet}-"
    return [name for name in listed if name.startswith(own) and name[len(own) :].isdigit()]


def interfaces_of(subnet: int, listed: Sequence[str]) -> list[str]:
    """Those of the listed interfaces that are this subnet's bridge and its cables."""
    bridge = f"{PREFIX}{subnet}"
    return [name for name in listed if name == bridge or name.startswith(f"{bridge}v")]


def traffic_of(listed: str) -> Traffic:
    """The bytes in what `ip -s -j link show dev NAME` prints."""
    (link,) = json.loads(listed)
    counts = link["stats64"]
    return Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"])


def pids_inside(name: str) -> list[int]:
    """The processes in a namespace."""
    return [int(pid) for pid in _ip("netns", "pids", name).split()]


def kill_inside(name: str) -> None:
    """SIGKILL all processes in a namespace. Raises HostError when some live on."""
    end = time.monotonic() + END_S
    while pids := pids_inside(name):
        if time.monotonic() > end:
            raise HostError(f"{name}: processes {pids} live on {END_S:g} s after SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _own_subnet() -> tuple[int, int]:
    """A subnet that nobody uses, its folder made, and the lock on that."""
    for subnet in random.SystemRandom().sample(SUBNETS, len(SUBNETS)):
        with contextlib.suppress(FileExistsError, FileNotFoundError, Locked):
            folder_of(subnet).mkdir(mode=0o700)
            flags = os.O_RDONLY | os.O_DIRECTORY
            return subnet, open_locked(folder_of(subnet), "who made these hosts", flags)
    raise HostError(f"every {FOLDERS / PREFIX}N is in use: remove those that nobody needs")


def _ip(*words: str) -> str:
    return _output(["ip", *words], COMMAND_S, os.environ)


def _output(command: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{' '.join(command)}: no end within {timeout_s:g} s") from error
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout
