"""The children of `forage bench plan`: `python -m scripts.bench.plan.worker parts|train JOB`, a
`PartsJob` in JSON. `parts` writes `record.json` into the job's folder.
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
    from scripts.bench.plan.parts import measure_parts, train

    job = msgspec.json.decode(words[1], type=PartsJob)
    if words[0] == "train":
        train(job)
    else:
        found = measure_parts(job)
        (Path(job.folder) / "record.json").write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
