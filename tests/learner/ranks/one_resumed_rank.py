"""One of two ranks that go on from a checkpoint: `python one_resumed_rank.py FOLDER RANK`.

FOLDER holds `config.json`, `start` with a checkpoint, and `share-STEP.RANK`, the shares of steps.
Leaves a checkpoint of what it has read (`again`), one before the last step (`end`) and `gauges`.
"""

import sys
from pathlib import Path

import msgspec
import torch
from torch import distributed

from configs.runtime.process import die_with_parent
from configs.schema import Config
from learner.model.engine import join_process_group
from learner.model.placement import Placement
from learner.ranks.shares import decode_share
from learner.trainer import Trainer


def main(folder: Path, rank: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    store = distributed.FileStore(str(folder / "store"), 2)
    join_process_group(store, Placement.on_one_host(rank, 2), config.learner)
    trainer = Trainer(config)
    trainer.restore(folder / "start")
    trainer.export(folder / "again")
    paths = sorted(folder.glob(f"share-*.{rank}"))
    *shares, last = [decode_share(path.read_bytes()) for path in paths]
    gauges = [trainer.learn([share]) for share in shares]
    trainer.export(folder / "end")
    gauges.append(trainer.learn([last]))
    trainer.close()
    if rank == 0:
        (folder / "gauges").write_bytes(msgspec.json.encode(gauges))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
