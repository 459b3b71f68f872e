"""The trainer of one rank: engine, averages, critic, and the steps, exports, restores they make.

Every method but `close` is collective: all ranks call it in the same order, and rank 0 uses the
result. `COLLECTIVES` lists them for `learner.ranks`, which makes rank 0's calls on the other ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed

from configs.schema import Config, LearnerConfig
from learner.algorithm.schedule import at_scale, learning_rate
from learner.batch import TrainingBatch
from learner.imitation import imitate, measure
from learner.model import peft_folder
from learner.model.critic import CriticEngine
from learner.model.ema import Averages
from learner.model.engine import Engine
from learner.model.placement import Placement
from learner.model.state import load_state, save_state
from learner.update import Note, update

# What a collective method is given
Argument = Literal["shares", "tokens", "folder", "number", "none"]
Method = TypeVar("Method", bound=Callable[..., Any])
STATE, CRITIC = "state", "critic"  # in a checkpoint
NO_AVERAGES = Averages(None, None)
COLLECTIVES: dict[str, Argument] = {}  # the marked methods of Trainer


def collective(argument: Argument) -> Callable[[Method], Method]:
    """Mark a method that all ranks call together, by what it is given.

    Of "shares" each rank is sent its own; everything else is sent to all alike.
    """

    def mark(method: Method) -> Method:
        COLLECTIVES[method.__name__] = argument
        return method

    return mark


class Trainer:
    """One rank's engine, its averages, and a critic that is a model of its own."""

    def __init__(
        self, config: Config, model_path: str | None = None, placement: Placement | None = None
    ) -> None:
        """Load `model_path` (default `model.path`); `placement`: where the ranks are, all on this
        host by default. Raises BadModel.
        """
        self.config, self._scale = config, 1.0
        self.engine = Engine(config, model_path, placement)
        self.averages = Averages.begin(self.engine, config.learner)
        judged = config.learner.has_critic_model
        self.critic = CriticEngine(config, model_path, placement) if judged else None
        self.rank, self.ranks = self.engine.rank, self.engine.ranks
        self.note: Note | None = None  # of rank 0: is given what each step's loss is made of

    @collective("shares")
    def learn(self, shares: Sequence[TrainingBatch], /) -> dict[str, float]:
        """Take one step on all ranks' shares (or this rank's alone); return its gauges."""
        share = self._own(shares)
        return update(self.engine, self.averages, share, self._learner, self.critic, self.note)

    @collective("shares")
    def imitate(self, shares: Sequence[TrainingBatch], /) -> dict[str, float]:
        """Take one supervised step on all ranks' shares of demonstrations; return its gauges."""
        share = self._own(shares)
        gauges = imitate(self.engine, share, learning_rate(share.step, self._learner))
        self.averages.update(self.engine)
        return gauges

    @collective("shares")
    def measure(self, shares: Sequence[TrainingBatch], /) -> float:
        """The loss of all ranks' shares of demonstrations; nothing is learnt from them."""
        return measure(self.engine, self._own(shares))

    @collective("tokens")
    def probe(self, tokens: Sequence[int], /) -> list[float]:
        """Log-prob of each of tokens[1:] given its prefix, at temperature 1: float[n − 1]."""
        return self.engine.probe(tokens)

    @collective("none")
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is published, each lasting until the next: whole weights by Hugging Face name, tied
        ones once, or where `learner.lora.publish` says so the adapter's by PEFT's.
        """
        lora = self.config.learner.lora
        as_adapter = lora.rank and lora.publish == "adapter"
        yield from self.engine.named_adapter() if as_adapter else self.engine.named_weights()

    @collective("folder")
    def export(self, folder: Path, /) -> None:
        """Write `folder/model` and, where there are such averages, `folder/ema` and
        `folder/anchor`, Hugging Face folders without tokenizer, and each rank's
        `folder/state/rank-R.safetensors` (of a critic `folder/critic/…`), which alone is synced:
        the rank that wrote it must. An adapter is merged into `folder/model`, and by itself, a PEFT
        folder, in `folder/adapter`; its averages are such folders too.
        """
        self._export_weights(folder / "model")
        adapts = bool(self.config.learner.lora.rank)
        if adapts:
            self._export_adapter(folder / "adapter")
        for name, average in self.averages.all().items():
            with average.swapped_in(self.engine):
                (self._export_adapter if adapts else self._export_weights)(folder / name)
        save_state(folder / STATE, self.config, self.engine, self.averages)
        if self.critic:
            save_state(folder / CRITIC, self.config, self.critic, NO_AVERAGES)
        if self.ranks > 1:
            distributed.barrier()

    @collective("folder")
    def restore(self, folder: Path, /) -> None:
        """Go on from `folder/state` and, of a critic, `folder/critic` as if never interrupted: bit
        for bit with as many ranks and the ZeRO stage that they were made with, otherwise but for
        rounding.

        Raises BadModel naming what is missing, or differs: architecture, optimiser, dtype.
        """
        load_state(folder / STATE, self.config, self.engine, self.averages)
        if self.critic:
            load_state(folder / CRITIC, self.config, self.critic, NO_AVERAGES)

    @collective("number")
    def scale_rates(self, scale: float, /) -> None:
        """Take the steps from here on at so many times the configured rates."""
        self._scale = scale

    def close(self) -> None:
        """Release the engines, the last made first."""
        if self.critic:
            self.critic.close()
        self.engine.close()

    @property
    def _learner(self) -> LearnerConfig:
        return at_scale(self.config.learner, self._scale)

    def _own(self, shares: Sequence[TrainingBatch]) -> TrainingBatch:
        return shares[self.rank] if len(shares) > 1 else shares[0]

    def _export_weights(self, folder: Path) -> None:
        model = self.engine.model
        weights = self._on_cpu(self.engine.named_weights(), getattr(torch, self.config.model.dtype))
        if self.rank == 0:
            known = set(weights)
            buffers = {name for name, _ in model.named_buffers()} - known
            state = model.state_dict()
            weights |= {name: state[name].cpu() for name in sorted(buffers & state.keys())}
            model.save_pretrained(folder, state_dict=weights)

    def _export_adapter(self, folder: Path) -> None:
        weights = self._on_cpu(self.engine.named_adapter(), torch.float32)
        if self.rank == 0:
            peft_folder.write(folder, weights, self.config.learner.lora, self.config.model.path)

    def _on_cpu(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of them on rank 0; the other ranks gather along."""
        copies = {}
        for name, weight in named:
            if self.rank == 0:
                copies[name] = weight.to("cpu", dtype, copy=True).contiguous()
        return copies
