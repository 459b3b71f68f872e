"""A folder that one process at a time works in.

Consumes a path; the lock is on the folder itself and ends with the process, whatever ends it, so
nothing about it lies in the folder. On file systems that several machines share it may keep out
the processes of one machine only. Waits for nothing.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from configs.load import ConfigError


class _Taken(ConfigError):
    pass


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make the folder where there is none, and keep other processes out. Raises ConfigError.

    When an exception ends it, whatever was made here and is still empty is gone again.
    """
    try:
        made = [each for each in (folder, *folder.parents) if not each.exists()]
    except OSError as error:
        raise unusable(folder, error) from error
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, _locked(folder))
            yield
        except _Taken:  # it is the other's, even if we made it
            raise
        except BaseException:
            for each in made:
                with contextlib.suppress(OSError):
                    each.rmdir()
            raise


def unusable(folder: Path, error: OSError) -> ConfigError:
    """What is said of a folder that cannot be made, read or written."""
    return ConfigError(f"--out {str(folder)!r}: {error.strerror or error}: name another folder")


def _locked(folder: Path) -> int:
    try:
        while True:
            with contextlib.suppress(FileExistsError):  # whether it is a folder shows below
                folder.mkdir(parents=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _lock(descriptor, folder)
                if _still(descriptor, folder):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # whoever made it has removed it again meanwhile
    except OSError as error:
        raise unusable(folder, error) from error


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _Taken(
            f"--out {str(folder)!r}: another warm start is learning there: wait for it, or name "
            "another folder"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}: it cannot be locked ({error.strerror}): name a folder on "
            "another file system"
        ) from error


def _still(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
