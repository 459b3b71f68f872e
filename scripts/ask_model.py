"""What `scripts/ask.py` is to ask, found and made ready: a run, a checkpoint, a model folder.

Consumes a path; produces the model's folder with the configuration it was trained under, and the
model as a policy in this process. Waits for the disk.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from actors.environments import stops_of
from configs import load
from configs.load import ConfigError
from configs.process import avoid_amx
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadCheckpoint

if TYPE_CHECKING:  # it imports torch
    from actors.transformers_policy import Heard, TransformersPolicy

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def find_model(target: str) -> Path:
    """The model folder that `target` names: a run's best checkpoint, else its newest one; a
    checkpoint's model; a Hugging Face folder itself. Raises ConfigError."""
    path = Path(target)
    if not path.is_dir():
        raise ConfigError(
            f"{target!r}: no such folder: name a run, a checkpoint, a Hugging Face folder or the "
            "URL of a server"
        )
    if (path / "config.json").is_file():
        return path.resolve()
    if (path / "model" / "config.json").is_file():
        return (path / "model").resolve()
    if not (path / "config.yaml").is_file():
        raise ConfigError(
            f"{target!r}: neither a run (config.yaml) nor a checkpoint (model/) nor a Hugging Face "
            "folder (config.json): name one"
        )
    best = path / "checkpoints" / checkpoint.BEST
    if best.is_dir():
        return best.resolve() / "model"
    try:
        newest = checkpoint.newest(path)
    except BadCheckpoint as error:
        raise ConfigError(str(error)) from error
    if newest is None:
        raise ConfigError(
            f"{target!r}: the run has no checkpoint yet (learner.checkpoint_every): name a model "
            "folder, with --config"
        )
    return newest.folder.resolve() / "model"


def read_config(target: str, given: str | None, overrides: Sequence[str]) -> Config:
    """The configuration in the file `given`, else in the run or checkpoint that `target` names or
    lies in, with `a.b=c` overrides. Raises ConfigError."""
    if given:
        return load.load(given, overrides)
    path = Path(target).resolve()
    if (path / "config.yaml").is_file():
        return load.load(path / "config.yaml", overrides)
    for folder in (path, path.parent):
        if (folder / checkpoint.MANIFEST).is_file():
            try:
                recorded = checkpoint.read(folder).manifest.config
            except BadCheckpoint as error:
                raise ConfigError(f"{error}; or name a configuration: --config FILE") from error
            return load.parse(yaml.safe_dump(recorded), overrides, str(folder))
    raise ConfigError(
        f"{target!r} says nothing of prompts, turns and searches: name a configuration, --config "
        "FILE, for example configs/base.yaml"
    )


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
        return TransformersPolicy(model, tokenizer, stops=stops_of(config), heard=heard)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # the last: out of memory
        raise ConfigError(f"model.path = {path!r} cannot be loaded: {error}") from error
