"""Servers that fail on purpose: a scripted one on a raw socket, and one that is like vLLM's otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import select
import socket
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch
from engine_models import make_model
from faulty_front import FaultyFront

from colocate.http.key import ServerKey
from colocate.http.messages import Message
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.vllm.gate import VLLMGate
from colocate.rollout_server.vllm.weight_receiver import WeightReceiver

# ── One answer after another, byte by byte ───────────────────────────────────────────────────────────────


def http_response(status: int, content: bytes, *, length: int | None = None) -> bytes:
    """An answer; `length` is what its header claims."""
    claimed = len(content) if length is None else length
    return f"HTTP/1.1 {status} X\r\nContent-Length: {claimed}\r\n\r\n".encode() + content


class ScriptedServer:
    """Answers the i-th request with the i-th of `answers`: bytes, or a function of the connection.

    Afterwards, or after an answer of None, the connection is closed; else it is kept for the next request.
    """

    def __init__(self, answers: Iterable[bytes | Callable[[socket.socket], None] | None]) -> None:
        self._answers = list(answers)
        self.num_requests = self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received: list[bytes] = []
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while self._read_request(connection):
                with self._lock:
                    answer = self._answers[min(self.num_requests, len(self._answers) - 1)]
                    self.num_requests += 1
                if answer is None:
                    return
                if callable(answer):
                    answer(connection)
                    return
                connection.sendall(answer)
                if _claimed_length(answer) != len(answer.split(b"\r\n\r\n", 1)[1]):
                    return

    def _read_request(self, connection: socket.socket) -> bool:
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(65536)
            if not part:
                return False
            received += part
        head, content = received.split(b"\r\n\r\n", 1)
        while len(content) < _claimed_length(head + b"\r\n\r\n"):
            content += connection.recv(65536)
        self.received.append(head + b"\r\n\r\n" + content)
        return True


def _claimed_length(message: bytes) -> int:
    head = message.split(b"\r\n\r\n", 1)[0].lower()
    _, _, rest = head.partition(b"content-length:")
    return int(rest.split(b"\r\n")[0]) if rest else 0


def trickle(head: bytes) -> Callable[[socket.socket], None]:
    """Sends `head`, then a byte every 50 ms without end."""

    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    return send


def say_nothing(connection: socket.socket) -> None:
    connection.recv(1)


# ── Like vLLM ────────────────────────────────────────────────────────────────────────────────────────────


class FakeModel:
    """Loads weights as vLLM's models do and remembers what it loaded how often."""

    def __init__(self, names: Iterable[str]) -> None:
        self.weights: dict[str, torch.Tensor] = {name: torch.zeros(1) for name in names}
        self.num_loads: dict[str, int] = {}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield "", self

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = {name: tensor.clone() for name, tensor in tensors}
        self.weights |= loaded
        for name in loaded:
            self.num_loads[name] = self.num_loads.get(name, 0) + 1
        return set(loaded)

    def checksum(self) -> int:
        return zlib.crc32(b"".join(self.weights[name].numpy().tobytes() for name in sorted(self.weights)))


KEY = "the-key-of-a-fake-server"


def install_fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker extension imports of vLLM, and the key of server and trainer."""
    monkeypatch.setenv("COLOCATE_SERVER_KEY", KEY)
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: contextlib.nullcontext()},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
    }
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**contents))


class FakeVLLM(FaultyFront):
    """vLLM's routes around our real worker extension, behind our real gate.

    Completions are a function of prompt, seed and loaded weights. `draw` is called with each request for
    completions, and they are sent once it returns True; `given_up` has those whose client did not wait for
    that.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.names = [name for name, _ in model.named_parameters()]
        self.settings: dict[str, Any] = {}
        self.version = "0.32.0"
        self.reached: list[str] = []
        self.draw: Callable[[dict[str, Any]], bool] = lambda body: True
        self.given_up: list[dict[str, Any]] = []
        self.is_paused = False
        self.awake = {"weights", "kv_cache"}
        """What it has memory for."""
        self.num_prefix_cache_resets = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.restart()
        super().__init__()

    def restart(self) -> None:
        self.gate = VLLMGate(self._app)
        self.loaded = FakeModel(self.names)
        config = self.config.get_text_config()
        model_config = {
            "hf_text_config": config,
            "logprobs_mode": "processed_logprobs",
            "dtype": torch.float32,
            "generation_config": "vllm",
            "get_vocab_size": lambda: config.vocab_size,
            "quantization": None,
            "data_parallel_size": 1,
            "enable_sleep_mode": False,
            **self.settings,
        }
        both = types.SimpleNamespace(**model_config)
        self.vllm_config = types.SimpleNamespace(model_config=both, parallel_config=both)
        self.worker: Any = WeightReceiver()
        vars(self.worker).update(
            device=torch.device("cpu"), rank=0, vllm_config=self.vllm_config, get_model=self._model_in_memory
        )
        self.is_paused, self.awake = False, {"weights", "kv_cache"}

    def become_another(self) -> None:
        self.config = copy.deepcopy(self.config)
        self.config.get_text_config().num_hidden_layers += 1
        self.restart()

    def close(self) -> None:
        super().close()
        asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _model_in_memory(self) -> FakeModel:
        assert "weights" in self.awake, "weights are read or written where there is no memory"
        return self.loaded

    async def _cancel_tasks(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def message(self, do: str, run_id: str = "somebody", **arguments: Any) -> dict[str, Any]:
        """What the worker answers to a message of the key's owner."""
        message = Message(ServerKey(KEY, "a test"), {"do": do, "run": {"id": run_id}, **arguments})
        return message.opened(self.worker.colocate_receive(*message.call(1)["args"]))

    def ask(self, handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, Any] | None:
        status, answer = asyncio.run_coroutine_threadsafe(
            self._ask_gate(handler, content), self._loop
        ).result()
        is_drawn = (
            handler.path != "/v1/completions" or status != 200 or self._drawn(handler, json.loads(content))
        )
        return (status, answer) if is_drawn else None

    def _drawn(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        """Wait until `draw` has what is asked for. Returns whether the client has waited, too."""
        while not self.draw(body):
            if select.select([handler.connection], [], [], 0.005)[0]:  # its end: a client asks once at a time
                self.given_up.append(body)
                return False
        return True

    async def _ask_gate(self, handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, Any]:
        """What the gate, and behind it `_app`, answer to a request."""
        path, _, query = handler.path.partition("?")
        scope = {
            "type": "http",
            "method": handler.command,
            "path": path,
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in handler.headers.items()],
            "client": handler.client_address,
            "server": handler.connection.getsockname(),
            "app": types.SimpleNamespace(state=types.SimpleNamespace(vllm_config=self.vllm_config)),
        }
        status, parts = 0, []

        given = iter([{"type": "http.request", "body": content}])

        async def receive() -> dict[str, Any]:
            return next(given, None) or await asyncio.Event().wait()  # no more than the body ever comes

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self.gate(scope, receive, send)
        return status, json.loads(b"".join(parts) or b"null")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        content = (await receive())["body"]
        with self._lock:
            self.reached.append(scope["path"])
            if scope["path"] in ("/sleep", "/wake_up"):
                status, answer = self._take_turns(scope["path"], scope["query_string"].decode())
            else:
                status, answer = self._do(scope["path"], json.loads(content) if content else None)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _take_turns(self, path: str, query: str) -> tuple[int, Any]:
        if path == "/sleep":
            assert query == "level=2" and self.vllm_config.model_config.enable_sleep_mode
            self.awake, self.loaded = set(), FakeModel(self.names)
        else:
            self.awake.add(query.removeprefix("tags="))
        self.is_paused = self.awake != {"weights", "kv_cache"}
        return 200, {"status": "sleeping" if self.is_paused else "awake"}

    def _do(self, path: str, body: Any) -> tuple[int, Any]:
        states = {
            "/health": None,
            "/version": {"version": self.version},
            "/v1/models": {"data": [{"id": "served", "max_model_len": self.config.max_position_embeddings}]},
            "/is_paused": {"is_paused": self.is_paused},
        }
        if path in states:
            return 200, states[path]
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
            return 200, {"status": "paused" if self.is_paused else "resumed"}
        if path == "/reset_prefix_cache":
            self.num_prefix_cache_resets += 1
            return 200, {"success": True}
        if path == "/collective_rpc":
            return 200, {"results": [self.worker.colocate_receive(*body["args"])]}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if self.is_paused:
            return 503, {"error": {"message": "paused"}}
        return 200, {"choices": [self._choice(body, i) for i in range(body["n"])]}

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        # Greedy completions do not depend on the seed.
        seed = body["seed"] + index if body["temperature"] else 0
        rng = random.Random(f"{body['prompt']},{seed},{self.loaded.checksum()}")
        token_ids: list[int] = []
        while len(token_ids) < body["max_tokens"] and not set(token_ids) & set(body["stop_token_ids"]):
            token_ids.append(rng.randrange(self.config.vocab_size))
        stopped = bool(set(token_ids) & set(body["stop_token_ids"]))
        return {
            "index": index,
            "text": "",
            "finish_reason": "stop" if stopped else "length",
            "token_ids": token_ids,
            "logprobs": {"token_logprobs": [-rng.random() for _ in token_ids]},
        }


BUCKET_BYTES = 20_000  # several chunks for the tiny model


@pytest.fixture(scope="module", name="model")
def served_model() -> Any:
    return make_model("qwen3")


@pytest.fixture(name="fake")
def fake_vllm(model, monkeypatch) -> Iterator[FakeVLLM]:
    install_fake_vllm(monkeypatch)
    server = FakeVLLM(model)
    yield server
    server.close()


@pytest.fixture(name="make_engine")
def engines_of_fake(model, fake, tmp_path) -> Iterator[Callable[..., RolloutServerEngine]]:
    """Makes engines of `fake`, awake, whose pushes are of several chunks and whose time-outs are short."""
    engines = []
    directory = tmp_path / "pushed"
    directory.mkdir()

    def make(**options: Any) -> RolloutServerEngine:
        timeouts = {"server_timeout_s": 2, "push_timeout_s": 10, "request_timeout_s": 10}
        pushes = {"bucket_bytes": BUCKET_BYTES, "directory": str(directory)}
        engine = RolloutServerEngine(model, base_url=fake.base_url, **{**timeouts, **pushes, **options})
        engine._client._first_delay_s = 0.001
        engine.wake_up()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    assert list(directory.iterdir()) == [], "pushed files must not stay behind"
