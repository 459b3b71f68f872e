"""Write the hashes of what may be installed beside each version in the lock files.

    .venv/bin/python requirements/hashes.py requirements/*.lock

uv asks the package index which files each version has; of those for Linux (glibc) on x86-64 and
AArch64 and CPython 3.11 to 3.14, sources included, the SHA-256 goes on the version's line. Comments
and order stay. Run it after a version has changed.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

PYTHONS = range(11, 15)  # 3.11 to 3.14
_PLATFORM = re.compile(r"any|(manylinux|linux).*_(x86_64|aarch64)")
_COMPILE = ("--no-deps", "--universal", "--python-version", f"3.{PYTHONS[0]}", "--quiet")


def fits(tag: Tag) -> bool:
    """True for the tag of a wheel that a machine of ours may install."""
    interpreter = re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter)
    if interpreter is None or not _PLATFORM.fullmatch(tag.platform):
        return False
    of, minor = interpreter[1], int(interpreter[2] or 0)
    if of == "py" or tag.abi == "abi3":
        return minor < PYTHONS.stop and tag.abi in ("none", "abi3")
    return minor in PYTHONS and tag.abi in ("none", tag.interpreter)


def hashes(package: dict[str, Any]) -> Iterator[str]:
    """The SHA-256 of each file of a package in uv's lock that may be installed."""
    for wheel in package.get("wheels", ()):
        name = unquote(Path(urlsplit(wheel["url"]).path).name)
        if any(map(fits, parse_wheel_filename(name)[3])):
            yield wheel["hashes"]["sha256"]
    if "sdist" in package:
        yield package["sdist"]["hashes"]["sha256"]


def rewrite(lock: Path) -> None:
    """Give each line of a lock file its hashes."""
    lines = [line.partition(" --hash=")[0] for line in lock.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        bare, found = Path(folder, "bare.txt"), Path(folder, "pylock.toml")
        bare.write_text("\n".join(lines))
        command = ["uv", "pip", "compile", *_COMPILE, "--format", "pylock.toml"]
        subprocess.run([*command, "-o", str(found), str(bare)], check=True)
        packages = tomllib.loads(found.read_text())["packages"]
    known = {(each["name"], each["version"]): sorted(set(hashes(each))) for each in packages}
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            name, _, rest = line.partition("==")
            version = rest.partition(";")[0].strip()
            words = (f"--hash=sha256:{each}" for each in known[canonicalize_name(name), version])
            lines[number] = " ".join([line, *words])
    lock.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        rewrite(Path(given))
