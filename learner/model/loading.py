"""A causal language model as a step needs it."""

import msgspec
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.runtime.process import keep_freed_blocks
from configs.schema import Config
from learner.model.scorer import load_model

LARGE_MODEL_BYTES = 16 << 20  # below it a heap with gaps is small


def load_to_train(config: Config, model_path: str | None = None) -> PreTrainedModel:
    """The causal LM of a folder (default `model.path`), as a step needs it. Raises BadModel."""
    model_config = config.model
    if model_path is not None:
        model_config = msgspec.structs.replace(model_config, path=model_path)
    model = load_model(model_config)
    if sum(weight.nbytes for weight in model.parameters()) >= LARGE_MODEL_BYTES:
        keep_freed_blocks()
    if config.learner.gradient_checkpointing:
        _checkpoint_gradients(model)
    return model


def _checkpoint_gradients(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        # Layers recompute only in training mode; what is inside them stays without dropout.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
