"""Runs in slices of time: each that is whole is a file, and what is left goes on the next time."""

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from configs.runtime.process import die_with_parent
from scripts.bench.staleness.run import Job, work


@dataclass(frozen=True)
class Slice:
    """Where finished runs lie, and how many processes make more of them for how long."""

    folder: Path
    workers: int
    minutes: float

    def run(self, jobs: Mapping[str, Job]) -> list[str]:
        """Make the runs, by label, that are not there yet, until the time is over; the labels of
        those left. Of equal ones one is made.
        """
        deadline = time.time() + 60.0 * self.minutes
        self.folder.mkdir(parents=True, exist_ok=True)
        todo: dict[str, tuple[str, Job]] = {}
        for label, job in jobs.items():
            if not self._file(job).is_file():
                todo.setdefault(job.name, (label, job))
        if todo:
            print(f"{len(todo)} runs to do in {self.folder}", flush=True)
            self._run(list(todo.values()), deadline)
        left = [label for label, job in todo.values() if not self._file(job).is_file()]
        if left:
            print(f"{len(left)} runs left, {left[0]} first: give the same command again to go on")
        return left

    def record(self, job: Job) -> dict[str, Any] | None:
        """What is on file of a job; None of one that is not finished."""
        path = self._file(job)
        found: dict[str, Any] | None = json.loads(path.read_bytes()) if path.is_file() else None
        return found

    def _file(self, job: Job) -> Path:
        return self.folder / f"{job.name}.json"

    def _run(self, todo: list[tuple[str, Job]], deadline: float) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # one thread per process: more of them spin
        folder = str(self.folder)
        with ProcessPoolExecutor(
            self.workers, mp_context=get_context("spawn"), initializer=die_with_parent
        ) as pool:
            tasks = [pool.submit(work, job, label, deadline, folder) for label, job in todo]
            try:
                for number, task in enumerate(as_completed(tasks), 1):
                    if line := task.result():
                        print(f"[{number}/{len(tasks)}] {line}", flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True, wait=False)
                raise
