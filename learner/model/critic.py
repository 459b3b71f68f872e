"""The critic's engine: DeepSpeed at the learner's ZeRO stage, beside the policy's."""

import torch
from torch import Tensor, nn

from configs.schema import Config
from learner.model.engine import Training
from learner.model.head import ValueLoss
from learner.model.loading import load_to_train
from learner.model.value import ValueModel
from learner.packing import MicroBatch


class CriticEngine(Training):
    """A critic of its own: the trunk of the same model, and a value head."""

    def _make(self, config: Config, model_path: str | None) -> tuple[nn.Module, nn.Module]:
        model = ValueModel(load_to_train(config, model_path))
        return model, model

    def values(self, micro: MicroBatch) -> Tensor:
        """Values float32[B, T] before each token, without gradient."""
        with torch.no_grad():
            values: Tensor = self._engine(micro.tokens)
        return values

    def accumulate(self, micro: MicroBatch, loss: ValueLoss) -> Tensor:
        """Add this share's gradient to the step's sum; return the values it was made from."""
        values: Tensor = self._engine(micro.tokens)
        self._backward(loss(values))
        return values.detach()
