"""What this package takes from inside vLLM, in one place. Holds for 0.25 to 0.33.

Everything else goes through `vllm.LLM`, `vllm.SamplingParams` and `register_model_loader`, which are public.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from colocate.engines.vllm.environment import environment, free_port
from colocate.memory.timeline import PooledBytes

_kept_pools: list[Any] = []
"""Those of engines that have ended, see `keep_pools`."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def max_model_len(llm: Any) -> int:
    """Tokens of the longest sequence that the engine accepts."""
    return llm.llm_engine.vllm_config.model_config.max_model_len


def kv_cache_bytes(llm: Any) -> int:
    """Memory of this process's KV cache; 0 if vLLM does not show it."""

    def measure(worker: Any) -> int:
        storages: dict[int, int] = {}
        for cache in getattr(worker.model_runner, "kv_caches", ()):
            for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    return llm.collective_rpc(measure)[0]


def counts_freed_weights() -> bool:
    """Whether this vLLM takes weights freed while it loads for memory that it still has (0.25 does).

    It subtracts what PyTorch has reserved from what the device has in use. Behind PyTorch's back it gives
    back the freed segments of its pools, so that the difference, which is what others have taken, comes out
    too small by them, and the KV cache larger than `gpu_memory_utilization` allows.
    """
    from vllm.utils.mem_utils import MemoryProfilingResult

    return not hasattr(MemoryProfilingResult, "total_consumed")


def reload_weights(llm: Any, weights: Iterable[tuple[str, Tensor]], tied_head: Tensor | None) -> None:
    """Load weights into a model whose kernels read them in another form than the checkpoint's.

    vLLM unpacks layer by layer, loads, and packs into the tensors that are in use.

    Args:
        tied_head: the embedding's weight where the model's head is tied to it. On a CPU a head that is a
            module of its own has packed it a second time, and needs it under its own name.
    """

    if tied_head is not None and llm.apply_model(has_packed_head)[0]:
        weights = itertools.chain(weights, [("lm_head.weight", tied_head)])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def has_packed_head(model: Any) -> bool:
    """Whether the head is a module apart from the embedding that has packed its weight."""
    head = getattr(model, "lm_head", None)
    is_embedding = any(head is module for name, module in model.named_modules() if name != "lm_head")
    return hasattr(head, "cpu_linear") and not is_embedding


def start_reload(worker: Any) -> None:
    """Unpack a worker's model, in the server's process, for weights that `load_weights` brings in pieces.

    vLLM's own weight-transfer engines load like this, too. Until `end_reload` the model cannot run.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.get_model())


def load_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
    """Load some of the weights in a checkpoint's names; the names in vLLM's model, if it tells them."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return worker.get_model().load_weights(weights)


@torch.no_grad()
def end_reload(worker: Any) -> None:
    """Pack what was loaded since `start_reload` into the tensors that are in use."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)


def shut_down(llm: Any, *, owns_process_group: bool) -> None:
    """End an engine in this process, so that another can be started.

    Args:
        owns_process_group: vLLM started `torch.distributed`'s default group, so it ends with it. Otherwise it
            is the run's, and stays.
    """
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    def leave_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    with ExitStack() as stack:
        if not owns_process_group:
            # As it shuts down, vLLM destroys the default group after its own, whoever has made it.
            destroy = parallel_state.destroy_distributed_environment
            parallel_state.destroy_distributed_environment = leave_world
            stack.callback(setattr, parallel_state, "destroy_distributed_environment", destroy)
        llm.llm_engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    # The pool of all CUDA graphs dies with the last of them, and PyTorch refuses to capture into a dead one.
    type(current_platform)._global_graph_pool = None


def forget_workspaces() -> None:
    """Let PyTorch allocate cuBLAS's workspace anew.

    It does so at a thread's first product on a stream, and keeps it for all that follow, the trainer's too.
    If the first was vLLM's as it loaded, or merged an adapter for it, the workspace lies in a pool that sleep
    empties.
    """
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()


def pooled_bytes() -> PooledBytes:
    """What PyTorch's allocator counts of the pools of vLLM's sleep, asleep or not; former engines' too."""
    from vllm.device_allocator.cumem import CuMemAllocator

    # One pool and its allocator of each tag; later versions have a list of such pairs.
    tags = [*CuMemAllocator.get_instance().allocator_and_pools.values(), *_kept_pools]
    pairs = itertools.chain.from_iterable(pairs if isinstance(pairs, list) else [pairs] for pairs in tags)
    segments = [segment for pool, _ in pairs for segment in pool.snapshot()]
    return PooledBytes(
        sum(segment["allocated_size"] for segment in segments),
        sum(segment["total_size"] for segment in segments),
    )


def unmapped_bytes() -> int:
    """Device memory that vLLM's waking up maps again, all tags together."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.is_asleep)


def keep_pools() -> None:
    """Keep the pools of vLLM's sleep from being dropped when it shuts down, for ever.

    PyTorch gives a dropped pool's segments back through an allocator that is gone by then where tensors
    outlive the pool, and vLLM has already given back some of them itself. So the pools stay, empty: addresses
    without memory, once `free_pools` was called.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if (allocator := CuMemAllocator.instance) is not None:
        _kept_pools.extend(allocator.allocator_and_pools.values())
        allocator.allocator_and_pools.clear()
        # Not even when the interpreter ends, and with it this module.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept_pools))


def free_pools() -> None:
    """Give the memory behind the pools of vLLM's sleep back. Nothing may use their tensors any more."""
    from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    _ROPE_DICT.clear()  # the next engine would take its rotary angles from there
    if (allocator := CuMemAllocator.instance) is not None:
        torch.cuda.synchronize()
        for data in allocator.pointer_to_data.values():
            if not data.is_asleep:
                unmap_and_release(data.handle)
        allocator.pointer_to_data.clear()


@contextmanager
def reserve_kept() -> Iterator[None]:
    """Keep vLLM from emptying PyTorch's reserve, and collecting garbage for it, as it sleeps and wakes up.

    What it maps and unmaps is not in there. The trainer would have to allocate its own anew in every step.
    """

    def nothing(*_: Any, **__: Any) -> None: ...

    with ExitStack() as stack:
        for module, name in (
            (gc, "collect"),
            (torch.cuda, "empty_cache"),
            (torch.accelerator, "empty_cache"),
        ):
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, nothing)
        yield


@contextmanager
def launched(device: torch.device) -> Iterator[None]:
    """The environment that vLLM's external launcher reads, for as long as it starts.

    A launcher such as torchrun has set it. Of a single process without one nothing may stay behind: what is
    started later would take it for a run of several processes.
    """
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "RANK" not in os.environ:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        local = device.index if device.index is not None else rank
        settings |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local)}
    if "LOCAL_RANK" not in os.environ:
        settings.setdefault("LOCAL_RANK", str(device.index or 0))
    if "MASTER_ADDR" not in os.environ:
        settings["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in os.environ:
        settings["MASTER_PORT"] = str(free_port())
    with environment(settings):
        yield


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Leave the global random states as they were. vLLM seeds them all, and draws from some as it samples."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """Put back what vLLM sets for the whole process while it starts: the trainer had chosen otherwise.

    Those are the precision of float32 products, the number of threads, on a CPU `torch.set_num_threads`
    itself, and Triton's hooks: vLLM would warn of each kernel that the trainer compiles as of a fault.
    """
    precision, num_threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    try:
        from triton import knobs
    except ImportError:
        knobs = None
    else:
        hook, prints = knobs.runtime.jit_post_compile_hook, knobs.autotuning.print
    try:
        yield
    finally:
        if knobs is not None:
            knobs.runtime.jit_post_compile_hook, knobs.autotuning.print = hook, prints
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


@contextmanager
def plain_segments(device: torch.device) -> Iterator[None]:
    """PyTorch's allocator without expandable segments, on CUDA, while vLLM fills its pools.

    vLLM's sleep maps and unmaps the segments of its pools, which must be allocations of their own. Some
    versions see to that themselves, others refuse to start. All other settings stay: the allocator takes
    what a new string leaves out for its default, so the whole string is written, and written back.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            before = _allocator_settings()
            if expands_segments():
                torch._C._accelerator_setAllocatorSettings(_with_expansion(before, False))
                stack.callback(torch._C._accelerator_setAllocatorSettings, _with_expansion(before, True))
            set_by_user = {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ}
            stack.enter_context(
                environment({name: _with_expansion(value, False) for name, value in set_by_user.items()})
            )
        yield


def expands_segments() -> bool:
    """Whether PyTorch's allocator on CUDA has expandable segments now."""
    # The strings that it was given may not tell: there are several ways to set it.
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def _allocator_settings() -> str:
    get_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get_settings is not None:
        return get_settings()
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _fields(settings: str) -> list[str]:
    return [field.strip() for field in settings.split(",") if field.strip()]


def _with_expansion(settings: str, is_on: bool) -> str:
    others = [field for field in _fields(settings) if not field.startswith("expandable_segments")]
    return ",".join([*others, f"expandable_segments:{is_on}"])
