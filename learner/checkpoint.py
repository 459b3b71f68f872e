"""Checkpoints that are whole or absent: `checkpoints/step-N/{model,ema}`, both Hugging Face
folders.

Written under another name, fsynced, then renamed: a reader (or a restart) never meets half of one.
`ema` is the proximal policy in the training dtype. Each is usable as `model.path`, by transformers
and by vLLM.
"""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from learner.ema import Ema

if TYPE_CHECKING:  # importing it imports DeepSpeed
    from learner.engine import Engine

_NAME = re.compile(r"step-(\d+)")


def save(
    run_dir: str | Path,
    step: int,
    engine: "Engine",
    ema: Ema,
    tokenizer: PreTrainedTokenizerBase,
    keep: int | None = None,
) -> Path:
    """Write the checkpoint of `step` durably and return its folder; then forget all but the newest
    `keep`.
    """
    parent = Path(run_dir) / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(".writing-*"):
        shutil.rmtree(leftover)
    writing, final = parent / f".writing-step-{step}", parent / f"step-{step}"
    engine.model.save_pretrained(writing / "model")
    with ema.swapped_in(engine):
        engine.model.save_pretrained(writing / "ema")
    for name in ("model", "ema"):
        tokenizer.save_pretrained(writing / name)
    _sync_tree(writing)
    if final.exists():
        shutil.rmtree(final)
    writing.rename(final)
    _sync(parent)
    if keep is not None:
        for old in _steps(parent)[:-keep]:
            shutil.rmtree(parent / f"step-{old}")
    return final


def newest(run_dir: str | Path) -> Path | None:
    """The folder of the newest whole checkpoint, or None."""
    parent = Path(run_dir) / "checkpoints"
    steps = _steps(parent)
    return parent / f"step-{steps[-1]}" if steps else None


def _steps(parent: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in parent.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def _sync_tree(root: Path) -> None:
    for path in (*root.rglob("*"), root):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
