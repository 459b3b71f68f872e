"""The port of a run's own retrieval server."""

from pathlib import Path

import pytest

from configs.load import ConfigError
from configs.retrieval import RetrievalConfig
from scripts.setup.resolve import PORTS, can_listen, with_port


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    chosen = with_port(RetrievalConfig())
    assert chosen.port in PORTS and not can_listen(chosen.host, chosen.port)
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert chosen.port < int(given_away[0])


def test_a_host_that_is_not_here_is_an_error() -> None:
    said = r"retrieval\.host = '192\.0\.2\.1': no address of this machine .*: name one"
    with pytest.raises(ConfigError, match=said):
        with_port(RetrievalConfig(host="192.0.2.1"))
