"""`make demo`: prepare the demo task (cached), then launch a run on it. See scripts/demo_task.py
for the task.
"""

import argparse
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Prepare, launch, and say where everything is."""
    parser = argparse.ArgumentParser(
        description="The whole loop on two cores: prepare the demo task and train."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the world, the cold start and the run"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields to override")
    arguments = parser.parse_args()
    begun = time.monotonic()
    print(f"preparing the demo task (seed {arguments.seed}) ...", flush=True)

    from scripts import demo_task, launch  # after the first line: these imports take seconds

    try:
        files = demo_task.prepare(
            REPOSITORY / ".cache", arguments.seed, lambda line: print(f"  {line}", flush=True)
        )
    except demo_task.ColdStartFailed as error:
        print(f"demo: {error}; try another SEED", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"  demo task ready: {time.monotonic() - begun:.1f} s", flush=True)
    code = launch.main(
        [
            str(REPOSITORY / "configs" / "demo.yaml"),
            f"seed={arguments.seed}",
            f"model.path={files.model}",
            f"questions.train={files.train}",
            f"questions.eval={files.eval}",
            f"retrieval.corpus={files.corpus}",
            *arguments.overrides,
        ]
    )
    print(f"make demo took {time.monotonic() - begun:.0f} s (installation not included)")
    return code


if __name__ == "__main__":
    sys.exit(main())
