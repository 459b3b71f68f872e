"""The child process of one cell: `python -m scripts.bench.end_to_end.worker JOB`, a `Job` in JSON.

It writes the job's record and ends; it ends at once with its starter, and its engines or its fleet
with it.
"""

import sys
from pathlib import Path

import msgspec

from configs.runtime.process import begin, die_with_parent, leave
from scripts.bench.end_to_end.record import Job, Parts, Record

if __name__ == "__mp_main__":  # the engine's spawned child imports its parent's main module first
    die_with_parent()


def measure(job: Job) -> Record | Parts:
    """Run the job's work. Raises ConfigError, and what its parts raise."""
    from scripts.setup import preflight

    config = preflight.checked(job.config, job.overrides)
    if job.kind == "async":
        from scripts.bench.end_to_end.fleet import train

        return train(job, config)
    if job.kind == "parts":
        from scripts.bench.end_to_end.parts import measure_parts

        return measure_parts(job, config)
    from scripts.bench.end_to_end.loop import take_turns

    return take_turns(job, config)


def main(words: list[str]) -> int:
    """Measure and write."""
    begin("bench_end_to_end")
    job = msgspec.json.decode(words[0], type=Job)
    found = measure(job)
    Path(job.out).write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
