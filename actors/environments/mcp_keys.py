"""Keys that MCP servers are given: read from files of their owner's or from the environment, kept
in memory alone, and taken out of what a server says.
"""

import os
import re
from collections.abc import Collection

from configs.environment import McpKey
from configs.load import ConfigError
from configs.schema import Config
from retrieval_server.auth import read_token

Keys = tuple[McpKey, ...]
_SHOWN = "(a key)"
_IN_HEADER = re.compile(r"[!-~]+( [!-~]+)*")
_SHORTEST = 8  # a shorter one could not be told from other text


def require_found(config: Config) -> None:
    """Raise ConfigError for keys in variables that the nodes of a cluster do not have."""
    if config.cluster.address and any(key.variable for key in config.environment.mcp_keys):
        raise ConfigError(
            "environment.mcp_keys: a variable with cluster.address: what a node's processes find "
            "in their environment is Ray's: name a file, or have a command read one of its own"
        )


def read(keys: Keys, spec: str) -> dict[str, str]:
    """Return what one server is given: headers of a URL's requests, or variables of a command, by
    name. Raises ConfigError, which holds nothing of it.
    """
    return {key.header or key.variable: _read(key) for key in keys if key.server == spec}


def without(text: str, values: Collection[str]) -> str:
    """Return a text of a server's without the keys in it, which are not to be on record."""
    for value in values:
        key = value.rpartition(" ")[2]
        if len(key) >= _SHORTEST:
            text = text.replace(key, _SHOWN)
    return text


def _read(key: McpKey) -> str:
    if key.file:
        found = read_token(key.file, "environment.mcp_keys: file", "write the server's key into it")
    elif not (found := os.environ.get(key.variable, "").strip()):
        raise ConfigError(
            f"environment.mcp_keys: variable = {key.variable!r}: no such variable is set here: "
            "export it where the command is started"
            + ", or name a file, file: FILE"
            * bool(key.header)
        )
    if not key.header:
        return found
    if not _IN_HEADER.fullmatch(found):
        raise ConfigError(
            f"environment.mcp_keys: variable = {key.variable!r}: what it holds makes no header: "
            "printable ASCII in one line is expected"
        )
    return f"{key.scheme} {found}".lstrip()
