"""The children of `forage bench plan`: `python -m scripts.bench.plan.worker generate|train JOB`, a
`PartsJob` in JSON. Each writes what it measured into the job's folder, as `NAME.json`.
"""

import sys
from pathlib import Path

import msgspec

from configs.runtime.process import begin, die_with_parent, leave
from scripts.bench.plan.record import PartsJob

if __name__ == "__mp_main__":  # the engine's spawned child imports its parent's main module first
    die_with_parent()


def main(words: list[str]) -> int:
    """Measure and write."""
    begin("bench_plan")
    from scripts.bench.plan import parts

    name, job = words[0], msgspec.json.decode(words[1], type=PartsJob)
    found = parts.train(job) if name == "train" else parts.generate(job)
    (Path(job.folder) / f"{name}.json").write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
