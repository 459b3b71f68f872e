"""`scripts/fleet/launch.py` as a script: `forage train`; with `--resume RUN` `forage resume`."""

import sys

from scripts.cli import run

if __name__ == "__main__":
    head, on, tail = "\0".join(sys.argv[1:]).partition("--resume")
    sys.argv[1:] = ["resume" if on else "train", *filter(None, f"{tail[1:]}\0{head}".split("\0"))]
    run()
