"""The port of a run's own retrieval server, and paths that hold anywhere."""

from pathlib import Path

import pytest

from configs.load import ConfigError, parse
from configs.retrieval import RetrievalConfig
from scripts.setup.resolve import PORTS, can_listen, with_absolute_paths, with_port


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    chosen = with_port(RetrievalConfig())
    assert chosen.port in PORTS and not can_listen(chosen.host, chosen.port)
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert chosen.port < int(given_away[0])


def test_a_host_that_is_not_here_is_an_error() -> None:
    said = r"retrieval\.host = '192\.0\.2\.1': no address of this machine .*: name one"
    with pytest.raises(ConfigError, match=said):
        with_port(RetrievalConfig(host="192.0.2.1"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("examples/a.py:answer", "{here}/examples/a.py:answer"),
        ("my.agent:answer", "my.agent:answer"),
    ],
)
def test_the_file_of_a_program_is_found_from_anywhere(given: str, expected: str) -> None:
    settings = ["environment.name=program", f"environment.program.entry_point={given}"]
    config = with_absolute_paths(parse("", settings, "here"))
    found = config.environment.program.entry_point
    assert found == expected.replace("{here}", str(Path.cwd()))
