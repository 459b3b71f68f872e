"""Downloads from npm's registry, with or without npm: HTTP and nothing else. Nothing is run.

The registry is what npm says, where there is one; else what NPM_CONFIG_REGISTRY says, then the file
NPM_CONFIG_USERCONFIG or ~/.npmrc, else npm's own. As for npm, these names may be in small letters.
"""

import base64
import http.client
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

import msgspec

OFFICIAL = "https://registry.npmjs.org/"
TIMEOUT_S = 60.0  # without a byte
DEADLINE_S = 1800.0  # of a whole package
_CHUNK = 1 << 16


class NpmError(Exception):
    """A package that the registry does not give; the text says why, in one line."""


class _Dist(msgspec.Struct):
    tarball: str


class _Version(msgspec.Struct):
    dist: _Dist


def digest_of(integrity: str) -> str:
    """ALGORITHM:HEX of what a registry calls a package's integrity."""
    algorithm, _, encoded = integrity.partition("-")
    return f"{algorithm}:{base64.b64decode(encoded).hex()}"


def registry() -> str:
    """The address of the configured registry, with a slash at its end."""
    said = _asked() or _configured("registry") or _written() or OFFICIAL
    return said.rstrip("/") + "/"


def download(name: str, version: str, path: Path) -> None:
    """Write a package's archive to `path`. Raises NpmError, OSError where it cannot be written."""
    about = f"{registry()}{name}/{version}"
    try:
        with _opened(about) as reply:
            told = msgspec.json.decode(reply.read(), type=_Version)
        with _opened(told.dist.tarball) as reply, path.open("wb") as file:
            _copy(reply, file)
            _require_whole(told.dist.tarball, file.tell(), reply.headers["Content-Length"])
    except msgspec.DecodeError as error:
        raise NpmError(f"{about} describes no package ({error})") from error
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise NpmError(f"{error.url} answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise NpmError(f"{about} cannot be reached ({error.reason})") from error
    except (http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        raise NpmError(f"{about} gives no whole package ({error})") from error


def _copy(reply: http.client.HTTPResponse, file: BinaryIO) -> None:
    """Copy to the end. Raises TimeoutError where that takes longer than `DEADLINE_S`."""
    end = time.monotonic() + DEADLINE_S
    while chunk := reply.read1(_CHUNK):
        file.write(chunk)
        if time.monotonic() > end:
            raise TimeoutError(f"not done after {DEADLINE_S:g} s, {file.tell()} bytes")


def _require_whole(url: str, size: int, announced: str | None) -> None:
    """Raise NpmError for a reply of fewer bytes than it announced: reading it raises nothing."""
    if announced and size < int(announced):
        raise NpmError(f"{url}: the download was cut off after {size} of {announced} bytes")


def _opened(url: str) -> http.client.HTTPResponse:
    if not url.startswith(("http://", "https://")):
        raise NpmError(f"{url!r} is no http:// or https:// address")
    found: http.client.HTTPResponse = urllib.request.urlopen(url, timeout=TIMEOUT_S)
    return found


def _asked() -> str:
    """What npm says, if there is one."""
    npm = shutil.which("npm")
    if not npm:
        return ""
    command = [npm, "config", "get", "registry"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said = done.stdout.strip()
    return said if said.startswith("http") else ""


def _configured(name: str) -> str:
    """What the environment says for npm, in whichever letters."""
    wanted = f"npm_config_{name}"
    found = [value for key, value in os.environ.items() if key.lower() == wanted and value]
    return found[0] if found else ""


def _written() -> str:
    """What the user's .npmrc says."""
    file = Path(_configured("userconfig") or Path.home() / ".npmrc").expanduser()
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = [line.partition("=") for line in lines]
    values = [value for key, _, value in pairs if key.strip() == "registry"]
    return values[-1].strip().strip("\"'") if values else ""
