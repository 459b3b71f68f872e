"""The most memory that a piece of work needs beyond what was there before it.

On an accelerator what its allocator handed out; else this process's resident set, whose high-water
mark Linux lets a process reset. Works side by side only when they do not overlap.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_RESET_HIGH_WATER_MARK = "5"


def peak_of(act: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What `act(*arguments)` returns, and the bytes that it needed at its worst."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = act(*arguments)
        torch.cuda.synchronize()
        return result, float(torch.cuda.max_memory_allocated() - before)
    _give_back_what_is_free()
    Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER_MARK)
    before = _status_bytes("VmRSS")
    result = act(*arguments)
    return result, float(_status_bytes("VmHWM") - before)


def _give_back_what_is_free() -> None:
    # Else the work would fill memory that malloc has kept, and seem to need none.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(value)
