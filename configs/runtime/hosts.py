"""Which addresses are this host's own."""

import socket


def is_own_host(host: str) -> bool:
    """True where a name or address leads to this host: its loopback, an interface's address or its
    name. A name is looked up, which may take the resolver's time.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return host.lower() == socket.gethostname().lower()
    return any(_is_own(family, address[0]) for family, _, _, _, address in found)


def _is_own(family: int, address: str | int) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # only to an address of this machine
        except OSError:
            return False
    return True
