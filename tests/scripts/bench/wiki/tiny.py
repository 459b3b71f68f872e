"""`forage bench wiki` on the made-up world, with the model in CACHE/model:

python -m tests.scripts.bench.wiki.tiny CACHE WORDS...
"""

import sys
from pathlib import Path

from scripts import cli
from scripts.bench.wiki import bench
from scripts.bench.wiki.supervised import Schedule
from scripts.wiki.pipeline import pipeline
from tests.scripts.wiki.pipeline.tiny import TINY
from tests.scripts.wiki.small import packaged

if __name__ == "__main__":
    cache = Path(sys.argv[1])
    with packaged(cache):
        pipeline.RUNS = cache / "runs"
        bench.measure.__defaults__ = (cache, TINY, Schedule(every=60, patience=1, questions=4))
        code = cli.main(["bench", "wiki", *sys.argv[2:]])
    sys.exit(code)
