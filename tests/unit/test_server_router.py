"""A router in front of rollout servers, where a run was told one address for all: it is refused by name."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from engine_models import make_model, make_prompts
from fake_server import FakeVLLM, install_fake_vllm
from faulty_front import FaultyFront

from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.fit import SeveralServers, Starts
from colocate.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=6, seed=3)


class Router(FaultyFront):
    """Passes requests on to servers in turn: each request, or all of a connection, to the next one."""

    def __init__(self, servers: list[FakeVLLM], turns: str) -> None:
        self.turns, self._next = turns, itertools.cycle(servers)
        self.num_passed = dict.fromkeys((server.base_url for server in servers), 0)
        super().__init__()

    def ask(self, handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, Any] | None:
        known = vars(handler).get("its_server")
        handler.its_server = server = known if known and self.turns == "connection" else next(self._next)  # type: ignore[attr-defined]
        self.num_passed[server.base_url] += 1
        connection = http.client.HTTPConnection("127.0.0.1", server.http.server_port)
        try:
            connection.request(handler.command, handler.path, content or None, dict(handler.headers))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(text) if text else None


@pytest.fixture(scope="module", name="model")
def served_model() -> Any:
    return make_model("qwen3")


@pytest.fixture(name="servers")
def stand_ins(model, monkeypatch) -> Iterator[list[FakeVLLM]]:
    install_fake_vllm(monkeypatch)
    servers = [FakeVLLM(model) for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


@pytest.mark.parametrize("turns", ["request", "connection"])
@pytest.mark.parametrize("num_servers", [2, 3])
def test_a_router_is_refused_before_it_is_sent_anything(model, servers, turns, num_servers):
    servers = servers[:num_servers]
    router = Router(servers, turns)
    with pytest.raises(SeveralServers) as caught:
        RolloutServerEngine(model, base_url=router.base_url, server_timeout_s=5.0)
    router.close()
    said = str(caught.value)
    assert f"{router.base_url} leads to {num_servers} servers in turn" in said
    assert "Set rollout_server_base_url to the addresses of the servers themselves" in said
    assert all(router.num_passed.values()), "else nobody could have seen it"
    for server in servers:
        assert server.message("claim", "another run") == {}, "it is free"
        assert server.message("state", "another run")["start_id"][:8] in said
        assert "/pause" not in server.reached and not server.loaded.num_loads


def test_a_router_that_changes_its_mind_later_ends_the_run(model, servers, tmp_path):
    """At the start it sent all to one server: a second one was added to it in the middle of the run."""
    router = Router(servers[:1], "request")
    engine = RolloutServerEngine(
        model, base_url=router.base_url, server_timeout_s=5.0, directory=str(tmp_path), on_server_loss="wait"
    )
    engine.wake_up()
    alone = RolloutServerEngine(model, base_url=servers[2].base_url, directory=str(tmp_path))
    alone.wake_up()
    prompts = make_prompts([3, 5])
    assert engine.generate(prompts, SAMPLING) == alone.generate(prompts, SAMPLING)
    router._next = itertools.cycle(servers[:2])
    router.num_passed[servers[1].base_url] = 0
    with pytest.raises(SeveralServers, match="leads to 2 servers in turn"):
        engine.update_weights(version=1)
    for part in (engine, alone, router):
        part.close()


def test_starts_of_one_server_are_no_router():
    starts = Starts("http://a:1")
    assert [start_id for start_id in "xxyyz" if starts.note(start_id)] == ["x", "y"]
    with pytest.raises(SeveralServers, match="to 2 servers in turn: to the starts y, z, and then to y again"):
        starts.note("y")
