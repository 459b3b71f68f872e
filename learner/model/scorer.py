"""A causal language model that scores tokens: log-probs and entropies at action positions only.

The output head runs on the positions whose *next* token is trained: prompts and observations cost
a hidden state each, never a row of logits.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from learner.errors import BadModel
from learner.model.head import (
    CHUNK_BYTES,
    Candidates,
    ChunkLoss,
    HeadOutput,
    LogProbHead,
    ValueLoss,
)
from learner.model.value import ValueHead

if TYPE_CHECKING:  # the scorer needs torch and transformers alone
    from configs.schema import ModelConfig

if not torch.cuda.is_available():  # DeepSpeed says so too, which transformers imports as it saves
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
disable_progress_bar()  # one for each of a model's loads and saves, in milliseconds


class TokenScores(NamedTuple):
    """Both float32[N] over the action tokens, in the order in which the mask lists them, detached.

    `entropy` is of the distribution the token was drawn from, in nats; `candidates` are others that
    might have been drawn, where some were asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    candidates: Candidates | None = None
    values: Tensor | None = None  # [B, T] before each action token, of a critic on the same trunk

    @classmethod
    def of(cls, logprobs: Tensor, entropy: Tensor, ids: Tensor | None) -> "TokenScores":
        """The scores of a pass that also scored these candidates int[N, k]."""
        if ids is None:
            return cls(logprobs, entropy)
        return cls(logprobs[:, 0], entropy, Candidates(ids, logprobs[:, 1:]))

    @property
    def table(self) -> Tensor:
        """float32[N, 1 + k]: of the tokens, then of their candidates; [N] where there are none."""
        if self.candidates is None:
            return self.logprobs
        return torch.cat([self.logprobs.unsqueeze(-1), self.candidates.logprobs], -1)


class TokenScorer(nn.Module):  # type: ignore[misc]
    """A causal LM whose one forward call scores action tokens (DeepSpeed sees one module)."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        chunk_bytes: int = CHUNK_BYTES,
        head_dtype: str = "",
        value_head: ValueHead | None = None,
    ) -> None:
        """`chunk_bytes` (`learner.chunk_bytes`) bounds the logits that exist at a time;
        `head_dtype` is `model.head_dtype`; `value_head` a critic's, on the same trunk.
        """
        super().__init__()
        self.causal_lm = causal_lm
        dtype = getattr(torch, head_dtype) if head_dtype else None
        self.head = LogProbHead(causal_lm.get_output_embeddings(), chunk_bytes, dtype)
        self.value_head = value_head

    def forward(
        self,
        tokens: Tensor,
        loss_mask: Tensor,
        temperature: float,
        loss: ChunkLoss | None = None,
        bonus: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        likeliest: Candidates | None = None,
        values: Tensor | None = None,
        value_loss: ValueLoss | None = None,
    ) -> HeadOutput:
        """Log-probs and entropies float32[N] of the tokens where `loss_mask`, detached, and with
        `loss` its value less the entropy `bonus` with the critic's `value_loss`: it has a gradient.

        With `candidates` int[N, k] the log-probs are [N, 1 + k], theirs beside each token's own;
        `likeliest` is filled with the likeliest, `values` float32[B, T] with the critic's before
        each of the tokens. tokens int64[B, T] and loss_mask bool[B, T] are
        right-padded. Without any action token (N = 0) the value is 0 and every gradient too, so
        that ranks stay in step.
        """
        # Right padding lies in the future of every real token: causal attention needs no other
        # mask.
        hidden = self.causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        predicts = loss_mask[:, 1:]  # position t − 1 predicts token t
        targets = tokens[:, 1:][predicts]
        if candidates is not None:
            targets = torch.cat([targets.unsqueeze(-1), candidates.to(targets)], -1)
        states = hidden[:, :-1][predicts]
        logprobs, entropy, value = self.head(
            states, targets, temperature, loss, bonus, likeliest=likeliest
        )
        if self.value_head is not None:  # in every pass: at ZeRO 3 all are then alike
            found = _laid_out(self.value_head(states), predicts)
            if values is not None:
                values.copy_(found.detach())
            if value_loss is not None:
                value = value + value_loss(found)
        return logprobs, entropy, value


def _laid_out(values: Tensor, predicts: Tensor) -> Tensor:
    """Values [N] in their places [B, T], 0 elsewhere."""
    places = functional.pad(predicts, (1, 0))
    return values.new_zeros(places.shape).masked_scatter(places, values)


def score_logits(logits: Tensor, targets: Tensor, temperature: float) -> TokenScores:
    """Scores [N] of int64[N] targets under [N, V] logits divided by `temperature`, in float32."""
    log_probabilities = functional.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return TokenScores(logprobs, entropy)


def load_model(config: "ModelConfig") -> PreTrainedModel:
    """Load the folder's causal LM in the configured dtype, ready to train (without dropout, which
    would make ratios noise).

    Raises BadModel when the folder is missing, is not a model, or has a head that `TokenScorer`
    would bypass.
    """
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise BadModel(
            f"model.path = {config.path!r}: no such folder with a config.json; "
            "give a local Hugging Face model folder"
        )
    kwargs = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
    try:
        architecture = AutoConfig.from_pretrained(folder, **kwargs)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=architecture,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
            **kwargs,
        )
    except (OSError, ValueError) as error:
        raise BadModel(f"model.path = {config.path!r} cannot be loaded: {error}") from error
    model.eval()
    _check_head(model, config.path)
    return model


def _check_head(model: PreTrainedModel, path: str) -> None:
    """Refuse models whose logits are not a linear layer's own: they would be scored wrongly."""
    tokens = torch.arange(8).unsqueeze(0) % model.config.vocab_size
    head = model.get_output_embeddings()
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        own = functional.linear(hidden, head.weight, head.bias)
    if not torch.equal(whole, own):
        raise BadModel(
            f"model.path = {path!r}: {type(model).__name__} changes its logits after the head "
            "(scaling or soft-capping), which the learner does not reproduce; use another model"
        )
