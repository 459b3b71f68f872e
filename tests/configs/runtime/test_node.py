"""This node as others see it: its name, and the way to them."""

import socket

import psutil
import pytest

from configs.runtime.node import interface, own_address, own_node


def test_the_interface_to_another_host_is_found_by_its_address() -> None:
    addresses = [
        (name, each.address)
        for name, each_of in psutil.net_if_addrs().items()
        for each in each_of
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    for name, address in addresses:
        assert interface(address) == name
    assert interface("127.0.0.1") == interface("203.0.113.9") == ""


def test_the_way_to_this_machine_is_its_own_address() -> None:
    assert own_address("127.0.0.1", 4000) == "127.0.0.1"


def test_a_node_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_node()
    assert own == own_node() and "net:[" in own
    monkeypatch.setenv("FORAGE_NODE", "rack-3")
    assert own_node() == "rack-3"
