"""A head of Ray that is lost is told, and one that comes back, too; with a listening socket in its place."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from colocate.parallel import ray_cluster as ray_head


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    monkeypatch.setattr(ray_head, "LOOK_S", 0.02)


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s, "it does not come"
        time.sleep(0.01)


def test_a_lost_head_is_told_once_and_with_how_to_go_on(capfd):
    head, said = socket.create_server(("127.0.0.1", 0)), ""
    address = f"127.0.0.1:{head.getsockname()[1]}"

    def has(words: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return words in said

    with ray_head.watched(address):
        time.sleep(0.5)
        assert not has("head"), "it is there"
        head.close()
        wait_for(lambda: has(f"Ray's head at {address} is lost: nobody listens there any more."))
        assert has("--resume_from_checkpoint auto")
        time.sleep(0.5)
        head = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
        wait_for(lambda: has(f"Ray's head at {address} answers again."))
        assert said.count("is lost") == 1
    head.close()
    time.sleep(0.5)
    assert not capfd.readouterr().err, "after the run nobody looks"
