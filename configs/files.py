"""Files that survive a loss of power: written, forced to the disk, and only then named."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """The same for a folder and all that is in it."""
    for path in (*root.rglob("*"), root):
        sync(path)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, making its directory where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_bytes(data)
    sync(draft)
    draft.replace(path)
    sync(path.parent)
