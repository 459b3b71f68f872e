"""The settings of an encoder, read from the files beside it, without torch.

Pooling and normalisation come from the files that sentence-transformers leaves beside a model,
prefixes from the prompts there, what they leave open from the family in its name (as Search-R1's
builder and server have it), the rest from the commonest use: mean pooling, unit length, no prefix.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from blake3 import blake3

from retrieval_server.protocol import BadIndex

Pooling = Literal["mean", "cls", "last"]
# A word of the model's name: pooling, the query's and the passage's prefix.
_FAMILIES: dict[str, tuple[Pooling, str, str]] = {
    "e5": ("mean", "query: ", "passage: "),
    "bge": ("cls", "Represent this sentence for searching relevant passages: ", ""),
}
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NO_FAMILY = {"m3", "instruct"}
MAX_TOKENS = 256  # as Search-R1's server and builder
_WEIGHTS = "*.safetensors"  # and nothing else: to read a .bin file is to run it
_READ = (  # beside them: what makes a model what it is
    "config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "1_Pooling/config.json", "tokenizer*.json", "added_tokens.json", "special_tokens_map.json",
    "vocab.*", "merges.txt", "*.model",
)  # fmt: skip

logger = logging.getLogger("retrieval_server")


class EncoderSettings(msgspec.Struct, frozen=True):
    """The making of a vector from a text; vectors of two settings do not compare."""

    pooling: Pooling = "mean"
    normalise: bool = True
    query_prefix: str = ""
    passage_prefix: str = ""
    max_query_tokens: int = MAX_TOKENS
    max_passage_tokens: int = MAX_TOKENS


def settings_of(folder: Path) -> EncoderSettings:
    """The settings of the model in `folder`. Raises BadIndex for modules that are not supported."""
    config = _json(folder / "config.json")
    names = _words(folder, str(config.get("_name_or_path", "")))
    family = next((of for part, of in _FAMILIES.items() if part in names), None)
    pooling, query, passage = family or ("mean", "", "")
    if not _NO_FAMILY.isdisjoint(names):  # bge-m3 takes none, and …-instruct one of the task's own
        query = passage = ""
    told = _told_pooling(folder)
    longest = _json(folder / "sentence_bert_config.json").get("max_seq_length") or MAX_TOKENS
    if not family and told is None:
        logger.warning("%s says nothing of pooling or prefixes: mean pooling, no prefix", folder)
    prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
    modules = [m["type"].rpartition(".")[2] for m in _json(folder / "modules.json") or []]
    if strange := [m for m in modules if m not in ("Transformer", "Pooling", "Normalize")]:
        raise BadIndex(f"{folder}/modules.json asks for {', '.join(strange)}, which we have not")
    return EncoderSettings(
        pooling=told or pooling,
        normalise=bool(family) or not modules or "Normalize" in modules,
        query_prefix=prompts.get("query") or query,
        passage_prefix=prompts.get("passage") or prompts.get("document") or passage,
        max_query_tokens=min(MAX_TOKENS, longest),
        max_passage_tokens=min(MAX_TOKENS, longest),
    )


def require_encoder(folder: Path, field: str = "") -> None:
    """Raise BadIndex unless `folder` holds a model whose weights are safetensors. `field`: what
    names it, where it is not the index's encoder.
    """
    where = f"{field} = {str(folder)!r}" if field else repr(str(folder))
    if not (folder / "config.json").is_file():
        what = "model" if field else "encoder"
        raise BadIndex(f"{where} holds no {what}: name a folder with a config.json")
    if not any(folder.glob(_WEIGHTS)):
        raise BadIndex(
            f"{where} holds no {_WEIGHTS}: only such weights are read; load what is there "
            "with transformers where you trust it, and save_pretrained() it anew"
        )


def digest_of(folder: Path) -> str:
    """A digest of the files that encode, and no others: another model's vectors do not compare."""
    digest = blake3()
    for path in sorted({path for name in (_WEIGHTS, *_READ) for path in folder.glob(name)}):
        digest.update(f"{path.relative_to(folder)}\0".encode()).update_mmap(path)
    return digest.hexdigest(length=16)


def _words(folder: Path, origin: str) -> list[str]:
    """The words of a model's name; a folder of the hub's cache is named after its commit."""
    whole = folder.resolve()
    name = whole.parent.parent.name if whole.parent.name == "snapshots" else whole.name
    return re.split(r"[^a-z0-9]+", f"{name} {origin}".lower())


def _told_pooling(folder: Path) -> Pooling | None:
    told = _json(folder / "1_Pooling" / "config.json")
    chosen = [
        key for key, value in told.items() if key.startswith("pooling_mode") and value is True
    ]
    mode = told.get("pooling_mode")  # as newer versions write it
    if mode in get_args(Pooling):
        return mode  # type: ignore[no-any-return]
    if mode or len(chosen) > 1 or (chosen and chosen[0] not in _POOLINGS):
        raise BadIndex(
            f"{folder}/1_Pooling/config.json asks for {mode or chosen}: we have one of "
            f"{', '.join(get_args(Pooling))}"
        )
    return _POOLINGS[chosen[0]] if chosen else None


def _json(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise BadIndex(f"{str(path)!r} is not JSON: {error}") from error
