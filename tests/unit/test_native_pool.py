"""A pool of native servers, whatever befalls them: what they draw is what the engine in the trainer draws."""

from __future__ import annotations

import dataclasses
import http.client
import json
import select
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import make_model, make_prompts
from fake_server import KEY
from fault_schedules import COMPLETIONS, FAULTS, LIMIT_S, Fleet, MakeFleet, check_schedules, fleets_of
from faulty_front import FaultyFront, send_json
from native_server_case import NativeServer

from colocate.engines.native.engine import NativeEngine
from colocate.rollout_server.trainer import watch as watch_module
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.types import Completion, SamplingParams

_OWN_HEADERS = ("host", "connection", "content-length")


class FaultyNative(FaultyFront):
    """A native server behind an HTTP server that fails as a test says.

    Args:
        options: see `NativeOptions`.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self._model, self._options = model, options
        self.server = NativeServer(model, **options)
        super().__init__()

    @property
    def awake(self) -> bool:
        """Whether there is memory for weights."""
        weights = self.server.loop._weights._parameters.values()
        return any(parameter.untyped_storage().nbytes() for parameter in weights)

    def restart(self) -> None:
        self.server.close()
        self.server.start()

    def become_another(self) -> None:
        num_layers = self._model.config.num_hidden_layers + 1
        self.server.close()
        self.server = NativeServer(make_model("qwen3", num_hidden_layers=num_layers), **self._options)

    def close(self) -> None:
        super().close()
        self.server.close()

    def ask(self, handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, Any] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        headers = {name: text for name, text in handler.headers.items() if name.lower() not in _OWN_HEADERS}
        try:
            connection.request(handler.command, handler.path, content or None, headers)
            while not select.select([connection.sock], [], [], 0.005)[0]:
                if select.select([handler.connection], [], [], 0)[0]:  # its end: a client asks once at a time
                    return None
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, ValueError, http.client.HTTPException):  # either side is gone
            return None
        finally:
            connection.close()
        return answer.status, json.loads(text) if text else None


class NativeFleet(Fleet):
    """Native servers, and the native engine in this process."""

    def __init__(self, model: Any, num_servers: int, directory: Path, *, takes_turns: bool = False) -> None:
        super().__init__(
            model, [FaultyNative(model, can_sleep=takes_turns) for _ in range(num_servers)], directory
        )
        self.alone = NativeEngine(model, max_num_seqs=4)
        self.alone.wake_up()
        self.parts.append(self.alone)

    def update(self, pool: EnginePool, version: int) -> None:
        with torch.no_grad():
            self.model.lm_head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(version))
        pool.update_weights(version)
        self.alone.update_weights(version)

    def check(self, drawn: Sequence[Completion], expected: Sequence[Completion]) -> None:
        """Log-probs are equal but for roundings: which sequences share a step depends on when they come."""
        for ours, theirs in zip(drawn, expected, strict=True):
            assert dataclasses.replace(ours, logprobs=theirs.logprobs) == theirs
            torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-4, rtol=0)


@pytest.fixture(name="make_fleet")
def fleets(monkeypatch, tmp_path) -> Iterator[MakeFleet]:
    monkeypatch.setenv("COLOCATE_SERVER_KEY", KEY)
    with fleets_of(partial(NativeFleet, make_model("qwen3")), monkeypatch, tmp_path) as make:
        yield make


def engine_hangs(front: Any, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The server goes on answering, and its engine does not."""
    front.server.hang(limit_s=0.5)
    send_json(handler, status, answer)


def engine_ends(front: Any, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
    """The server goes on answering without its engine's thread."""
    front.server.end_thread()
    send_json(handler, status, answer)


engine_hangs.is_loss = engine_ends.is_loss = True  # type: ignore[attr-defined]
NATIVE_FAULTS = [*FAULTS, engine_hangs, engine_ends]


def test_whatever_befalls_native_servers_no_completion_is_lost_doubled_or_mixed(make_fleet):
    check_schedules(make_fleet, 3, NATIVE_FAULTS)


@pytest.mark.slow
def test_two_hundred_schedules_of_faults_lose_nothing_of_native_servers(make_fleet):
    check_schedules(make_fleet, 200, NATIVE_FAULTS)


def test_a_server_with_nothing_to_do_has_lost_its_requests(make_fleet, monkeypatch, caplog):
    """What is between takes requests and passes none on: the server is well, and its steps stand still."""
    monkeypatch.setattr(watch_module, "FORGOTTEN_S", 1.0)
    fleet = make_fleet(2)
    pool = fleet.pool()
    fleet.update(pool, 0)
    swallowed, over = [], threading.Event()

    def swallow(front: Any, handler: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        swallowed.append(handler.path)
        over.wait(LIMIT_S)
        handler.close_connection = True

    swallow.is_instead = True  # type: ignore[attr-defined]
    fleet.fakes[0].faults[COMPLETIONS] = [swallow] * 20
    prompts, sampling = make_prompts([3, 5, 4], 2), SamplingParams(max_tokens=6, seed=3)
    try:
        fleet.check(pool.generate(prompts, sampling), fleet.alone.generate(prompts, sampling))
    finally:
        over.set()
        fleet.fakes[0].faults.clear()
    assert swallowed and f"{fleet.fakes[0].base_url} is lost" in caplog.text
    assert "has had nothing to do for 1 s, and stands at step" in caplog.text
