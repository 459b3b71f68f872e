"""The node that a process runs on, what shares memory, files and the loopback: its name, and the
address and interface by which others reach it.
"""

import ipaddress
import os
import socket
from pathlib import Path

import psutil


def own_node() -> str:
    """`FORAGE_NODE` where it is set, else the machine's boot and this network namespace.

    Two processes of one node say the same; those of two machines, or of two namespaces that stand
    for machines, do not.
    """
    if named := os.environ.get("FORAGE_NODE"):
        return named
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


def own_address(host: str, port: int) -> str:
    """The address of this machine that a peer on the way to `host` would see; sends no packet."""
    family = socket.getaddrinfo(host, port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface(address: str) -> str:
    """The name of this machine's interface that has an address; '' for the loopback or none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return "" if ipaddress.ip_address(address).is_loopback else name
    return ""
