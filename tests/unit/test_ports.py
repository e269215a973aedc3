"""Ports for servers and groups of processes."""

from __future__ import annotations

import random
import socket

import pytest

from colocate.parallel import launching as ports
from colocate.parallel.launching import free_port


def test_a_free_port_can_be_had_and_is_none_of_an_outgoing_connection() -> None:
    state = random.getstate()
    port = free_port()
    assert random.getstate() == state, "a seeded training draws other numbers"
    assert port in ports.PORTS
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ports, "PORTS", (taken.getsockname()[1],))
        with pytest.raises(OSError, match="100 ports of 127"):
            free_port()


def test_the_address_of_another_machine_has_no_port() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")  # RFC 5737: an address for documentation
