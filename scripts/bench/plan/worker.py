"""The child of `forage bench plan`: `python -m scripts.bench.plan.worker JOB`, a `GenerationJob` in
JSON. It writes what it measured, and ends at once with its starter, its engine with it.
"""

import sys
from pathlib import Path

import msgspec

from configs.runtime.process import begin, die_with_parent, leave
from scripts.bench.plan.record import GenerationJob

if __name__ == "__mp_main__":  # the engine's spawned child imports its parent's main module first
    die_with_parent()


def main(words: list[str]) -> int:
    """Measure and write."""
    begin("bench_plan")
    from scripts.bench.plan.generation import generate

    job = msgspec.json.decode(words[0], type=GenerationJob)
    Path(job.out).write_bytes(msgspec.json.encode(generate(job)))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
