"""Engines of TensorRT-LLM for tests: over the stand-in, and over the real package on a GPU."""

from __future__ import annotations

import asyncio
import functools
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from engine_models import MAX_POSITION
from trtllm_stand_in import GPUS, NEWEST, installed

from colocate.engines.vllm.groups import TensorParallelGroup
from colocate.parallel.verdict import Peers
from colocate.weights.layouts import causal_lm
from colocate_trtllm.arguments import llm_arguments
from colocate_trtllm.engine import TRTLLMEngine
from colocate_trtllm.ray_server import Placement
from colocate_trtllm.server import Started, TRTLLMServer
from colocate_trtllm.shared_memory import CudaMemory

BUCKET_BYTES = 2**12
"""Less than the embedding of the tests' models has, so that it has a chunk of its own."""


# ── The trainer's side, without GPUs ─────────────────────────────────────────────────────────────────────


def rebuild(cls, size, stride, offset, storage_class, dtype, device, path, num_bytes, *_) -> torch.Tensor:
    """As `rebuild_cuda_tensor`: the seventh argument is the device, which the receiver must set."""
    assert isinstance(device, int), "the receiver has not said which device it is"
    with open(path, "r+b") as file:
        flat = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    whole = len(flat) // dtype.itemsize * dtype.itemsize
    return flat[:whole].view(dtype).as_strided(size, stride, offset)


class HostMemory:
    """Shared memory of the host as the device's: `SharedMemory` on the CPU."""

    def __init__(self, device: Any = None) -> None:
        self.gpu = GPUS[int(os.environ.get("LOCAL_RANK", "0"))]
        self.sizes: list[int] = []
        self._path, self._flat = "", None

    def buffer(self, num_bytes: int) -> torch.Tensor:
        if self._flat is not None and len(self._flat) >= num_bytes:
            return self._flat[:num_bytes]
        self.close()
        handle, self._path = tempfile.mkstemp(dir="/dev/shm")
        os.ftruncate(handle, num_bytes)
        self._flat = torch.frombuffer(mmap.mmap(handle, num_bytes), dtype=torch.uint8)
        os.close(handle)
        self.sizes.append(num_bytes)
        return self._flat

    def handle(self, view: torch.Tensor) -> Any:
        assert view.is_contiguous() and view.untyped_storage().data_ptr() == self._flat.data_ptr()
        arguments = (torch.Tensor, view.shape, view.stride(), view.storage_offset(), torch.UntypedStorage)
        return rebuild, (*arguments, view.dtype, None, self._path, len(self._flat), False, b"", 0, b"", False)

    def written(self) -> None: ...

    def close(self) -> None:
        if self._path:
            os.unlink(self._path)
        self._path, self._flat = "", None


class LocalServer:
    """A `TRTLLMServer` on an event loop in a thread of this process, called as the Ray actor is."""

    def __init__(self) -> None:
        self.inner = TRTLLMServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        coroutine = getattr(self.inner, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        if self._thread.is_alive():
            self.call("close")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


# ── Engines over the stand-in ────────────────────────────────────────────────────────────────────────────


class Watched(Peers):
    """One rank, which says when it waits for all."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__("cpu")  # type: ignore[arg-type]
        self._say = say

    def agree(self, error: Exception | None) -> None:
        self._say("barrier")
        super().agree(error)


class StandInEngine(TRTLLMEngine):
    """An engine over the stand-in of a release, which goes with it."""

    server: LocalServer
    memory: HostMemory
    events: list[str]

    def close(self) -> None:
        super().close()
        self._stack.close()

    @classmethod
    def make(cls, model: Any, *, release: str = NEWEST, bucket_bytes: int = BUCKET_BYTES) -> StandInEngine:
        with ExitStack() as stack:
            events = stack.enter_context(installed(release))
            server, memory = LocalServer(), HostMemory()
            stack.callback(server.close)
            started = start(server, model)
            engine = cls(
                model,
                server,
                started,
                max_len=MAX_POSITION,
                group=TensorParallelGroup(1),
                everyone=Watched(events.append),
                memory=memory,
                bucket_bytes=bucket_bytes,
            )
            engine.server, engine.memory, engine.events = server, memory, events
            engine._stack = stack.pop_all()
        return engine


def start(server: Any, model: Any, **options: Any) -> Started:
    """Start an engine for a model, with a bundle of one group."""
    return server.call("start", arguments_for(model, **options), Placement([None], [[0]], 0.5).arguments())


def arguments_for(model: Any, **options: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(max_len=MAX_POSITION, max_num_seqs=4, tensor_parallel_size=1)
    return llm_arguments(causal_lm(model), **sizes | options)


# ── The real package ─────────────────────────────────────────────────────────────────────────────────────


def make_real_engine(model: Any) -> TRTLLMEngine:
    """For tests marked `trtllm`: an engine beside this process on its GPU, in a cluster of its own."""
    from colocate_trtllm import ray_server

    arguments = arguments_for(model, engine_kwargs={"kv_cache_config": {"free_gpu_memory_fraction": 0.1}})
    server, started = ray_server.start(
        _place(), TensorParallelGroup(1), arguments, python=os.environ.get("TRTLLM_PYTHON")
    )
    engine = TRTLLMEngine(
        model,
        server,
        started,
        max_len=MAX_POSITION,
        group=TensorParallelGroup(1),
        everyone=Peers.all(model.device),
        memory=CudaMemory(model.device),
        bucket_bytes=BUCKET_BYTES,
    )
    engine.server = server  # type: ignore[attr-defined]
    return engine


@functools.cache
def _place() -> Any:
    """A cluster of this machine with a bundle of one GPU, of which a rank has a half."""
    import ray
    from ray.util.placement_group import placement_group

    from colocate.parallel.ray_cluster import RayPlace

    ray.init(num_gpus=1, include_dashboard=False, namespace="tests")
    assert placement_group([{"CPU": 2, "GPU": 1}], name="rank-0").wait(60)
    context = ray.get_runtime_context()
    return RayPlace(context.gcs_address, context.namespace, ("rank-0",), (1,), shares=2)
