"""The model that `scripts/ask.py` asks in its own process, found and made ready.

Consumes a path; produces the model's folder, and the model as a policy. Waits for the disk.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.load import ConfigError
from configs.process import avoid_amx
from configs.schema import Config
from scripts.found_model import MODEL, Found, find

if TYPE_CHECKING:  # it imports torch
    from actors.transformers_policy import Heard, TransformersPolicy

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def find_model(given: str, weights: str = MODEL) -> Found:
    """The model that MODEL and `--weights` name. Raises ConfigError."""
    if not Path(given).is_dir():
        raise ConfigError(
            f"{given!r}: no such folder: name a run, a checkpoint, a Hugging Face folder or the "
            "URL of a server"
        )
    return find(given, weights)


def check_tokenizer(folder: str) -> None:
    """Raise ConfigError unless there is a tokenizer in `folder`."""
    if not folder:
        raise ConfigError(
            "a server is asked in tokens, and no tokenizer is named: give the folder of the served "
            "model's, --tokenizer FOLDER"
        )
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"no tokenizer ({' or '.join(_TOKENIZER_FILES)}) in {folder!r}: name the folder of the "
            "served model's, --tokenizer FOLDER"
        )


def prepare_environment() -> None:
    """Set what torch and transformers read when they are imported; what is set already wins."""
    avoid_amx()
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning stall busy machines
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def load_policy(config: Config, tokenizer: Any, heard: "Heard") -> "TransformersPolicy":
    """The model at `model.path`, on a GPU where there is one, telling `heard` every token that it
    samples. Raises ConfigError where it cannot be loaded."""
    import torch  # here and below: seconds, that bad input need not wait for
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from actors.transformers_policy import TransformersPolicy

    logging.disable_progress_bar()
    path = config.model.path
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.engine_dtype),
            attn_implementation="sdpa",
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
        )
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        return TransformersPolicy(model, tokenizer, heard=heard)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # the last: out of memory
        raise ConfigError(f"model.path = {path!r} cannot be loaded: {error}") from error
