"""The learner's stand-in of `scripts/bench_stream.py`: takes batches, decodes and commits them.

`python -m scripts.bench_stream_drain ENDPOINT STEP_FILE` asks as the learner does, through
`BatchReader`, decodes every trajectory, as the learner would, and writes its step to the file,
where the simulated actors learn of it. Ends when replay says Stop; every wait has a deadline.
"""

import sys
from pathlib import Path

from configs.process import begin
from replay.codec import decode_trajectory
from replay.learner_client import BatchReader
from replay.protocol import Stop

DEADLINE_S = 60.0


def drain(endpoint: str, step_file: Path) -> int:
    """Take and commit batches until the run is over; how many there were."""
    step = 0
    with BatchReader(endpoint, 1, DEADLINE_S, DEADLINE_S) as reader:
        reader.resume(0)
        while not isinstance(batch := reader.sample(step), Stop):
            for group in batch.groups:
                for payload in group:
                    decode_trajectory(payload)
            step = batch.step
            reader.committed(step)
            new = step_file.with_suffix(".new")
            new.write_text(str(step), encoding="ascii")
            new.replace(step_file)
        reader.finish()
    return step


if __name__ == "__main__":
    begin("drain")
    drain(sys.argv[1], Path(sys.argv[2]))
