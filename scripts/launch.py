"""`scripts/fleet/launch.py` as a script: `forage train`; with `--resume RUN` `forage resume`."""

import sys

try:
    from scripts.cli import run
except ModuleNotFoundError as error:
    sys.exit(f"forage: {error}: first `. .venv/bin/activate`, which `make .venv` installs")

if __name__ == "__main__":
    head, on, tail = "\0".join(sys.argv[1:]).partition("--resume")
    sys.argv[1:] = ["resume" if on else "train", *filter(None, f"{tail[1:]}\0{head}".split("\0"))]
    run()
