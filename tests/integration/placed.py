"""A run whose processes are started by hand, each in a host of its own choosing, with the commands
that `forage train --prepare-only` prints.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from replay.log.event_log import FILE_NAME, read_whole
from replay.log.records import Record
from tests.faults.hosts import Host

PREPARE_S, ENDED_S, END_S = 120.0, 10.0, 30.0
REPLAY_PORT, SYNC_PORT, RETRIEVAL_PORT = 7001, 7002, 7003


def printed_commands(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The variables and the command of each process in what `--prepare-only` prints."""
    lines = text.splitlines()
    (export,) = (line for line in lines if line.startswith("export "))
    variables = dict(word.split("=", 1) for word in shlex.split(export)[1:])
    titles = [number for number, line in enumerate(lines) if line.startswith("# terminal ")]
    return variables, {
        lines[number].rpartition(": ")[2]: shlex.split(lines[number + 1]) for number in titles
    }


class OverHosts:
    """A run whose processes lie in several hosts, by what is on record of it. `processes` are those
    that were started here.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def records(self) -> Iterator[Record]:
        """What is on record so far."""
        if (self.run_dir / FILE_NAME).exists():
            yield from read_whole(self.run_dir / FILE_NAME)

    def wait_for(
        self,
        what: str,
        wanted: Callable[[Record], bool],
        deadline_s: float,
        dead: Sequence[str] = (),
    ) -> Record:
        """The first record like this; fails at once where a process has ended, but those of `dead`.

        What is on record already counts.
        """
        end = time.monotonic() + deadline_s
        while True:
            for record in self.records():
                if wanted(record):
                    return record
            gone = [n for n, p in self.processes.items() if p.poll() is not None and n not in dead]
            if gone or time.monotonic() > end:
                pytest.fail(f"no {what}; ended: {gone}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """The end of every process's log."""
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "".join(f"--- {f.name}\n{f.read_text(errors='replace')[-2500:]}\n" for f in files)


class Placed(OverHosts):
    """One run. `where` says in which host each process lies."""

    def __init__(self, run_dir: Path, where: Mapping[str, Host], overrides: Sequence[str]) -> None:
        super().__init__(run_dir)
        endpoints = (
            f"run_dir={run_dir}",
            f"replay.endpoint=tcp://{where['replay'].address}:{REPLAY_PORT}",
            f"weight_sync.endpoint=tcp://{where['learner'].address}:{SYNC_PORT}",
            f"retrieval.host={where['retrieval_server'].address}",
            f"retrieval.port={RETRIEVAL_PORT}",
        )
        train = (sys.executable, "-m", "scripts.cli", "train", "configs/demo.yaml")
        said = where["retrieval_server"].run(  # whose port is looked at
            *train, "--prepare-only", *endpoints, *overrides, timeout_s=PREPARE_S
        )
        self._variables, self._commands = printed_commands(said)
        assert self._commands.keys() == where.keys()
        (run_dir / "logs").mkdir()
        for name, host in where.items():
            self.start(name, host)

    def start(self, name: str, host: Host, *more: str) -> None:
        """Start a process, or one that has ended again, with more words in its command."""
        if (last := self.processes.get(name)) is not None:
            last.wait(ENDED_S)
        self.processes[name] = host.start(
            *self._commands[name],
            *more,
            log=self.run_dir / "logs" / f"{name}.log",
            environment=self._variables,
        )

    def wait(self, name: str, deadline_s: float) -> None:
        """Wait until this process has ended well."""
        try:
            code = self.processes[name].wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} still runs after {deadline_s:g} s\n{self.logs()}")
        assert code == 0, f"{name} ended with {code}\n{self.logs()}"

    def finish(self, deadline_s: float, names: Sequence[str]) -> None:
        """Wait until all but the retrieval server, which is told to, have ended well."""
        for name in ("learner", *names, "replay"):
            self.wait(name, deadline_s)
        self.processes["retrieval_server"].terminate()
        self.wait("retrieval_server", END_S)


class Launched(OverHosts):
    """A run that `forage train` starts in the first of these hosts, over their Ray cluster."""

    def __init__(self, run_dir: Path, host: Host, address: str, overrides: Sequence[str]) -> None:
        super().__init__(run_dir)
        self._host, self._log = host, run_dir.with_suffix(".log")
        words = ("train", "configs/demo.yaml", f"run_dir={run_dir}", *overrides)
        self._start(*words, f"cluster.address={address}")

    def go_on(self, *words: str) -> None:
        """Go on with it (`forage resume`), once it has ended."""
        self.processes["launcher"].wait(ENDED_S)
        self._start("resume", str(self.run_dir), "--trust", *words)  # its cluster.address

    def _start(self, *words: str) -> None:
        command = (sys.executable, "-m", "scripts.cli", *words)
        self.processes["launcher"] = self._host.start(*command, log=self._log)

    def said(self) -> str:
        """What the launcher has printed, each of its lines in one."""
        return " ".join(self._log.read_text(errors="replace").split())

    def wait_for_words(self, words: str, deadline_s: float) -> None:
        """Wait until the launcher has said this; fails at once where it has ended."""
        end = time.monotonic() + deadline_s
        while words not in self.said():
            if self.processes["launcher"].poll() is not None or time.monotonic() > end:
                pytest.fail(f"the launcher has not said {words!r}:\n{self.logs()}")
            time.sleep(0.1)

    def end(self, deadline_s: float) -> int:
        """Have it drain; the exit code."""
        self.processes["launcher"].terminate()
        return self.wait_for_end(deadline_s)

    def wait_for_end(self, deadline_s: float) -> int:
        """The exit code, once it has ended by itself."""
        try:
            return self.processes["launcher"].wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher still runs after {deadline_s:g} s\n{self.logs()}")

    def logs(self) -> str:
        """What the launcher said, and the end of every process's log."""
        lines = self._log.read_text(errors="replace").splitlines()
        said = [line for line in lines if not line.startswith("step ")]
        return "\n".join([*said, super().logs()])
