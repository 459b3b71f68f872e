"""`forage demo wiki` on the made-up world, with the model in CACHE/model:

python -m tests.scripts.wiki.pipeline.tiny CACHE WORDS...
"""

import sys
from pathlib import Path

from scripts import cli
from scripts.wiki.pipeline import pipeline
from scripts.wiki.pipeline.start import Recipe
from tests.scripts.wiki.small import packaged

TINY = Recipe(first=2, every=2, last=4, rows=4, questions=4, least_em=0.0)  # it answers nothing

if __name__ == "__main__":
    cache = Path(sys.argv[1])
    with packaged(cache):
        pipeline.run.__defaults__ = (cache, TINY)
        code = cli.main(["demo", "wiki", *sys.argv[2:]])
    sys.exit(code)
