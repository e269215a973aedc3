"""Engines of TensorRT-LLM for tests: over the stand-in, and over the real package on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from engine_models import MAX_POSITION
from trtllm_stand_in import NEWEST, HostMemory, LocalServer, installed

from colocate.engines.trtllm.arguments import llm_arguments
from colocate.engines.trtllm.chunks import CudaMemory
from colocate.engines.trtllm.engine import TRTLLMEngine
from colocate.engines.trtllm.placement import Placement
from colocate.engines.trtllm.server import Started
from colocate.engines.vllm.groups import TensorParallelGroup
from colocate.parallel.verdict import Peers
from colocate.weights.layouts import causal_lm

BUCKET_BYTES = 2**12
"""Less than the embedding of the tests' models has, so that it is split."""


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
    from colocate.engines.trtllm import ray_server

    arguments = arguments_for(model, engine_kwargs={"kv_cache_config": {"free_gpu_memory_fraction": 0.1}})
    server, started = ray_server.start(_place(), TensorParallelGroup(1), arguments, python=None)
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

    from colocate.parallel.ray_place import RayPlace

    ray.init(num_gpus=1, include_dashboard=False, namespace="tests")
    assert placement_group([{"CPU": 2, "GPU": 1}], name="rank-0").wait(60)
    context = ray.get_runtime_context()
    return RayPlace(context.gcs_address, context.namespace, ("rank-0",), (1,), shares=2)
