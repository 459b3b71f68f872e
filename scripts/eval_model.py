"""By which configuration an evaluation is made, and of which weights exactly.

Consumes what was found of a run, a checkpoint or a model folder; produces a configuration and a
digest. Waits for nothing but the disk; imports no engine.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from configs.load import ConfigError
from configs.schema import Config
from scripts import found_model
from scripts.found_model import Found

# What a model folder holds that the answers depend on: weights, shape, tokenizer, template, code.
_READ = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}
# A run's own port may be in use, by that run; what it searched by is no answer to other searches.
_NOT_INHERITED = ("retrieval.port=0", "retrieval.recorded=")


def configured(found: Found, config_path: str | None, overrides: Sequence[str]) -> Config:
    """The configuration to evaluate by: `--config`, else the one on record; with overrides. Raises
    ConfigError.
    """
    changes = [*_NOT_INHERITED, *overrides]
    return found_model.configured(found.given, found.record, config_path, changes)


def digest(folder: Path) -> str:
    """blake2b of all in a model folder that answers depend on, names included. Raises ConfigError
    where it cannot be read.
    """
    whole = hashlib.blake2b(digest_size=16)
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in _READ and path.is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "blake2b").hexdigest()
                whole.update(f"{path.name} {content}\n".encode())
    except OSError as error:
        raise ConfigError(f"MODEL = {str(folder)!r} cannot be read: {error}") from error
    return whole.hexdigest()
