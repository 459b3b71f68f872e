"""By which configuration a run is evaluated, and what its weights are told from others by."""

from pathlib import Path

from scripts.eval_model import configured, digest
from scripts.found_model import find
from tests.scripts.conftest import Folder


def test_a_runs_port_is_not_taken_from_it(folder: Folder, checkpointed: Path) -> None:
    folder.edited("retrieval.port", 8123)
    config = configured(find(str(checkpointed)), str(checkpointed / "config.yaml"), [])
    assert config.retrieval.port == 0
    given = configured(find(str(checkpointed)), None, ["retrieval.port=8124"])
    assert given.retrieval.port == 8124


def test_recorded_searches_are_not_taken_from_it(folder: Folder, checkpointed: Path) -> None:
    folder.edited("retrieval.recorded", "runs/old")
    config = configured(find(str(checkpointed)), str(checkpointed / "config.yaml"), [])
    assert config.retrieval.recorded == ""
    given = configured(find(str(checkpointed)), None, ["retrieval.recorded=runs/old"])
    assert given.retrieval.recorded == "runs/old"


def test_the_digest_is_of_weights_and_tokenizer(checkpointed: Path) -> None:
    folder = checkpointed / "checkpoints" / "step-10" / "model"
    first = digest(folder)
    (folder / "README.md").write_text("words")
    assert digest(folder) == first
    (folder / "tokenizer.json").write_text("{ }")
    second = digest(folder)
    (folder / "model.safetensors").write_text("other")
    assert len({first, second, digest(folder)}) == 3
    assert digest(checkpointed / "checkpoints" / "step-20" / "model") == first
