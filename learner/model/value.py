"""A critic: on a model's trunk a number for each token, the reward expected before it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

if TYPE_CHECKING:  # the scorer, which has a head of these, needs torch and transformers alone
    from configs.schema import LearnerConfig


class ValueHead(nn.Module):  # type: ignore[misc]
    """One number of each hidden state; 0 at the start, and so the same on every rank.

    The product is in fp32: in bf16 values between 0 and 1 would have 3 digits at most.
    """

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """float[...] of [..., H] hidden states."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(dtype) @ self.weight.to(dtype) + self.bias.to(dtype)


def value_head_of(causal_lm: PreTrainedModel, config: "LearnerConfig") -> ValueHead | None:
    """The value head of a critic on the policy's trunk; in fp32 where adapters are, else in the
    model's dtype, as one optimiser has them. None where there is no such critic.
    """
    if not config.has_value_head:
        return None
    output = causal_lm.get_output_embeddings().weight
    return ValueHead(output.shape[1], torch.float32 if config.lora.rank else output.dtype)


class ValueModel(nn.Module):  # type: ignore[misc]
    """The trunk of a causal LM with a value head, all its own: DeepSpeed sees one module."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """Take over its trunk; its language-model head is left."""
        super().__init__()
        output = causal_lm.get_output_embeddings().weight
        self.trunk = causal_lm.base_model
        self.head = ValueHead(output.shape[1], output.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Values [B, T] of int64[B, T] tokens, right-padded: at t of all before token t, as the
        policy has them when it samples that; 0 at the first, which nothing precedes.
        """
        hidden = self.trunk(input_ids=tokens, use_cache=False).last_hidden_state
        return functional.pad(self.head(hidden[:, :-1]), (1, 0))
