"""A PEFT folder in place of a model's: its adapter is merged into its model, once, beside it."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.load import ConfigError
from configs.runtime.files import locked, making, weights_digest

if TYPE_CHECKING:  # it imports torch
    from learner.model.peft_folder import Adapter

CONFIG = "adapter_config.json"
MERGED = "merged"  # the folder of the whole model, in the adapter's
_ORIGIN = "merged.json"  # in it: of which weights and which adapter it was made
_PATIENCE_S = 600.0  # for another process that merges the same one
_TEXTS = (".json", ".jinja", ".model", ".txt", ".py")  # of a model's or tokenizer's files


def is_adapter(folder: Path) -> bool:
    """True for a PEFT folder, which is no model's."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def whole(field: str, value: str) -> str:
    """The folder of the whole model where `value`, which `field` names, is an adapter's; other
    values as they are. Raises ConfigError.
    """
    folder = Path(value).expanduser()
    if not value or not is_adapter(folder):
        return value
    where = f"{field} = {value!r}: a LoRA adapter"
    base = _base(folder, where)
    merged = folder / MERGED
    if _read(merged / _ORIGIN) != _origin(base, folder):
        try:
            with locked(folder, "that merges it", patience_s=_PATIENCE_S):
                if _read(merged / _ORIGIN) != (origin := _origin(base, folder)):
                    with making(merged, replaces=True) as draft:
                        _merge(folder, base, draft, where)
                        (draft / _ORIGIN).write_text(json.dumps(origin))
        except OSError as error:
            raise ConfigError(
                f"{where}, which cannot be merged into {str(base)!r}: {error}"
            ) from error
    return str(merged.resolve())


def _origin(base: Path, folder: Path) -> dict[str, Any]:
    """Of what a merged model is made."""
    weights = {"base": weights_digest(base), "adapter": weights_digest(folder)}
    return weights | {"settings": _read(folder / CONFIG)}


def _base(folder: Path, where: str) -> Path:
    """The folder of the model that an adapter is of."""
    named = str(_read(folder / CONFIG).get("base_model_name_or_path") or "")
    if not named or not (Path(named) / "config.json").is_file():
        raise ConfigError(
            f"{where} of {named!r}, which is no folder of a model here: put that model's folder "
            f"into its {CONFIG}, as base_model_name_or_path (hf download NAME --local-dir FOLDER)"
        )
    return Path(named)


def _merge(folder: Path, base: Path, draft: Path, where: str) -> None:
    """Write the model with the adapter in its weights, file by file."""
    from learner.errors import BadModel
    from learner.model import peft_folder

    try:
        adapter = peft_folder.read(folder)
        if adapter.base_digest not in ("", weights_digest(base)):
            raise ConfigError(
                f"{where} of other weights than those in {str(base)!r} now: put these back"
            )
        left = _merge_weights(adapter, base, draft)
    except BadModel as error:
        raise ConfigError(f"{where}: {error}") from error
    if left:
        raise ConfigError(f"{where} of {str(base)!r}, which has no layer {sorted(left)[0]}")
    for source in (base, folder):  # a tokenizer beside the adapter is its own
        for file in source.iterdir():
            if file.suffix in _TEXTS and file.is_file() and file.name != CONFIG:
                shutil.copyfile(file, draft / file.name)


def _merge_weights(adapter: "Adapter", base: Path, draft: Path) -> set[str]:
    """Write the files of weights; the layers of the adapter that the model has not."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from learner.errors import BadModel
    from learner.model.lora import merge

    left = set(adapter.layers)
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            tensors, metadata = {}, content.metadata()
            for name in content.keys():  # noqa: SIM118 - it is no dict
                tensors[name] = weight = content.get_tensor(name)
                path = name.removesuffix(".weight")
                if path in adapter.layers:
                    a, b = adapter.layers[path]
                    if weight.shape != (shape := (b.shape[0], a.shape[1])):
                        raise BadModel(
                            f"its layer {path} is of {shape[0]} x {shape[1]}, that of "
                            f"{str(base)!r} of {' x '.join(map(str, weight.shape))}"
                        )
                    tensors[name] = merge(weight, a, b, adapter.scale).to(weight.dtype)
                    left.discard(path)
        save_file(tensors, draft / file.name, metadata=metadata)
    return left


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
