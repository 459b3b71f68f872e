"""The processes of a warm start's ranks above 0: started, watched, and never left behind."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from configs.runtime.process import end_child, socket_dir, start_child
from configs.schema import Config
from learner.errors import RankLost

LEAVE_S = 30.0  # for a rank that has been dismissed; its work is done, and saved
FAIL_S = 2.0  # for the last words of one that fails

Ranks = dict[int, "subprocess.Popen[bytes]"]


@contextlib.contextmanager
def other_ranks(config: Config, console: Console) -> Iterator[Ranks]:
    """Start the ranks above 0 (with `learner.rendezvous`: print how), and end them on leaving."""
    started: Ranks = {}
    patience_s = LEAVE_S
    try:
        for rank in range(1, config.learner.ranks):
            path = str(Path(config.run_dir) / "config.yaml")
            words = ["-m", "learner.worker", path, "--rank", str(rank)]
            if config.learner.rendezvous:
                console.print(f"start on its machine: {' '.join(words)}", soft_wrap=True)
            else:
                # In a session of its own: Ctrl-C is rank 0's alone, which says when to leave.
                started[rank] = start_child(words, own_session=True)
        yield started
    except BaseException as error:
        patience_s = 0.0 if isinstance(error, KeyboardInterrupt) else FAIL_S
        raise
    finally:
        for process in started.values():
            end_child(process, patience_s)
        if config.learner.ranks > 1:
            shutil.rmtree(socket_dir(config.run_dir), ignore_errors=True)


@contextlib.contextmanager
def joining(ranks: Ranks) -> Iterator[None]:
    """Raise RankLost on the main thread as soon as a rank ends that has not joined."""

    def look(_number: int, _frame: FrameType | None) -> None:
        for rank, process in ranks.items():
            if (code := process.poll()) is not None:
                raise RankLost(
                    f"rank {rank} of the learner ended with exit code {code} before it had joined; "
                    "what it said is above"
                )

    if not ranks:  # tests learn on one rank, and on any thread
        yield
        return
    before = signal.signal(signal.SIGCHLD, look)
    try:
        look(signal.SIGCHLD, None)  # it may have ended before
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
