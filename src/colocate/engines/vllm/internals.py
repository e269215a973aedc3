"""All uses of vLLM's internals, checked with vLLM 0.25 to 0.33.

Other modules use `vllm.LLM`, `vllm.SamplingParams` and `register_model_loader`, which are public.
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

from colocate.engines.vllm.environment import environment
from colocate.memory.timeline import PooledBytes
from colocate.parallel.launching import free_port

_kept_pools: list[Any] = []
"""Memory pools of engines that have ended; see `keep_pools`."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def max_model_len(llm: Any) -> int:
    """Tokens of the longest sequence that the engine accepts."""
    return llm.llm_engine.vllm_config.model_config.max_model_len


def kv_cache_bytes(llm: Any) -> int:
    """Bytes of this process's KV cache; 0 if vLLM does not show it."""

    def measure(worker: Any) -> int:
        storages: dict[int, int] = {}
        for cache in getattr(worker.model_runner, "kv_caches", ()):
            for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    return llm.collective_rpc(measure)[0]


def add_request(llm: Any, name: str, token_ids: Iterable[int], params: Any) -> None:
    """Let vLLM's engine schedule a request, whose output `step` returns once it is finished."""
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.FINAL_ONLY
    llm.llm_engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)


def step(llm: Any) -> list[tuple[str, Any]]:
    """Let vLLM's engine take one step: the names and outputs of the requests that it finishes."""
    return [(output.request_id, output) for output in llm.llm_engine.step() if output.finished]


def num_drawn_tokens(llm: Any) -> dict[str, int]:
    """The tokens that each request has so far which vLLM's engine has not finished; any thread may ask."""
    states = list(llm.llm_engine.output_processor.request_states.items())
    return {name: len(state.detokenizer.output_token_ids) for name, state in states}


def abort_requests(llm: Any, names: list[str]) -> None:
    """Take requests back from vLLM's engine."""
    if names:
        llm.llm_engine.abort_request(names)


def counts_freed_weights() -> bool:
    """Whether this vLLM counts weights that were freed while it loaded as memory that it still has.

    vLLM 0.25 does. It counts the device's memory in use, less PyTorch's reserved memory, as used by others.
    But when a tensor of its pools is freed, vLLM unmaps the memory, which PyTorch still counts as reserved.
    The difference is then too small by the freed weights, and vLLM makes its KV cache larger by them than
    `gpu_memory_utilization` allows.
    """
    from vllm.utils.mem_utils import MemoryProfilingResult

    return not hasattr(MemoryProfilingResult, "total_consumed")


def reload_weights(llm: Any, weights: Iterable[tuple[str, Tensor]], tied_head: Tensor | None) -> None:
    """Load weights into a model whose kernels read them in another form than a checkpoint has.

    vLLM unpacks each layer, loads it, and packs it into the tensors that kernels and graphs use.

    Args:
        tied_head: the embedding's weight if the model's head is tied to it. On a CPU a head in a module of
            its own has packed that weight a second time, so it must be sent a second time as the head's.
    """

    if tied_head is not None and llm.apply_model(has_packed_head)[0]:
        weights = itertools.chain(weights, [("lm_head.weight", tied_head)])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def has_packed_head(model: Any) -> bool:
    """Whether the head is another module than the embedding and has packed its weight."""
    head = getattr(model, "lm_head", None)
    is_embedding = any(head is module for name, module in model.named_modules() if name != "lm_head")
    return hasattr(head, "cpu_linear") and not is_embedding


def start_reload(worker: Any) -> None:
    """Unpack the model of a server's worker, so that `load_weights` can load weights in pieces.

    vLLM's own weight-transfer engines also do so. The model cannot run until `end_reload`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.get_model())


def load_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
    """Load some weights, named as in a checkpoint. Returns their names in vLLM's model, None if unknown."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return worker.get_model().load_weights(weights)


@torch.no_grad()
def end_reload(worker: Any) -> None:
    """Pack the weights loaded since `start_reload` into the tensors that kernels and graphs use."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)


def shut_down(llm: Any, *, owns_process_group: bool) -> None:
    """End an engine in this process, so that another can be started.

    Args:
        owns_process_group: vLLM has started `torch.distributed`'s default group, which therefore ends with
            vLLM. False: the run has started it, and it stays.
    """
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    def leave_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    with ExitStack() as stack:
        if not owns_process_group:
            # vLLM's shutdown destroys its own groups and then the default group, whoever has made that.
            destroy = parallel_state.destroy_distributed_environment
            parallel_state.destroy_distributed_environment = leave_world
            stack.callback(setattr, parallel_state, "destroy_distributed_environment", destroy)
        llm.llm_engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    # PyTorch frees the pool of all CUDA graphs with the last graph, and cannot capture into it then.
    type(current_platform)._global_graph_pool = None


def forget_workspaces() -> None:
    """Make PyTorch allocate cuBLAS's workspace again.

    PyTorch allocates it at a thread's first product on a stream, and uses it for all later products, also the
    trainer's. If the first product was computed while vLLM loaded, the workspace lies in a pool of vLLM's,
    whose memory is gone when vLLM sleeps.
    """
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()


def pooled_bytes() -> PooledBytes:
    """The memory of vLLM's pools that PyTorch's allocator counts, also while it sleeps and after it ended."""
    from vllm.device_allocator.cumem import CuMemAllocator

    # For each tag a pair of pool and allocator; later versions of vLLM have a list of such pairs.
    tags = [*CuMemAllocator.get_instance().allocator_and_pools.values(), *_kept_pools]
    pairs = itertools.chain.from_iterable(pairs if isinstance(pairs, list) else [pairs] for pairs in tags)
    segments = [segment for pool, _ in pairs for segment in pool.snapshot()]
    return PooledBytes(
        sum(segment["allocated_size"] for segment in segments),
        sum(segment["total_size"] for segment in segments),
    )


def unmapped_bytes() -> int:
    """Bytes of device memory that vLLM maps again when it wakes up, for weights and KV cache together."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.is_asleep)


def keep_pools() -> None:
    """Keep vLLM's memory pools for the rest of the process, also after vLLM shuts down.

    When a pool is dropped, PyTorch frees its segments through the pool's allocator. That fails if tensors
    outlive the pool, because the allocator is gone by then, and vLLM has already freed some segments itself.
    So the pools stay. After `free_pools` they are addresses without memory.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if (allocator := CuMemAllocator.instance) is not None:
        _kept_pools.extend(allocator.allocator_and_pools.values())
        allocator.allocator_and_pools.clear()
        # One reference more keeps them also while the interpreter ends and takes this module apart.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept_pools))


def free_pools() -> None:
    """Give the memory behind vLLM's pools back to the device. Their tensors must not be used any more."""
    from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    _ROPE_DICT.clear()  # otherwise the next engine would use the rotary tables in it
    if (allocator := CuMemAllocator.instance) is not None:
        torch.cuda.synchronize()
        for data in allocator.pointer_to_data.values():
            if not data.is_asleep:
                unmap_and_release(data.handle)
        allocator.pointer_to_data.clear()


@contextmanager
def reserve_kept() -> Iterator[None]:
    """Keep vLLM from emptying PyTorch's cache of memory, and from collecting garbage, for a block.

    vLLM does both when it sleeps and wakes up. But the memory that it maps and unmaps is not in that cache,
    and the trainer would have to allocate its own again in every step.
    """

    def nothing(*_: Any, **__: Any) -> None: ...

    with ExitStack() as stack:
        emptying = (gc, "collect"), (torch.cuda, "empty_cache"), (torch.accelerator, "empty_cache")
        for module, name in emptying:
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, nothing)
        yield


@contextmanager
def launched(device: torch.device) -> Iterator[None]:
    """Set the environment variables that vLLM's external launcher reads, for the length of vLLM's start.

    A launcher such as torchrun has set them already. In a process without a launcher they are removed again:
    whatever reads them later would take the process for a part of a run of several processes.
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
def own_process_group(device: torch.device) -> Iterator[bool]:
    """Start `torch.distributed`'s default group for vLLM where no launcher has started this process and the
    run has no group; yields whether vLLM owns the group. vLLM itself would start it with a store of PyTorch's
    that listens on every address, for nobody."""
    is_vllms = not dist.is_initialized()
    if is_vllms and "RANK" not in os.environ:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield is_vllms
    except BaseException:
        if is_vllms and dist.is_initialized():
            dist.destroy_process_group()
        raise


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Put the global random states back after a block: vLLM seeds all of them and samples from some."""
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
    """Put back the settings of the process that vLLM changes when it starts.

    They are the precision of float32 products, the number of threads, on a CPU the function
    `torch.set_num_threads` itself, and Triton's hooks. With vLLM's hooks every kernel that the trainer
    compiles later would cause a warning, as if it were an error.
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
    """Turn expandable segments of PyTorch's CUDA allocator off for a block, in which vLLM fills its pools.

    vLLM's sleep maps and unmaps the segments of its pools, so each segment must be one allocation. Some
    versions of vLLM turn expandable segments off themselves, others refuse to start. All other settings must
    stay. The allocator resets each setting that a new string leaves out, so the whole string is written, and
    written again afterwards.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            before = _allocator_settings()
            if expands_segments():
                torch._C._accelerator_setAllocatorSettings(_with_expansion(before, False))
                stack.callback(torch._C._accelerator_setAllocatorSettings, _with_expansion(before, True))
            set_by_user = [name for name in _ALLOCATOR_VARIABLES if name in os.environ]
            plain = {name: _with_expansion(os.environ[name], False) for name in set_by_user}
            stack.enter_context(environment(plain))
        yield


def expands_segments() -> bool:
    """Whether PyTorch's allocator on CUDA has expandable segments now."""
    # The allocator's state, not the strings that set it: there are several ways to set it.
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def _allocator_settings() -> str:
    get_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get_settings is not None:
        return get_settings()
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _with_expansion(settings: str, is_on: bool) -> str:
    fields = [field for field in map(str.strip, settings.split(",")) if field]
    others = [field for field in fields if not field.startswith("expandable_segments")]
    return ",".join([*others, f"expandable_segments:{is_on}"])
