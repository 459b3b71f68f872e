"""Files and folders that are whole or absent, and locks on them.

    write_durably    a small file: bytes or text
    write_json       a small file: any value that msgspec encodes, indented
    replacing        a file of any size, written by the caller under a draft's name
    making           a folder, filled by the caller under a draft's name
    locked           a file or folder that one process at a time works in
    own_folder       the same for a folder that is made, and removed again where it stays empty
    lines_since      the whole lines of a file that another process appends to
    latest_s         the latest time that such a line may tell
    decoded          a line, or a file, of JSON that anybody may have written
    full_disk        what to say where that is why nothing could be written

A draft lies beside what it replaces and is called `NAME.draft`, and a folder that is on its way out
`NAME.old`; a process that is killed may leave one, which the next writer removes. A lock belongs to
the open file, so it ends with the process, however that ends, and leaves nothing in the folder. On
file systems that several machines share it may keep out the processes of one machine only.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

MOST_IDS = 1 << 31  # of a vocabulary
DRAFT_SUFFIX, OLD_SUFFIX = ".draft", ".old"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# As programs and libraries say it, some of whose errors have no number; the last one is numpy.
_SAID_FULL = re.compile("|".join([*map(os.strerror, _FULL), r"\d+ requested and \d+ written"]))
_Kind = TypeVar("_Kind")


class Locked(OSError):
    """Another process holds the lock; the text says which kind of process that is."""


class LockUnsupported(OSError):
    """The file system offers no locks; `strerror` says why."""


def weights_bytes(folder: str) -> int:
    """Bytes of a model folder's safetensors; 0 where there is no such folder."""
    files = Path(folder).glob("*.safetensors") if folder else ()
    return sum(file.stat().st_size for file in files)


def weights_digest(folder: str | Path) -> str:
    """blake2b of a folder's safetensors, names included; a file is read again only where it has
    changed.
    """
    whole = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(folder).glob("*.safetensors")):
        told = file.stat()
        whole.update(f"{file.name} {_digest(file, told.st_size, told.st_mtime_ns)}\n".encode())
    return whole.hexdigest()


@functools.lru_cache(maxsize=256)
def _digest(file: Path, _size: int, _changed_ns: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


class _Embedding(msgspec.Struct):
    vocab_size: int = 0


class _Model(_Embedding):
    """Of a model's `config.json`, where one that also sees says it of its text."""

    text_config: _Embedding | None = None


def vocabulary_of(folder: str) -> int:
    """How many ids a model embeds; as many as there may be where its folder does not tell."""
    try:
        told = msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=_Model)
    except (OSError, msgspec.DecodeError):  # of a machine that has no copy of the model
        return MOST_IDS
    return told.vocab_size or (told.text_config or told).vocab_size or MOST_IDS


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def lines_since(path: Path, offset: int, most: int = 1 << 20) -> tuple[list[bytes], int]:
    """The whole lines of a file from an offset on, of at most so many bytes, and where the next one
    begins; none where it cannot be read, or is a pipe. What is longer is passed over.
    """
    if not path.is_file():
        return [], offset
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read(most)
    except OSError:
        return [], offset
    whole, end, _ = text.rpartition(b"\n")
    if not end and len(text) == most:
        return [], offset + most
    return whole.split(b"\n") if end else [], offset + len(whole) + len(end)


def latest_s() -> float:
    """The latest time that a line may tell, in seconds since the epoch: clocks differ by less than
    a day.
    """
    return time.time() + 86_400.0


def decoded(text: bytes, kind: type[_Kind]) -> _Kind | None:
    """What JSON says, as such a thing; None where it is no such thing, however deep it goes."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Force a file, or a folder and all that is in it, to the disk."""
    for path in (*root.rglob("*"), root):
        sync(path)


def draft_of(path: Path) -> Path:
    """The name under which `path` is written until it is whole."""
    return path.with_name(path.name + DRAFT_SUFFIX)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that nobody meets half of it, and what a removal left that was killed.

    Nothing happens where neither is there.
    """
    if folder.exists():
        _set_aside(folder)
    if (old := _old_of(folder)).exists():
        shutil.rmtree(old)


def is_removed(folder: Path) -> bool:
    """True where neither a folder nor a part of its removal is left."""
    return not (folder.exists() or _old_of(folder).exists())


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True, contended: bool = False) -> Iterator[Path]:
    """Yield the draft of a file (or link), which takes its name when the block has written it.

    An exception removes the draft and leaves `path` as it was. `durable`: the draft is on the disk
    before it has the name, and the name before this returns, so both survive a loss of power.
    `contended`: several processes may write at once, each a draft of its own; the last one wins.
    """
    draft = draft_of(path.with_name(f"{path.name}.{os.getpid()}") if contended else path)
    draft.unlink(missing_ok=True)
    try:
        yield draft
        _name(draft, path, durable)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def making(folder: Path, *, durable: bool = True, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty draft of a folder, which takes its name when the block has filled it.

    As `replacing`, for one process at a time. Raises OSError where the folder is there already and
    not empty, unless this one `replaces` it: the older one is removed once this has its name.
    """
    draft = draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        _name(draft, folder, durable, replaces)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def is_full(why: Exception | str) -> bool:
    """True for what a full disk or quota comes to: an error, or what a program or library said."""
    return getattr(why, "errno", None) in _FULL or bool(_SAID_FULL.search(str(why)))


def full_disk(folder: Path, why: Exception | str) -> str:
    """Tell that the disk of `folder` is full, and the remedy, where `why` says so; "" elsewhere."""
    return f"the disk of {folder} is full: make room there" if is_full(why) else ""


def write_durably(path: Path, data: bytes | str) -> None:
    """Write a small file whole or not at all, making its directory where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, durably."""
    write_durably(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def lock(descriptor: int, path: Path, holder: str, *, shared: bool = False) -> None:
    """Lock an open file or folder until it is closed; never waits.

    `holder` names the processes that take this lock, for the error's text. Raises Locked while
    another one has it, LockUnsupported where the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Locked(errno.EWOULDBLOCK, f"{holder} has locked it", str(path)) from error
    except OSError as error:
        raise LockUnsupported(error.errno, error.strerror, str(path)) from error


def open_locked(path: Path, holder: str, flags: int = os.O_RDONLY) -> int:
    """Open a file or folder, locked until the descriptor is closed. Raises as `lock`, and OSError.

    What is open is what has the name: a file or folder that was replaced meanwhile is opened anew.
    """
    while (descriptor := _opened_and_locked(path, holder, flags)) is None:
        continue
    return descriptor


@contextlib.contextmanager
def locked(
    path: Path, holder: str, flags: int = os.O_RDONLY, *, patience_s: float = 0.0
) -> Iterator[int]:
    """Keep other processes out of a file or folder during the block; yields its descriptor.

    Waits for `patience_s` while another one has it. Raises as `open_locked`.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            descriptor = open_locked(path, holder, flags)
            break
        except Locked:
            if time.monotonic() >= end:
                raise
            time.sleep(0.2)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def own_folder(folder: Path, holder: str) -> Iterator[None]:
    """Make a folder where there is none, and keep other processes out of it during the block.

    After an exception, folders that were made here and are still empty are removed. Raises as
    `open_locked`.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, _made_and_locked(folder, holder))
            yield
        except Locked:  # it is the other's, even if this process made it
            raise
        except BaseException:
            for each in made:
                with contextlib.suppress(OSError):
                    each.rmdir()
            raise


def _made_and_locked(folder: Path, holder: str) -> int:
    while True:
        with contextlib.suppress(FileExistsError):  # the next line tells if it is no folder
            folder.mkdir(parents=True)
        descriptor = _opened_and_locked(folder, holder, os.O_RDONLY | os.O_DIRECTORY)
        if descriptor is not None:
            return descriptor


def _opened_and_locked(path: Path, holder: str, flags: int) -> int | None:
    """None where what was opened no longer has the name: it was replaced or removed meanwhile."""
    descriptor = os.open(path, flags, 0o644)
    try:
        lock(descriptor, path, holder)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _name(draft: Path, path: Path, durable: bool, replaces: bool = False) -> None:
    if durable:
        sync_tree(draft)
    old = _set_aside(path) if replaces and path.exists() else None
    draft.rename(path)
    if durable:
        sync(path.parent)
    if old is not None:
        shutil.rmtree(old)


def _set_aside(folder: Path) -> Path:
    old = _old_of(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder.rename(old)


def _old_of(folder: Path) -> Path:
    return folder.with_name(folder.name + OLD_SUFFIX)
