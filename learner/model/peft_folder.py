"""An adapter as PEFT keeps it: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.lora import LoraConfig
from configs.runtime.files import weights_digest
from learner.errors import BadModel
from weight_sync.adapter import PREFIX

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DIGEST = "base_digest"  # of the base's weights, in the metadata
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Settings under which an adapter is more, or another thing, than scale · B A on linear layers.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "lora_bias": (None, False),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    # others change the base as they begin
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


class Adapter(NamedTuple):
    """An adapter: its scale, and A [rank, in] and B [out, rank] by the path of the layer."""

    scale: float
    layers: dict[str, tuple[Tensor, Tensor]]
    base_digest: str  # of the weights that it was trained on; empty where nobody says


def write(folder: Path, named: dict[str, Tensor], config: LoraConfig, base: str) -> None:
    """Write an adapter of the model in `base`; `named`: its tensors by PEFT's names, on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(name.removeprefix(PREFIX).removesuffix(_A) for name in named if _A in name)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    metadata = {"format": "pt", _DIGEST: weights_digest(base)}
    save_file(named, folder / WEIGHTS, metadata=metadata)


def read(folder: Path) -> Adapter:
    """The adapter in a folder. Raises BadModel for one that is not plain LoRA on linear layers."""
    try:
        settings = json.loads((folder / CONFIG).read_text())
        with safe_open(folder / WEIGHTS, "pt") as content:
            named = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            digest = (content.metadata() or {}).get(_DIGEST, "")
    except (OSError, ValueError, SafetensorError) as error:
        raise BadModel(f"adapter {str(folder)!r} cannot be read: {error}") from error
    for name, plain in _PLAIN.items():
        if settings.get(name, plain[0]) not in plain:
            raise BadModel(
                f"adapter {str(folder)!r}: {name} = {settings[name]!r}, which is more than plain "
                "LoRA: merge it into its model, merge_and_unload() of peft, save that and name its "
                "folder"
            )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    paths = [name.removesuffix(_A) for name in named if name.endswith(_A)]
    whole = {path + end for path in paths for end in (_A, _B)} == named.keys()
    if not rank or not alpha or not paths or not whole:
        raise BadModel(
            f"adapter {str(folder)!r}: r = {rank!r}, lora_alpha = {alpha!r}, and not an A and a B "
            "of each layer: name a whole adapter"
        )
    layers = {path.removeprefix(PREFIX): (named[path + _A], named[path + _B]) for path in paths}
    if bad := [path for path, (a, b) in layers.items() if not a.shape[0] == b.shape[1] == rank]:
        raise BadModel(f"adapter {str(folder)!r}: {bad[0]} is not of rank r = {rank!r}")
    return Adapter(alpha / rank, layers, digest)
