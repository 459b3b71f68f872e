"""Environments of Python with published libraries, pinned, for tests of what runs beside Forage."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import blake2s
from pathlib import Path

from configs.runtime.process import REPOSITORY


def environment_of(name: str, pins: Sequence[str]) -> Path:
    """Return the Python of an environment with these; made once by pip, and kept in `.cache`."""
    digest = blake2s(repr((tuple(pins), sys.version)).encode(), digest_size=8).hexdigest()
    found = REPOSITORY / ".cache" / f"{name}-{digest}"
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            draft = Path(folder, found.name)
            run(sys.executable, "-m", "venv", "--without-pip", draft)
            pip = ("-m", "pip", "--python", draft / "bin" / "python", "install", "--quiet")
            run(sys.executable, *pip, "--no-compile", *pins)
            draft.rename(found)
    return found / "bin" / "python"


def run(*words: object) -> str:
    """Run a command, and return what it prints; fail by what it says if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout
