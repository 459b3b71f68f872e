"""DeepSpeed behind one small class: nothing else in the project knows how a step is made.

Consumes micro-batches and losses; produces weights. One rank here, ZeRO 0 or 1; the process group
is gloo over an in-process store, so no rendezvous port exists (gloo itself listens on loopback
while the engine lives).
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from configs.schema import Config
from learner.errors import BadModel
from learner.model import TokenScorer, TokenScores, load_model
from learner.packing import MicroBatch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed

_ds_logger = logging.getLogger("DeepSpeed")
_ds_logger.handlers.clear()  # its own handler writes to stdout
_ds_logger.propagate = True
_ds_logger.setLevel(logging.ERROR)


class Engine:
    """The model in training and its optimiser. One per process: `close()` before making another."""

    def __init__(self, config: Config, model_path: str | None = None) -> None:
        """Load `model_path` (default `model.path`). Raises BadModel, also when ZeRO is above 1."""
        learner = config.learner
        if learner.zero_stage > 1:
            raise BadModel(f"learner.zero_stage = {learner.zero_stage!r}: 0 and 1 are supported")
        model_config = config.model
        if model_path is not None:
            model_config = msgspec.structs.replace(model_config, path=model_path)
        self.model: PreTrainedModel = load_model(model_config)
        scorer = TokenScorer(self.model)
        optimiser = torch.optim.AdamW(
            [weight for weight in scorer.parameters() if weight.requires_grad],
            lr=learner.lr,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
        )
        with contextlib.redirect_stdout(sys.stderr), _alone():
            if not distributed.is_initialized():
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                store = distributed.HashStore()
                distributed.init_process_group(backend, store=store, rank=0, world_size=1)
            self._engine, self._optimiser, _, _ = deepspeed.initialize(
                model=scorer,
                optimizer=optimiser,
                config=_deepspeed_config(config),
                dist_init_required=False,
            )
        self._trainable = {n: w for n, w in self.model.named_parameters() if w.requires_grad}
        self._zero_stage = learner.zero_stage
        self.device = self._engine.device

    def score(self, micro: MicroBatch, temperature: float) -> TokenScores:
        """Log-probs (with gradient, where enabled) and entropies of the action tokens."""
        scores: TokenScores = self._engine(
            micro.tokens.to(self.device), micro.loss_mask.to(self.device), temperature
        )
        return scores

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a share of the step's loss; shares are summed, never averaged."""
        self._engine.backward(loss)

    def step(self, lr: float) -> float:
        """Clip, step, clear the gradients; returns the gradient's norm before clipping."""
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        norm = None
        if self._zero_stage == 0:  # DeepSpeed then clips but keeps no norm
            gradients = [w.grad for w in self._trainable.values() if w.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        self._engine.step()
        return float(self._engine.get_global_grad_norm() if norm is None else norm)

    def trainable(self) -> dict[str, Tensor]:
        """The live trainable parameters by Hugging Face name, tied ones once."""
        return self._trainable

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by Hugging Face name, tied ones once, detached but not copied."""
        for name, weight in self.model.named_parameters():
            yield name, weight.detach()

    @torch.no_grad()
    def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each of tokens[1:] given its prefix, at temperature 1: float[n − 1]."""
        row = torch.tensor([list(tokens)], device=self.device)
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[:, 0] = False
        scores = self._engine(row, mask, 1.0)
        values: list[float] = scores.logprobs[0, 1:].tolist()
        return values

    def close(self) -> None:
        """Release DeepSpeed; the process group stays, because DeepSpeed keeps handles on it."""
        self._engine.destroy()


def _deepspeed_config(config: Config) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The number of micro-batches varies: step() is the boundary, and losses are already shares.
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.learner.max_grad_norm,
        "zero_optimization": {"stage": config.learner.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "steps_per_print": None,
    }


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One rank by itself: no launcher's variables, nothing compiled, no listener on the network."""
    # DeepSpeed would compile shared-memory collectives at first use; one rank shares with nobody.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    variables = {"LOCAL_RANK": "0"}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # gloo opens a listener per group even for one rank
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
