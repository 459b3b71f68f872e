"""AMX, the matrix unit of newer x86 processors: whether bf16 is computed with it."""

import os
import subprocess
import sys
from pathlib import Path

MOST = "ONEDNN_MAX_CPU_ISA"  # the highest instruction set that oneDNN uses
WITH, WITHOUT = "AVX512_CORE_AMX", "AVX512_CORE_FP16"
FLAGS = frozenset(("amx_tile", "amx_bf16"))
DEADLINE_S = 10.0
# Asks Linux for the tiles (arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)), then configures them and
# multiplies: ldtilecfg [rdi]; tilezero tmm0, tmm1, tmm2; tdpbf16ps tmm0, tmm1, tmm2; tilerelease.
TRIAL = """
import ctypes, mmap, sys
library = ctypes.CDLL(None, use_errno=True)
if library.syscall(158, 0x1023, 18):
    sys.exit(f"arch_prctl: error {ctypes.get_errno()}")
code = bytes.fromhex("c4e2784907 c4e27b49c0 c4e27b49c8 c4e27b49d0 c4e26a5cc1 c4e27849c0 c3")
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
shape = bytearray(64)
shape[0] = 1  # of three tiles of 16 rows by 64 bytes
shape[16:22] = b"\\x40\\0" * 3
shape[48:51] = b"\\x10" * 3
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
multiply = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(start)
multiply(bytes(shape))
"""


def use_amx_where_it_works() -> None:
    """Have oneDNN compute bf16 with AMX where a child is seen to, else without: virtual machines
    may announce it and end, by SIGILL, whoever uses it. What the environment says already holds,
    and children inherit it. Call before torch is imported.
    """
    if MOST not in os.environ:
        os.environ[MOST] = WITH if announced() and works() else WITHOUT


def announced(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor says that it multiplies bf16 in tiles."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(flags.split()) >= FLAGS


def works(trial: str = TRIAL) -> bool:
    """Whether a child that multiplies in tiles lives to tell."""
    command = [sys.executable, "-I", "-S", "-c", trial]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
