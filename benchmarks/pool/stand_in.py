"""A vLLM server without a model, in a process of its own: completions take as long as they are said to.

Messages about weights are answered by our real worker extension. Completions are made up: the `slots` that
decode at a time answer `seconds` after they have begun, and further requests wait, as in vLLM's queue.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


class EmptyModel:
    """Takes weights by vLLM's interface and keeps their names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, torch.zeros(1)) for name in self._names)

    def named_modules(self) -> Iterable[tuple[str, Any]]:
        yield "", self

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in tensors}


def install_vllm() -> None:
    """What the worker extension imports of vLLM."""
    reload = {
        "initialize_layerwise_reload": lambda model: None,
        "finalize_layerwise_reload": lambda model, config: None,
    }
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: contextlib.nullcontext()},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload,
    }
    for name, attributes in contents.items():
        sys.modules[name] = types.SimpleNamespace(**attributes)  # type: ignore[assignment]


def make_worker(about: dict[str, Any]) -> Any:
    """The worker extension on a model with the names and the shape that the trainer's has."""
    from colocate.rollout_server.vllm.weight_receiver import WeightReceiver

    shape = types.SimpleNamespace(**about["shape"])
    both = types.SimpleNamespace(
        hf_text_config=shape,
        logprobs_mode="processed_logprobs",
        dtype=torch.float32,
        generation_config="vllm",
        get_vocab_size=lambda: shape.vocab_size,
        quantization=None,
        data_parallel_size=1,
        enable_sleep_mode=False,
    )
    worker: Any = WeightReceiver()
    model = EmptyModel(about["names"])
    vars(worker).update(
        device=torch.device("cpu"),
        rank=0,
        vllm_config=types.SimpleNamespace(model_config=both, parallel_config=both),
        get_model=lambda: model,
    )
    return worker


class StandIn:
    """Answers one connection's requests one after the other, and all connections side by side."""

    def __init__(self, about: dict[str, Any], slots: int, seconds: float) -> None:
        self._worker = make_worker(about)
        self._max_len = about["max_len"]
        self._slots = asyncio.Semaphore(slots)
        self._seconds = seconds

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                _, target, _ = head.split(" ", 2)
                _, _, length = head.lower().partition("content-length:")
                content = await reader.readexactly(int(length.split("\r\n")[0] or 0) if length else 0)
                answer = await self._answer(target.partition("?")[0], json.loads(content or b"null"))
                body = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: Any) -> Any:
        if path == "/v1/completions":
            async with self._slots:
                await asyncio.sleep(self._seconds)
            choice = {
                "finish_reason": "length",
                "token_ids": [7] * body["max_tokens"],
                "logprobs": {"token_logprobs": [-1.0] * body["max_tokens"]},
            }
            return {"choices": [{"index": index, **choice} for index in range(body["n"])]}
        if path == "/collective_rpc":
            return {"results": [self._worker.colocate_receive(*body["args"])]}
        return {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "stand-in", "max_model_len": self._max_len}]},
            "/is_paused": {"is_paused": False},
        }.get(path, {"success": True})


async def serve(options: argparse.Namespace) -> None:
    about = json.loads(options.about.read_text())
    stand_in = StandIn(about, options.slots, options.seconds)
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", options.port, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--about", type=Path, required=True, help="names and shape of the trainer's model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    install_vllm()
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
