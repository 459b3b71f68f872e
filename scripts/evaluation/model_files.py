"""The files of a model folder that answers depend on."""

import hashlib
from pathlib import Path

from configs.load import ConfigError

# Weights, shape, tokenizer, template, code.
_MODEL_FILES = {".safetensors", ".json", ".jinja", ".model", ".txt", ".py"}


def digest(folder: Path) -> str:
    """blake2b of the files, names included, that answers depend on. Raises ConfigError."""
    whole = hashlib.blake2b(digest_size=16)
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in _MODEL_FILES and path.is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "blake2b").hexdigest()
                whole.update(f"{path.name} {content}\n".encode())
    except OSError as error:
        raise ConfigError(f"MODEL = {str(folder)!r} cannot be read: {error}") from error
    return whole.hexdigest()
