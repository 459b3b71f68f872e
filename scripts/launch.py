"""`scripts/fleet/launch.py` as a script: `forage train`; with `--resume RUN` `forage resume`."""

import sys

from scripts.cli import run

if __name__ == "__main__":
    given, at = sys.argv[1:], sys.argv.index("--resume") if "--resume" in sys.argv else 0
    sys.argv[1:] = ["resume", *sys.argv[at + 1 :], *given[: at - 1]] if at else ["train", *given]
    run()
