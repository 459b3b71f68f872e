"""A run's configuration and tokenizer are read anew once their files are others."""

import shutil
from pathlib import Path

import pytest

from configs.load import save
from configs.schema import Config, LearnerConfig
from scripts.view.rollouts.tokenizer import config_of, tokenizer_of


def test_an_edited_configuration_is_read_anew(tmp_path: Path) -> None:
    """As `forage resume RUN learner.total_steps=200` writes it, or once it can be read at all."""
    file = tmp_path / "config.yaml"
    for steps in (100, 200):
        save(Config(run_dir=str(tmp_path), learner=LearnerConfig(total_steps=steps)), file)
        found = config_of(tmp_path)
        assert found is not None and found.learner.total_steps == steps
        file.write_text("[" * 100_000)
        assert config_of(tmp_path) is None
    file.unlink()
    assert config_of(tmp_path) is None


def test_it_is_not_read_again_where_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Config(run_dir=str(tmp_path)), tmp_path / "config.yaml")
    found = config_of(tmp_path)
    monkeypatch.delattr("scripts.view.rollouts.tokenizer.load")
    assert config_of(tmp_path) is found is not None


def test_a_tokenizer_that_comes_later_is_found(hostile_run: Path) -> None:
    found = config_of(hostile_run)
    assert found is not None
    file = Path(found.model.path, "tokenizer.json")
    shutil.move(file, hostile_run)
    tokenizer, lacks = tokenizer_of(hostile_run)
    assert tokenizer is None and "no tokenizer.json there" in lacks
    shutil.move(hostile_run / file.name, file)
    tokenizer, lacks = tokenizer_of(hostile_run)
    assert tokenizer is not None and lacks == ""
