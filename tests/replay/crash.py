"""A process that is killed in front of one of its system calls, or in the middle of a write."""

import os
from collections.abc import Callable, Iterator

CALLS = ("open", "write", "fsync", "fdatasync", "rename", "unlink", "ftruncate", "close")


def killed_everywhere(act: Callable[[], None]) -> Iterator[int]:
    """Run `act` in a child that is killed before its n-th system call, for n = 0, 1, …; yield after
    each. A write that is hit leaves half of what it was given. Ends once the child survives.
    """
    number = 0
    while _dies(act, number):
        yield number
        number += 1


def _dies(act: Callable[[], None], number: int) -> bool:
    child = os.fork()
    if child == 0:
        _plant(number)
        try:
            act()
        except BaseException:  # noqa: BLE001 (a child must not go on as its parent)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, 9), "the child failed on its own"
    return os.waitstatus_to_exitcode(status) == 9


def _plant(number: int) -> None:
    left = [number]
    for name in CALLS:
        setattr(os, name, _deadly(name, getattr(os, name), left))


def _deadly(name: str, real: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def call(*arguments: object, **named: object) -> object:
        if left[0] == 0:
            if name == "write":
                fd, data = arguments
                real(fd, data[: len(data) // 2])  # type: ignore[index, arg-type]
            os._exit(9)
        left[0] -= 1
        return real(*arguments, **named)

    return call
