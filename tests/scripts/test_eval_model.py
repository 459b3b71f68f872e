"""Which weights are meant, and by which configuration."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from configs.schema import Config
from learner import checkpoint
from scripts.eval_model import configured, digest, find
from tests.scripts.conftest import ROOT, Folder


class Exporter:
    """A trainer whose weights are a word each."""

    def export(self, folder: Path) -> None:
        for part in ("model", "ema"):
            (folder / part).mkdir(parents=True)
            (folder / part / "config.json").write_text("{}")
            (folder / part / "model.safetensors").write_text(part)


class Tokenizer:
    """Saves itself as one file."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def run(folder: Folder) -> Path:
    """A run with the checkpoints of steps 10 and 20; 10 is the best."""
    tokenizer: Any = Tokenizer()
    for step in (10, 20):
        checkpoint.save(folder.config, step, Exporter(), tokenizer)
    checkpoint.retain(folder.path, 2, lambda _: 10)
    return folder.path


def test_of_a_run_the_best_checkpoint_is_meant_else_the_newest(run: Path) -> None:
    assert find(str(run), "model").folder == run / "checkpoints" / "step-10" / "model"
    (run / "checkpoints" / "best").unlink()
    found = find(str(run), "ema")
    assert found.folder == run / "checkpoints" / "step-20" / "ema"
    assert found.name == "run-step-20-ema"


def test_a_checkpoint_brings_its_runs_configuration(run: Path, folder: Folder) -> None:
    found = find(str(run / "checkpoints" / "step-20"), "model")
    config = configured(found, None, ["actors.max_turns=7"])
    assert (config.seed, config.actors.max_turns) == (3, 7)
    assert config.retrieval == folder.config.retrieval


def test_a_checkpoint_that_was_moved_still_does(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "kept"
    shutil.copytree(run / "checkpoints" / "step-20", moved)
    found = find(str(moved), "ema")
    assert (found.folder, found.name) == (moved / "ema", "kept-ema")
    assert configured(found, None, []).seed == 3


def test_a_runs_port_is_not_taken_from_it(folder: Folder, run: Path) -> None:
    folder.edited("retrieval.port", 8123)
    config = configured(find(str(run), "model"), str(run / "config.yaml"), [])
    assert config.retrieval.port == 0
    given = configured(find(str(run), "model"), None, ["retrieval.port=8124"])
    assert given.retrieval.port == 8124


def test_recorded_searches_are_not_taken_from_it(folder: Folder, run: Path) -> None:
    folder.edited("retrieval.recorded", "runs/old")
    config = configured(find(str(run), "model"), str(run / "config.yaml"), [])
    assert config.retrieval.recorded == ""
    given = configured(find(str(run), "model"), None, ["retrieval.recorded=runs/old"])
    assert given.retrieval.recorded == "runs/old"


def test_a_model_folder_needs_a_configuration(inputs: dict[str, str]) -> None:
    found = find(inputs["model.path"], "model")
    with pytest.raises(ConfigError, match=r"--config configs/base\.yaml"):
        configured(found, None, [])
    assert isinstance(configured(found, str(ROOT / "configs" / "base.yaml"), []), Config)


def refused(given: Path, weights: str = "model") -> str:
    with pytest.raises(ConfigError) as raised:
        find(str(given), weights)
    return str(raised.value)


def test_what_has_no_such_weights_is_refused(
    run: Path, inputs: dict[str, str], tmp_path: Path
) -> None:
    assert "is a model folder and has no average" in refused(Path(inputs["model.path"]), "ema")
    step = run / "checkpoints" / "step-20"
    shutil.rmtree(step / "ema")
    assert "holds no such weights, only model: name others" in refused(step, "ema")
    shutil.rmtree(run / "checkpoints")
    assert "this run has no checkpoint yet" in refused(run)
    assert f"MODEL = {str(tmp_path / 'none')!r}: no run (config.yaml)" in refused(tmp_path / "none")


def test_a_checkpoint_that_cannot_be_read_is_named(run: Path) -> None:
    (run / "checkpoints" / "step-10" / "checkpoint.json").write_text("{")
    assert "its configuration cannot be read" in refused(run)


def test_the_digest_is_of_weights_and_tokenizer(run: Path) -> None:
    folder = run / "checkpoints" / "step-10" / "model"
    first = digest(folder)
    (folder / "README.md").write_text("words")
    assert digest(folder) == first
    (folder / "tokenizer.json").write_text("{ }")
    second = digest(folder)
    (folder / "model.safetensors").write_text("other")
    assert len({first, second, digest(folder)}) == 3
    assert digest(run / "checkpoints" / "step-20" / "model") == first
