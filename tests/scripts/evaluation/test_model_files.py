"""The digest of a model's files."""

from pathlib import Path

from scripts.evaluation.model_files import digest


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
