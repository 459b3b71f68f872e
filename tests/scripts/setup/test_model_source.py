"""Which model is meant, and by what configuration it was trained."""

import shutil
from pathlib import Path

import pytest

from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.setup.model_source import EMA, MODEL, configured, find
from tests.scripts.conftest import Folder


def of(path: Path, weights: str = MODEL, *overrides: str) -> Config:
    """The configuration on record for what this path names."""
    found = find(str(path), weights)
    return configured(found.given, found.record, None, overrides)


def test_of_a_run_the_best_checkpoint_is_meant_else_the_newest(checkpointed: Path) -> None:
    parent = checkpointed / "checkpoints"
    assert find(str(checkpointed)).folder == parent / "step-10" / "model"
    (parent / "best").unlink()
    found = find(str(checkpointed), EMA)
    assert (found.folder, found.name) == (parent / "step-20" / "ema", "run-step-20-ema")


def test_a_run_says_itself_how_it_was_trained(checkpointed: Path, folder: Folder) -> None:
    folder.edited("actors.max_turns", 9)
    assert of(checkpointed).actors.max_turns == 9
    assert of(checkpointed / "checkpoints" / "best").actors.max_turns != 9


@pytest.mark.parametrize("inside", ["", "model", "ema"])
def test_a_checkpoint_brings_its_runs_configuration(
    checkpointed: Path, folder: Folder, inside: str
) -> None:
    (checkpointed / "config.yaml").unlink()
    config = of(checkpointed / "checkpoints" / "step-20" / inside, MODEL, "actors.max_turns=7")
    assert (config.seed, config.actors.max_turns) == (3, 7)
    assert config.retrieval == folder.config.retrieval


def test_a_checkpoint_that_was_moved_still_does(checkpointed: Path, tmp_path: Path) -> None:
    moved = tmp_path / "kept"
    shutil.copytree(checkpointed / "checkpoints" / "step-20", moved)
    found = find(str(moved), EMA)
    assert (found.folder, found.name) == (moved / "ema", "kept-ema")
    assert of(moved, EMA).seed == 3


def test_what_a_warm_start_delivers_needs_no_checkpoints(checkpointed: Path) -> None:
    best = checkpointed / "checkpoints" / "step-10"
    shutil.copytree(best / "model", checkpointed / "model")
    assert find(str(checkpointed), EMA).folder == best / "ema"
    shutil.rmtree(checkpointed / "checkpoints")
    found = find(str(checkpointed))
    assert (found.folder, found.name) == (checkpointed / "model", "run")
    assert of(checkpointed).seed == of(checkpointed / "model").seed == 3


def test_another_s_config_beside_a_model_says_nothing(
    inputs: dict[str, str], checkpointed: Path, tmp_path: Path
) -> None:
    model = Path(inputs["model.path"])
    for text in ("model: gpt\nrun_dir: x\nlr: 1\n", "model: {}\n", "just words", "a: [", "\xff"):
        (model / "config.yaml").write_text(text, encoding="latin-1")
        (tmp_path / "config.yaml").write_text(text, encoding="latin-1")
        assert find(str(model)).record is None
    shutil.copy(checkpointed / "config.yaml", model)
    assert of(model).seed == 3


def test_a_model_folder_needs_a_configuration(inputs: dict[str, str]) -> None:
    found = find(inputs["model.path"])
    base = str(REPOSITORY / "configs" / "base.yaml")
    assert isinstance(configured(found.given, found.record, base, []), Config)
    with pytest.raises(ConfigError, match=r"says nothing of prompts.*--config FILE"):
        configured(found.given, found.record, None, [])


def refused(given: Path, weights: str = MODEL) -> str:
    with pytest.raises(ConfigError) as raised:
        find(str(given), weights)
    return str(raised.value)


def test_what_has_no_such_weights_is_refused(
    checkpointed: Path, inputs: dict[str, str], tmp_path: Path
) -> None:
    assert "is a model folder and has no average" in refused(Path(inputs["model.path"]), EMA)
    step = checkpointed / "checkpoints" / "step-20"
    shutil.rmtree(step / "ema")
    assert "holds no such weights, only model: name others" in refused(step, EMA)
    shutil.rmtree(checkpointed / "checkpoints")
    assert "this run has no checkpoint yet" in refused(checkpointed)
    assert f"MODEL = {str(tmp_path / 'none')!r}: no run (config.yaml)" in refused(tmp_path / "none")


def test_a_damaged_checkpoint_is_refused_but_not_its_model(checkpointed: Path) -> None:
    best = checkpointed / "checkpoints" / "step-10"
    (best / "checkpoint.json").write_text("{")
    assert f"name their folder, {best / 'model'}, and a config" in refused(checkpointed)
    found = find(str(best / "model"))
    config = str(checkpointed / "config.yaml")
    assert configured(found.given, found.record, config, []).seed == 3
    with pytest.raises(ConfigError, match=r"cannot be read: .*: name one, --config FILE"):
        configured(found.given, found.record, None, [])


@pytest.mark.parametrize("manifest", [False, True])
def test_a_record_decides_no_code_unless_it_is_trusted(
    checkpointed: Path, folder: Folder, manifest: bool
) -> None:
    folder.edited("model.trust_remote_code", True)
    found = find(str(checkpointed))
    if manifest:
        file = checkpointed / "checkpoints" / "step-10" / "checkpoint.json"
        no, yes = (f'"trust_remote_code": {word}' for word in ("false", "true"))
        file.write_text(file.read_text().replace(no, yes))
        found = find(str(file.parent))
    with pytest.raises(ConfigError, match=r"trust_remote_code = True: .* says so, not you"):
        configured(found.given, found.record, None, ["actors.max_turns=7"])
    said = configured(found.given, found.record, None, ["model.trust_remote_code=true"])
    trusted = configured(found.given, found.record, None, [], trusted=True)
    assert said.model.trust_remote_code and trusted.model.trust_remote_code
    assert configured(found.given, found.record, None, [], reads=["retrieval"])
