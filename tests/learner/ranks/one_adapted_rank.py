"""One of two ranks that train an adapter: `python one_adapted_rank.py FOLDER RANK`.

FOLDER holds `config.json` and `share-STEP.RANK`; rank 0 leaves the weights, and both an export.
"""

import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import distributed

from configs.runtime.process import die_with_parent
from configs.schema import Config
from learner.model.engine import join_process_group
from learner.model.placement import Placement
from learner.ranks.shares import decode_share
from learner.trainer import Trainer

STEPS = (1, 2, 3)


def main(folder: Path, rank: int) -> None:
    """Train, keep the weights, export, go on from what was exported."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    store = distributed.FileStore(str(folder / "store"), 2)
    join_process_group(store, Placement.on_one_host(rank, 2), config.learner)
    trainer = Trainer(config)
    for step in STEPS:
        trainer.learn([decode_share((folder / f"share-{step}.{rank}").read_bytes())])
        if step == 2:
            trainer.export(folder / "at-2")
    weights = {name: weight.clone() for name, weight in trainer.engine.named_weights()}
    trainer.restore(folder / "at-2")
    trainer.learn([decode_share((folder / f"share-3.{rank}").read_bytes())])
    again = {name: weight.clone() for name, weight in trainer.engine.named_weights()}
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
    trainer.close()


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
