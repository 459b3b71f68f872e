"""Bearer token of the retrieval server: kept in a file, never in the configuration.

Over plain HTTP anyone who listens in on the network can read it.
"""

import hmac
import ipaddress
import re
from pathlib import Path

from configs.load import ConfigError

MAX_BYTES = 4096
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750's b64token


def read_token(path: str, field: str = "retrieval.token_file", remedy: str = "") -> str:
    """The token in a file that its owner alone can read; '' where no file is named.

    `field` names the file, `remedy` says how it is made. Raises ConfigError naming them.
    """
    if not path:
        return ""
    field = f"{field} = {path!r}"
    remedy = remedy or (
        f"make it for the server, (umask 077; openssl rand -hex 32 > {path}); clients get a copy"
    )
    try:
        with Path(path).open("rb") as file:
            mode = Path(path).stat().st_mode & 0o777
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{field}: {error.strerror}: {remedy}") from error
    if mode & 0o077:
        raise ConfigError(f"{field}: mode {mode:04o} lets others read it: chmod 600 {path}")
    token = content.decode(errors="replace").strip()
    if len(content) > MAX_BYTES or not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{field}: it must hold one token of at most {MAX_BYTES} letters, digits and ._~+/-=: "
            f"{remedy}"
        )
    return token


def authorized(token: str, authorization: str) -> bool:
    """Return True if an Authorization header shows `token`, in constant time, or there is none."""
    scheme, _, shown = authorization.strip().partition(" ")
    same = hmac.compare_digest(shown.strip().encode(), token.encode())
    return not token or (same and scheme.lower() == "bearer")


def is_loopback(address: str) -> bool:
    """Return True if only this machine reaches this numeric address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
