"""`forage demo wiki` on the made-up world, with the model in CACHE/model:

python -m tests.scripts.wiki.pipeline.tiny CACHE WORDS...
"""

import json
import shutil
import sys
from pathlib import Path

from scripts import cli
from scripts.wiki.pipeline import pipeline
from scripts.wiki.pipeline.start import Recipe
from tests.scripts.wiki.small import packaged

TINY = Recipe(first=2, every=2, last=4, rows=4, questions=4, least_em=0.0)  # it answers nothing
FEW = (
    "model.dtype=float32",
    "model.max_model_len=4096",
    "questions.eval_limit=4",
    "questions.prompt='{question}'",
    "replay.groups_per_step=1",
    "replay.group_size=2",
    "replay.drop_no_signal=false",  # every reward is 0
    "actors.threads=1",
    "actors.max_passage_tokens=8",
    "actors.max_action_tokens=120",  # its tokens are letters
    "actors.kv_cache_bytes=100000000",
    "learner.threads=1",
)


def lengthened(model: Path, copy: Path) -> None:
    """Copy a model folder, as one that reads 4,096 tokens."""
    shape = shutil.copytree(model, copy) / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 4096}))


if __name__ == "__main__":
    cache = Path(sys.argv[1])
    with packaged(cache):
        pipeline.run.__defaults__ = (cache, TINY)
        code = cli.main(["demo", "wiki", *sys.argv[2:]])
    sys.exit(code)
