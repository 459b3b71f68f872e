"""One of two ranks: `python one_of_two_ranks.py FOLDER RANK`; leaves its findings in FOLDER.

FOLDER holds `config.json` and `share-STEP.RANK`, the encoded shares of steps 1 to 3.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM

from configs.runtime.process import die_with_parent
from configs.schema import Config, LearnerConfig
from learner.health.tokens import TokenFiles
from learner.model.engine import join_process_group
from learner.model.placement import Placement
from learner.model.scorer import TokenScorer
from learner.ranks.shares import decode_share
from learner.trainer import Trainer

DECAY = 0.8  # of the configuration's proximal average
AVERAGED = 40  # steps; of the first weights a part in 10,000 is left


class Rank:
    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
        self.shares = [
            decode_share((folder / f"share-{step}.{rank}").read_bytes()) for step in (1, 2, 3)
        ]
        self.facts: dict[str, float | bool | list[float]] = {}

    def trainer(self, optimiser: str, dtype: str) -> Trainer:
        lr = {"sgd": 1e-2, "adamw": 1e-3}[optimiser]
        learner = msgspec.structs.replace(self.config.learner, lr=lr)
        if optimiser == "sgd":
            learner = msgspec.structs.replace(
                learner, optimiser=optimiser, betas=LearnerConfig().betas
            )
        model = msgspec.structs.replace(self.config.model, dtype=dtype)
        return Trainer(msgspec.structs.replace(self.config, learner=learner, model=model))

    def train(self, trainer: Trainer, steps: range) -> list[dict[str, float]]:
        made = []
        for step in steps:
            made.append(trainer.learn([replace(self.shares[step % 3], step=step)]))
        return made

    def keep(self, name: str, trainer: Trainer) -> dict[str, Tensor]:
        weights = {key: value.clone() for key, value in trainer.named_weights()}
        if self.rank == 0:
            save_file(weights, self.folder / f"{name}.safetensors")
        return weights

    def sgd(self) -> None:
        trainer = self.trainer("sgd", "float32")
        if self.rank == 0:
            trainer.note = TokenFiles(self.folder, 3, averages=True).write
        gauges = self.train(trainer, range(1, 4))
        self.facts["norms"] = [each["learner/grad_norm"] for each in gauges]
        self.facts["losses"] = [each["learner/loss"] for each in gauges]
        self.facts["tokens"] = gauges[0]["learner/action_tokens"] if self.rank == 0 else 0.0
        self.keep("sgd", trainer)
        trainer.close()

    def adamw(self, dtype: str) -> None:
        trainer = self.trainer("adamw", dtype)
        self.train(trainer, range(1, 3))
        trainer.export(self.folder / dtype)
        self.keep(f"{dtype}-exported", trainer)
        self.swap(trainer, dtype)
        expected = self.train(trainer, range(3, 7))
        weights = self.keep(f"{dtype}-6", trainer)
        if dtype == "float32":  # the one that a plain engine is compared with
            self.train(trainer, range(7, 21))
            self.keep("float32-20", trainer)
        trainer.close()
        trainer = self.trainer("adamw", dtype)
        trainer.restore(self.folder / dtype)
        self.facts[f"{dtype} gauges again"] = self.train(trainer, range(3, 7)) == expected
        self.facts[f"{dtype} weights again"] = _same(trainer.named_weights(), weights)
        trainer.close()

    def swap(self, trainer: Trainer, dtype: str) -> None:
        own = {name: weight.clone() for name, weight in trainer.named_weights()}
        micro = self.shares[0].micro_batches[0]
        before = trainer.engine.score(micro, 0.7).logprobs
        try:
            with trainer.averages.proximal.swapped_in(trainer.engine):
                scores = trainer.engine.score(micro, 0.7).logprobs
                self.facts[f"{dtype} lent"] = not _same(trainer.named_weights(), own)
                raise KeyError
        except KeyError:
            self.facts[f"{dtype} given back"] = _same(trainer.named_weights(), own)
        after = trainer.engine.score(micro, 0.7).logprobs
        self.facts[f"{dtype} scores given back"] = torch.equal(before, after)
        saved = AutoModelForCausalLM.from_pretrained(self.folder / dtype / "ema")
        with torch.no_grad():
            expected, _, _ = TokenScorer(saved)(micro.tokens, micro.loss_mask, 0.7)
        self.facts[f"{dtype} off the saved"] = float((scores - expected).abs().max())
        save_file({"scores": scores}, self.folder / f"{dtype}-scores.{self.rank}")

    def average(self) -> None:
        trainer = self.trainer("adamw", "bfloat16")
        masters, ema = trainer.engine.shards.masters(), trainer.averages.proximal
        closed = {n: DECAY**AVERAGED * m.detach().double() for n, m in masters.items()}
        micro = self.shares[0].micro_batches[0]
        for step in range(1, AVERAGED + 1):
            trainer.engine.accumulate(micro, 1.0, lambda logprobs, _chunk: -logprobs.mean())
            trainer.engine.step(1e-3)
            trainer.averages.update(trainer.engine)
            for name, master in masters.items():
                closed[name] += 0.2 * DECAY ** (AVERAGED - step) * master.detach().double()
        worst = [float((ema.master[n].double() - closed[n]).abs().max()) for n in masters]
        self.facts["closed form"] = max(worst)
        self.facts["dtype"] = str(next(trainer.engine.model.parameters()).dtype)
        trainer.close()


def _same(named: Iterable[tuple[str, Tensor]], expected: dict[str, Tensor]) -> bool:
    named = dict(named)  # every weight is asked for: gathering one is collective
    return all(torch.equal(weight, expected[name]) for name, weight in named.items())


def main(folder: Path, rank: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    one = Rank(folder, rank)
    store = distributed.FileStore(str(folder / "store"), 2)
    join_process_group(store, Placement.on_one_host(rank, 2), one.config.learner)
    one.sgd()
    one.adamw("float32")
    one.adamw("bfloat16")
    one.average()
    (folder / f"facts-{rank}.json").write_bytes(msgspec.json.encode(one.facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
