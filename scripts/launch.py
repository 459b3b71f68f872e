"""The launch script: `forage train CONFIG …`; with `--resume RUN …` it is `forage resume RUN …`."""

import sys

from scripts.cli import main

words = sys.argv[1:]
at = words.index("--resume") if "--resume" in words else len(words)
again = ["resume", *words[at + 1 : at + 2], *words[:at], *words[at + 2 :]]
sys.exit(main(again if at < len(words) else ["train", *words]))
