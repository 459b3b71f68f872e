"""The baseline of `forage bench stream`: the same rollouts through a Ray actor queue.

`python -m scripts.bench.stream.baseline RUN` (JSON of a RayRun) streams as RL systems built on Ray
do: Ray tasks put `Trajectory` objects into a `ray.util.queue.Queue`, one consumer takes up to 64 at
once (the faster way). Nothing is kept on a disk, nobody checks anything. One put under way is what
`Queue.put` does, more is what an asynchronous rollout loop can do. Every wait has a deadline.
"""

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # of producers that are cut off at the end
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import msgspec

from scripts.fleet.local_ray import start_ray  # isort: skip - it sets what Ray reads

import ray
from ray.util.queue import Queue

from configs.runtime.process import Exit, begin
from replay.trajectory import Sampling
from scripts.bench.stream.rollouts import rollout

MOST_AT_ONCE = 64  # that one get takes
QUEUE_SIZE = 2048
IDLE_S = 0.005  # where little is there: asking costs the queue its time
CALL_S = 60.0
ROWS = ((1, 1), (4, 1), (2, 16))  # producers, puts under way


class RayRun(msgspec.Struct, frozen=True):
    """The seconds for which each row is measured, and the file that gets the rows."""

    file: str
    seconds: float
    warm_up_s: float = 2.0


@contextmanager
def session() -> Iterator[None]:
    """Ray on two cores, in a directory of its own, started as for a run."""
    with tempfile.TemporaryDirectory(prefix="forage-ray-", ignore_cleanup_errors=True) as folder:
        start_ray(2, Path(folder))
        try:
            yield
        finally:
            ray.shutdown()


def produce(queue: Queue, name: str, under_way: int, limit_s: float) -> int:
    """Put rollouts, so many at a time, until cut off or the limit; how many there were."""
    end_s, count = time.monotonic() + limit_s, 0
    puts: list[Any] = []
    while time.monotonic() < end_s:
        trajectory = rollout(count // 8, count % 8, "q-1", name, 0, Sampling())
        puts.append(queue.actor.put.remote(trajectory, CALL_S))
        count += 1
        if len(puts) >= under_way:
            done, puts = ray.wait(puts, timeout=CALL_S)
            ray.get(done)
    return count


def stream(producers: int, under_way: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
    """Trajectories/s that reach the consumer; the window begins `warm_up_s` after the first."""
    queue = Queue(QUEUE_SIZE, actor_options={"num_cpus": 0})
    task = ray.remote(num_cpus=0, max_retries=0)(produce)
    limit_s = CALL_S + warm_up_s + seconds
    running = [task.remote(queue, f"actor-{i}", under_way, limit_s) for i in range(producers)]
    taken, begin_s, limit_s = 0, float("inf"), time.monotonic() + limit_s
    while (now_s := time.monotonic()) < begin_s + seconds:
        if now_s > limit_s:
            raise TimeoutError(f"no trajectory came through the Ray queue in {CALL_S:g} s")
        size = queue.size()
        if size < MOST_AT_ONCE / 4:
            time.sleep(IDLE_S)
        found = queue.get_nowait_batch(min(MOST_AT_ONCE, size)) if size else []
        if found and begin_s == float("inf"):
            begin_s = time.monotonic() + warm_up_s
        taken += len(found) if now_s >= begin_s else 0
    per_s = taken / (time.monotonic() - begin_s)
    for reference in running:
        ray.cancel(reference, force=True)
    queue.shutdown(force=True)
    return {"producers": producers, "under_way": under_way, "trajectories_per_s": per_s}


def main(run: RayRun) -> int:
    """Measure, write the figures to the file; `Exit.CONSEQUENCE` when Ray cannot start."""
    with ExitStack() as stack:
        try:
            stack.enter_context(session())
        except (RuntimeError, OSError, ValueError) as error:
            print(f"Ray cannot start here: {error}", file=sys.stderr)
            return Exit.CONSEQUENCE
        rows = [
            stream(producers, under_way, run.warm_up_s, run.seconds)
            for producers, under_way in ROWS
        ]
    Path(run.file).write_text(json.dumps(rows), encoding="utf-8")
    return Exit.DONE


if __name__ == "__main__":
    begin("ray")
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=RayRun)))
