"""A causal language model as a step needs it, and its optimiser."""

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.runtime.process import keep_freed_blocks
from configs.schema import Config, LearnerConfig
from learner.errors import BadModel
from learner.model.scorer import load_model

LARGE_MODEL_BYTES = 16 << 20  # below it a heap with gaps is small


def load_to_train(config: Config, model_path: str | None = None) -> PreTrainedModel:
    """The causal LM of a folder (default `model.path`), as a step needs it. Raises BadModel."""
    model_config = config.model
    if model_path is not None:
        model_config = msgspec.structs.replace(model_config, path=model_path)
    model = load_model(model_config)
    _check_candidates(model, config.learner)
    if sum(weight.nbytes for weight in model.parameters()) >= LARGE_MODEL_BYTES:
        keep_freed_blocks()
    if config.learner.gradient_checkpointing:
        _checkpoint_gradients(model)
    return model


def make_optimiser(groups: list[list[Tensor]], config: LearnerConfig) -> torch.optim.Optimizer:
    """The optimiser of these groups of weights, each with a rate of its own."""
    weights = [{"params": group} for group in groups]
    if config.optimiser == "sgd":
        return torch.optim.SGD(weights, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        weights,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        # On the host: one pass over the state without temporaries, which needs nothing compiled.
        fused=True if config.offload == "cpu" else None,
    )


def _check_candidates(model: PreTrainedModel, config: LearnerConfig) -> None:
    vocabulary = len(model.get_output_embeddings().weight)
    if config.kl_top_k > vocabulary:
        raise BadModel(
            f"learner.kl_top_k = {config.kl_top_k!r}: the model's vocabulary has {vocabulary} "
            "tokens; lower it to at most that"
        )


def _checkpoint_gradients(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        # Layers recompute only in training mode; what is inside them stays without dropout.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
