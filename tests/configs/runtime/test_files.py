"""Files and folders that are whole or absent, and locks on them."""

import fcntl
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from configs.runtime.files import (
    Locked,
    decoded,
    draft_of,
    lines_since,
    locked,
    making,
    own_folder,
    remove_folder,
    replacing,
    write_durably,
    write_json,
)


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "new" / "number", []
    forcing = os.fsync

    def fsync(fd: int) -> None:
        events.append((Path(f"/proc/self/fd/{fd}").resolve().name, path.exists()))
        forcing(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(path, b"7\n")
    assert events == [("number.draft", False), ("new", True)] and path.read_bytes() == b"7\n"


def test_a_file_that_cannot_be_written_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "number"
    write_durably(path, b"7\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"8\n")
    assert path.read_bytes() == b"7\n"


def test_a_draft_is_named_when_it_is_whole_and_removed_when_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "large"
    draft_of(path).write_bytes(b"left by a killed process")
    with replacing(path, durable=False) as draft:
        draft.write_bytes(b"one")
        assert not path.exists()
    with pytest.raises(RuntimeError), replacing(path) as draft:
        draft.write_bytes(b"tw")
        raise RuntimeError
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_made_whole_and_replaces_none(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    draft_of(folder).mkdir()
    (draft_of(folder) / "left").touch()
    with making(folder) as draft:
        (draft / "file").touch()
        assert not folder.exists()
    with pytest.raises(OSError, match="not empty"), making(folder) as draft:
        (draft / "other").touch()
    assert list(tmp_path.rglob("*")) == [folder, folder / "file"]


def test_a_folder_may_replace_an_older_one_once_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for content in ("one", "two"):
        with making(folder, replaces=True) as draft:
            (draft / content).touch()
    with pytest.raises(RuntimeError), making(folder, replaces=True) as draft:
        raise RuntimeError
    assert list(tmp_path.rglob("*")) == [folder, folder / "two"]
    remove_folder(folder)
    assert not list(tmp_path.iterdir())


def test_json_is_indented_and_ends_with_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "facts.json", {"step": 3, "name": "é"})
    text = (tmp_path / "new" / "facts.json").read_text()
    assert text == '{\n  "step": 3,\n  "name": "é"\n}\n'


def test_a_lock_names_its_holders_and_ends_with_the_block(tmp_path: Path) -> None:
    with (
        locked(tmp_path, "another build"),
        pytest.raises(Locked, match=r"another build has locked it: '/.*'"),
        locked(tmp_path, "another build"),
    ):
        pass
    with locked(tmp_path, "another build"):
        pass


def test_who_is_patient_gets_the_lock_once_it_is_free(tmp_path: Path) -> None:
    with ExitStack() as held:
        held.enter_context(locked(tmp_path, "another run"))
        timer = threading.Timer(0.3, held.pop_all().close)
        timer.start()
        with locked(tmp_path, "another run", patience_s=60.0):
            timer.join()


def test_a_lock_is_on_what_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock, replaced = tmp_path / "file", fcntl.flock, []
    path.write_text("old")

    def late(descriptor: int, kind: int) -> None:
        if not replaced:
            write_durably(path, "new")
            replaced.append(path)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(path, "another writer") as descriptor:
        assert os.read(descriptor, 3) == b"new"


def test_an_own_folder_that_stays_empty_is_gone_after_an_error(tmp_path: Path) -> None:
    for kept in (False, True):
        with pytest.raises(RuntimeError), own_folder(tmp_path / "new" / "out", "another run"):
            if kept:
                (tmp_path / "new" / "out" / "file").touch()
            raise RuntimeError
        assert (tmp_path / "new").exists() is kept


def test_a_folder_of_another_process_is_left_alone(tmp_path: Path) -> None:
    with (
        own_folder(tmp_path / "out", "another run"),
        pytest.raises(Locked, match="another run has locked it"),
        own_folder(tmp_path / "out", "another run"),
    ):
        pass
    assert (tmp_path / "out").is_dir()


def test_lines_are_read_once_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert lines_since(path, 3) == ([], 3)
    path.write_bytes(b"one\n\ntwo")
    assert lines_since(path, 0) == ([b"one", b""], 5) and lines_since(path, 5) == ([], 5)
    path.write_bytes(b"one\n\ntwo\nthree\n")
    assert lines_since(path, 5) == ([b"two", b"three"], 15)
    assert lines_since(path, 5, most=6) == ([b"two"], 9)
    assert lines_since(path, 9, most=3) == ([], 12)  # longer than is read at once: passed over
    path.unlink()
    os.mkfifo(path)
    assert lines_since(path, 0) == ([], 0)


def test_json_of_anybody_is_such_a_thing_or_nothing() -> None:
    assert decoded(b'{"a": 1}', dict) == {"a": 1}
    for text in (b"", b'{"a": ', b"[]", b'{"\xff": 1}', b'{"a":' + b"[" * 100_000):
        assert decoded(text, dict) is None
