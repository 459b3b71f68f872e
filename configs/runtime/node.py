"""The name of the node that a process runs on: what shares memory, files and the loopback."""

import os
from pathlib import Path


def own_node() -> str:
    """`FORAGE_NODE` where it is set, else the machine's boot and this network namespace.

    Two processes of one node say the same; those of two machines, or of two namespaces that stand
    for machines, do not.
    """
    if named := os.environ.get("FORAGE_NODE"):
        return named
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
