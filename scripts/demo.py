"""`make demo`: prepare the demo task (cached), then launch a run on it. See scripts/demo_task.py
for the task, scripts/demo_encoder.py for what searches it with `--retrieval dense`.
"""

import argparse
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Prepare, launch, and say where everything is."""
    arguments = _arguments()
    begun = time.monotonic()
    print(f"preparing the demo task (seed {arguments.seed}) ...", flush=True)
    try:
        settings = _prepare(arguments.seed, arguments.retrieval == "dense")
    except KeyboardInterrupt:
        return 130
    if settings is None:
        return 1
    print(f"  demo task ready: {time.monotonic() - begun:.1f} s", flush=True)

    from scripts import cli

    config = str(REPOSITORY / "configs" / "demo.yaml")
    seed = f"seed={arguments.seed}"
    code = cli.main(["train", config, seed, *settings, *arguments.overrides])
    print(f"make demo took {time.monotonic() - begun:.0f} s (installation not included)")
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The whole loop on two cores: prepare the demo task and train."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the world, the cold start and the run"
    )
    parser.add_argument(
        "--retrieval",
        choices=("bm25", "dense"),
        default="bm25",
        help="search by words, or by the vectors of an encoder that is trained first",
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields to override")
    return parser.parse_args()


def _prepare(seed: int, dense: bool) -> list[str] | None:
    """The settings that name what was made; None, with the reason said, where nothing could be."""
    from retrieval_server.protocol import BadIndex
    from scripts import demo_encoder, demo_task  # not before the first line: they take seconds

    cache = REPOSITORY / ".cache"
    try:
        files = demo_task.prepare(cache, seed, _tell)
        index = demo_encoder.prepare_index(cache, seed, files.corpus, _tell) if dense else None
    except (demo_task.ColdStartFailed, demo_encoder.EncoderFailed) as error:
        print(f"demo: {error}; try another SEED", file=sys.stderr)
        return None
    except BadIndex as error:
        print(f"demo: {error}", file=sys.stderr)
        return None
    return [
        f"model.path={files.model}",
        f"questions.train={files.train}",
        f"questions.eval={files.eval}",
        f"retrieval.corpus={files.corpus}",
        *([f"retrieval.index={index}"] if index else []),
    ]


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
