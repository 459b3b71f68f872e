"""One of several ranks: `python one_led_rank.py FOLDER RANK`; rank 0 leads steps, then waits.

FOLDER holds `config.json` and `share-STEP.RANK`. Rank 0 writes `steps` when it has done its work,
and closes when `close` appears.
"""

import logging
import sys
import time
from pathlib import Path

import msgspec
import torch

from configs.runtime.process import die_with_parent
from configs.schema import Config
from learner.errors import LearnerError
from learner.ranks.leader import follow, lead
from learner.ranks.shares import decode_share


def work(folder: Path, config: Config) -> None:
    trainer = lead(config)
    ranks = range(config.learner.ranks)
    shares = [
        [decode_share((folder / f"share-{step}.{rank}").read_bytes()) for rank in ranks]
        for step in (1, 2)
    ]
    trainer.learn(shares[0])
    trainer.export(folder / "at-1")
    next(iter(trainer.named_weights()))  # the rest must still be gathered by everybody
    gauges = [trainer.learn(shares[1])]
    trainer.restore(folder / "at-1")
    gauges.append(trainer.learn(shares[1]))
    found = {"gauges": gauges, "probe": trainer.probe([3, 14, 15])}
    trainer.scale_rates(0.0)  # on every rank: else its part of the weights moves
    trainer.learn(shares[1])
    found["still"] = trainer.probe([3, 14, 15])
    trainer.scale_rates(1.0)
    found["measured"] = trainer.measure(shares[0])
    found["imitated"] = [trainer.imitate(shares[0])["learner/loss"] for _ in range(2)]
    (folder / "writing").write_bytes(msgspec.json.encode(found))
    (folder / "writing").rename(folder / "steps")
    while not (folder / "close").exists():
        time.sleep(0.05)
    trainer.close()


def main(folder: Path, rank: int) -> int:
    die_with_parent()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
    try:
        if rank == 0:
            work(folder, config)
        else:
            follow(config, rank)
    except LearnerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
