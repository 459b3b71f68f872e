"""The tokens that end a completion."""

import json
from pathlib import Path

from actors.prompt import Prompter


def end_tokens(prompter: Prompter, model_path: str) -> frozenset[int]:
    """Return every token that ends a completion: the tokenizer's and the model folder's."""
    found = {prompter.end_token}
    for name in ("config.json", "generation_config.json"):
        if model_path and (path := Path(model_path, name)).is_file():
            tree = json.loads(path.read_text(encoding="utf-8"))
            for part in (tree, tree.get("text_config") or {}):
                named = part.get("eos_token_id")
                found |= set(named if isinstance(named, list) else [named])
    return frozenset(each for each in found if each is not None)
