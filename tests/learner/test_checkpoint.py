"""Checkpoints are whole or absent, and the oldest are forgotten."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from learner import checkpoint
from learner.ema import Ema


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_newest_are_kept(plain_engine: Any, word_tokenizer: Any, tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 10, 11):
        checkpoint.save(
            tmp_path, step, plain_engine, Ema(plain_engine, 0.8), word_tokenizer, keep=2
        )
    assert names(tmp_path) == ["step-10", "step-11"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step-11"


def test_each_part_is_a_model_folder_with_its_tokenizer(
    plain_engine: Any, word_tokenizer: Any, tmp_path: Path
) -> None:
    folder = checkpoint.save(tmp_path, 1, plain_engine, Ema(plain_engine, 0.8), word_tokenizer)
    for part in ("model", "ema"):
        assert (folder / part / "model.safetensors").is_file()
        loaded = AutoTokenizer.from_pretrained(folder / part)
        assert loaded.get_vocab() == word_tokenizer.get_vocab()


def test_a_checkpoint_that_was_cut_short_is_not_one(
    plain_engine: Any, word_tokenizer: Any, tmp_path: Path
) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left")

    ema = Ema(plain_engine, 0.8)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, 1, plain_engine, ema, Broken())
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, 1, plain_engine, ema, word_tokenizer)
    assert names(tmp_path) == ["step-1"], "what was left half-written is removed"


def test_saving_a_step_again_replaces_it(
    plain_engine: Any, word_tokenizer: Any, tmp_path: Path
) -> None:
    folder = checkpoint.save(tmp_path, 1, plain_engine, Ema(plain_engine, 0.8), word_tokenizer)
    (folder / "stale").touch()
    checkpoint.save(tmp_path, 1, plain_engine, Ema(plain_engine, 0.8), word_tokenizer)
    assert not (folder / "stale").exists()
