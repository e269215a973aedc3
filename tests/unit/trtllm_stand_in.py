"""A stand-in of TensorRT-LLM with its releases' signatures, which generates with transformers on the CPU.

Two releases: "1.4.0rc1", the newest whose interface is published, and "1.2.1", the newest on the package
index, which lacks the weight loader's hooks, `SleepConfig`, `LogprobMode` and `pause_generation`. Copied are
names, arguments, the order of calls and errors, from these files of NVIDIA/TensorRT-LLM, in `tensorrt_llm/`:

    _torch/async_llm.py                AsyncLLM
    llmapi/llm_args.py                 RayPlacementConfig, SleepConfig, ExecutorMemoryType, KvCacheConfig
    llmapi/rlhf_utils.py               WorkerExtension (two revisions)
    executor/ray/gpu_worker.py         how the extension is mixed into a worker, sleep, wakeup
    executor/ray/utils.py              control_action_decorator
    executor/result.py                 GenerationResult, CompletionOutput, Logprob
    sampling_params.py                 SamplingParams, LogprobMode
    _torch/pyexecutor/model_loader.py  reload and its hooks

The interface of 1.2.1 was not read from its own source: it is the newest one without what was added later.
The arithmetic is transformers': `AutoModelForCausalLM` of the configuration at `model`, with the weights that
were pushed, and its logits processors. Memory that was given back and taken again has other contents, unless
its restore mode says that they are kept. `sys.modules` has the stand-in while `installed` lasts.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

NEWEST, OLDEST = "1.4.0rc1", "1.2.1"
GPUS = tuple(f"GPU-{uuid.UUID(int=number)}" for number in range(8))
LOG = "COLOCATE_TEST_TRTLLM_LOG"
"""The variable with a file that events are appended to, by several processes."""

# ── llm_args.py, sampling_params.py ──────────────────────────────────────────────────────────────────────


class ExecutorMemoryType(StrEnum):
    SAMPLER = "sampler"
    DRAFTER = "drafter"
    GUIDED_DECODER = "guided_decoder"
    SPEC_RESOURCES = "spec_resource_manager"
    INIT_KV_CACHE = "_no_capture_init_kv_cache"
    INIT_EXTRA_RESOURCES = "_no_capture_init_extra_resources"
    MODEL_EXTRA = "model_extra"
    EXTRA_RESOURCES = "executor_extra"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_ENGINE_DRAFT = "draft_model"
    MODEL_WEIGHTS_MAIN = "model_weights"
    MODEL_WEIGHTS_DRAFT = "draft_model_weights"


ExecutorMemoryTypeOf121 = StrEnum(
    "ExecutorMemoryType",
    {kind.name: kind.value for kind in ExecutorMemoryType if not kind.name.startswith("MODEL_WEIGHTS")},
)


class SleepConfig:
    def __init__(self, *, restore_modes: dict[ExecutorMemoryType, str]) -> None:
        assert set(restore_modes.values()) <= {"NONE", "MEMSET", "CPU", "PINNED"}
        self.restore_modes = {ExecutorMemoryType(kind): mode for kind, mode in restore_modes.items()}


class KvCacheConfig:
    def __init__(
        self,
        *,
        enable_block_reuse: bool = True,
        max_tokens: int | None = None,
        free_gpu_memory_fraction: float = 0.9,
        host_cache_size: int | None = None,
        tokens_per_block: int = 32,
    ) -> None:
        assert enable_block_reuse in (True, False) and 0 < free_gpu_memory_fraction <= 1


class RayPlacementConfig:
    def __init__(
        self, *, defer_workers_init, placement_groups, placement_bundle_indices, per_worker_gpu_share
    ):
        if (placement_groups is None) != (placement_bundle_indices is None):
            raise ValueError("placement_groups and placement_bundle_indices must be provided together")
        if placement_groups is not None and len(placement_groups) != len(placement_bundle_indices):
            raise ValueError("placement_groups and placement_bundle_indices must have the same length")
        if per_worker_gpu_share is not None and not 0 < per_worker_gpu_share <= 1.0:
            raise ValueError("per_worker_gpu_share must be between 0 and 1.0")
        self.bundles = [bundle for bundles in placement_bundle_indices or [] for bundle in bundles]


class LogprobMode(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


@dataclass(slots=True, kw_only=True)
class SamplingParamsOf121:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    detokenize: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.top_k in (None, 1) and self.top_p in (None, 0.0)


@dataclass(slots=True, kw_only=True)
class SamplingParams(SamplingParamsOf121):
    logprobs_mode: LogprobMode = LogprobMode.RAW


_ARGUMENTS = frozenset(
    (
        *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "dtype"),
        *("tensor_parallel_size", "revision", "tokenizer_revision", "load_format", "backend"),
        *("max_batch_size", "max_seq_len", "max_input_len", "max_num_tokens", "kv_cache_config"),
        "enable_chunked_prefill",
    )
)
"""Those of `TorchLlmArgs` that the tests meet; an unknown one is refused there, too."""

# ── result.py ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


class RequestOutput:
    """Awaitable; `abort` ends it with what there is."""

    def __init__(self, llm: AsyncLLM, token_ids: list[int], params: Any) -> None:
        self.outputs = [CompletionOutput(0)]
        self._is_aborted = False
        self._done = asyncio.ensure_future(self._run(llm, token_ids, params))

    def abort(self) -> None:
        self._is_aborted = True

    def __await__(self):
        return self._done.__await__()

    async def _run(self, llm: AsyncLLM, token_ids: list[int], params: Any) -> RequestOutput:
        output = self.outputs[0]
        await asyncio.sleep(0)
        for token, told in llm._draws(token_ids, params):
            output.token_ids.append(token)
            if self._is_aborted:
                output.finish_reason = "cancelled"  # the log-prob of the last token has not come
                break
            output.logprobs.append(told)
            if token in (params.stop_token_ids or ()) or token == params.end_id:
                output.finish_reason = "stop"
                if not params.include_stop_str_in_output:
                    output.token_ids.pop()
                break
            await asyncio.sleep(0)  # the others' turn: all are decoded in flight
        else:
            output.finish_reason = "length"
        llm._running.discard(self)
        return self


# ── rlhf_utils.py, model_loader.py ───────────────────────────────────────────────────────────────────────


def control_action_decorator(method: Any) -> Any:
    @functools.wraps(method)
    def drained(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not self.engine.running(), "the engine waits for its requests, which nobody gave up"
        return method(self, *args, **kwargs)

    return drained


class WorkerExtension:
    engine: Any
    device_id: int

    @control_action_decorator
    def update_weights(self, ipc_handles: dict | None = None) -> None:
        model_engine = self.engine.model_engine
        loader, model = model_engine.model_loader, model_engine.model
        has_hooks = hasattr(loader, "begin_update_weights")
        try:
            if not hasattr(model, "first_pre_reload_weights"):
                if has_hooks:
                    loader.begin_update_weights()
                model.first_pre_reload_weights = True
            if ipc_handles is None:
                if has_hooks:
                    loader.finalize_update_weights()
                self.engine.log("finalize")
                self.engine.reset_prefix_cache()
                del model.first_pre_reload_weights
                return
            gpu = get_device_uuid(self.device_id)
            if gpu not in ipc_handles:
                raise ValueError(f"Device UUID {gpu} not found in ipc_handles")
            assert isinstance(ipc_handles[gpu], list)
            weights = {}
            for name, (rebuild, args) in ipc_handles[gpu]:
                args = list(args)
                args[6] = self.device_id
                weights[name] = rebuild(*args)
            loader.reload(model, weights, allow_partial_loading=True)
        except Exception:
            if has_hooks:
                loader.abort_update_weights()
                if hasattr(model, "first_pre_reload_weights"):
                    del model.first_pre_reload_weights
            raise


class ModelLoader:
    """Copies weights by their names into a model of transformers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reload(
        self, model: Any, weights: dict[str, torch.Tensor], allow_partial_loading: bool = False
    ) -> None:
        assert allow_partial_loading
        assert self._engine.held >= WEIGHTS, "there is no memory for weights"
        own = dict(model.named_parameters())
        for number, (name, tensor) in enumerate(weights.items()):
            if self._engine.fail_at is not None and self._engine.num_loaded + number == self._engine.fail_at:
                raise RuntimeError(f"injected: {name} could not be loaded")
            with torch.no_grad():
                own[name].copy_(tensor)
            self._engine.sizes.append((name, tensor.nbytes))
        self._engine.num_loaded += len(weights)


class ModelLoaderWithHooks(ModelLoader):
    is_open = False

    def begin_update_weights(self) -> None:
        assert not self.is_open, "an update is under way"
        self.is_open = True
        self._engine.log("begin")

    def finalize_update_weights(self) -> None:
        self.is_open = False

    def abort_update_weights(self) -> None:
        self.is_open = False
        self._engine.log("abort")


# ── gpu_worker.py ────────────────────────────────────────────────────────────────────────────────────────

WEIGHTS = frozenset({"model"})
NEVER_GIVEN_BACK = frozenset(kind.value for kind in ExecutorMemoryType if kind.value.startswith("_"))


class Engine:
    """A worker's part of the engine: its copy of the model, and which memory it holds."""

    def __init__(self, llm: AsyncLLM, model_dir: str, *, has_hooks: bool) -> None:
        config = AutoConfig.from_pretrained(model_dir)
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(config).eval()
        loader = (ModelLoaderWithHooks if has_hooks else ModelLoader)(self)
        self.model_engine = SimpleNamespace(model=model, model_loader=loader)
        self.llm, self.log = llm, llm._log
        self.held = frozenset(llm._memory_kinds) - NEVER_GIVEN_BACK
        self.prefixes: dict[tuple[int, ...], torch.Tensor] = {}
        """What the KV cache of each prompt leads to: logits [1, V], of weights that may be old."""
        self.sizes: list[tuple[str, int]] = []
        self.num_loaded, self.fail_at = 0, None
        self.spoil()  # load_format="dummy"

    def running(self) -> bool:
        return bool(self.llm._running)

    def reset_prefix_cache(self) -> None:
        self.prefixes.clear()
        self.log("reset_prefix_cache")

    def spoil(self) -> None:
        with torch.no_grad():
            for parameter in self.model_engine.model.parameters():
                parameter.fill_(float("nan"))


class RayGPUWorker:
    def __init__(self, device_id: int, engine: Engine) -> None:
        self.device_id, self.engine = device_id, engine

    @control_action_decorator
    def sleep(self, tags: list[str]) -> None:
        engine = self.engine
        assert frozenset(tags) <= engine.held, "memory was given back twice"
        engine.held -= frozenset(tags)
        if WEIGHTS & frozenset(tags):
            engine.spoil()  # the rest of the model's memory is saved and comes back
        self.engine.log(f"release {'kv' if 'kv_cache' in tags else ''}")

    @control_action_decorator
    def wakeup(self, tags: list[str]) -> None:
        assert not frozenset(tags) & self.engine.held, "memory was taken twice"
        self.engine.held |= frozenset(tags)
        self.engine.log("resume kv" if tags == ["kv_cache"] else "resume weights")

    def wait_for_engine_idle(self) -> None:
        assert not self.engine.running()


def _worker_class(extension: str) -> type:
    module, _, name = extension.rpartition(".")
    mixed = getattr(importlib.import_module(module), name)
    for attribute in dir(mixed):
        if not attribute.startswith("__") and hasattr(RayGPUWorker, attribute):
            raise ValueError(
                f"Worker class already defines {attribute!r}, which conflicts with extension {name}."
            )
    return type(f"RayGPUWorkerWith{name}", (RayGPUWorker, mixed), {})


def get_device_uuid(device_id: int) -> str:
    return GPUS[device_id]


# ── async_llm.py ─────────────────────────────────────────────────────────────────────────────────────────


class AsyncLLM:
    """The signatures of 1.4.0rc1; `AsyncLLMOf121` takes away what 1.2.1 lacks."""

    release_name = NEWEST
    sampling_class: type = SamplingParams
    _memory_kinds: Any = ExecutorMemoryType

    def __init__(
        self, placement_groups=None, placement_bundle_indices=None, per_worker_gpu_share=None, *args, **kwargs
    ):
        assert not args, "positional arguments of LLM are shifted by three"
        assert "ray_placement_config" not in kwargs, "it would be overwritten"
        placement = RayPlacementConfig(
            defer_workers_init=True,
            placement_groups=placement_groups,
            placement_bundle_indices=placement_bundle_indices,
            per_worker_gpu_share=per_worker_gpu_share,
        )
        extension = kwargs.pop("ray_worker_extension_cls", "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension")
        self._check_sleep(kwargs)
        if unknown := kwargs.keys() - _ARGUMENTS:
            raise ValueError(f"unknown arguments: {sorted(unknown)}")
        self.args = kwargs
        size = kwargs.get("tensor_parallel_size", 1)
        assert len(placement.bundles) == size, "a bundle for each worker"
        self._devices = placement.bundles  # as if the i-th bundle of a node had its i-th GPU
        assert type(kwargs["kv_cache_config"]) is KvCacheConfig
        assert kwargs["skip_tokenizer_init"] and kwargs["load_format"] == "dummy"
        self._running: set[RequestOutput] = set()
        self._is_set_up = self._is_paused = False
        self._extension = _worker_class(extension)
        told = [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "PMIX_", "OMPI_"))]
        with_what = "with" if told or "CUDA_VISIBLE_DEVICES" in os.environ else "without"
        self._log(f"started on {size} GPUs {with_what} variables of launchers")
        self.workers: list[Any] = []

    def _check_sleep(self, kwargs: dict[str, Any]) -> None:
        modes = kwargs.pop("sleep_config").restore_modes
        assert modes[ExecutorMemoryType.MODEL_WEIGHTS_MAIN] == modes[ExecutorMemoryType.KV_CACHE] == "NONE"

    async def setup_async(self) -> AsyncLLM:
        for device in self._devices:
            engine = Engine(self, self.args["model"], has_hooks=self.release_name == NEWEST)
            self.workers.append(self._extension(device, engine))
        self._is_set_up = True
        return self

    async def release(self, tags=None) -> None:
        await self.collective_rpc("sleep", args=([str(tag) for tag in tags],))

    async def resume(self, tags=None) -> None:
        await self.collective_rpc("wakeup", args=([str(tag) for tag in tags],))

    async def update_weights(self, weights: dict[str, str]) -> None:
        await self.collective_rpc("update_weights", args=(weights,))

    async def collective_rpc(
        self, method: str, args=(), kwargs=None, unique_reply_rank=None, target_ranks=None
    ) -> list[Any]:
        assert self._is_set_up, "the workers are not set up"
        if method in ("sleep", "wakeup"):
            assert all(tag in {str(kind) for kind in self._memory_kinds} for tag in args[0]), args
        return [getattr(worker, method)(*args, **kwargs or {}) for worker in self.workers]

    def generate_async(self, inputs: Any, sampling_params: Any = None, **_: Any) -> RequestOutput:
        if self._is_paused:
            raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting new requests.")
        assert type(sampling_params) is self.sampling_class and sampling_params.end_id is not None
        token_ids = inputs["prompt_token_ids"]
        most = self.args.get("max_input_len", 1024)
        if len(token_ids) > most or len(token_ids) + sampling_params.max_tokens > self.args["max_seq_len"]:
            raise ValueError(f"The prompt of {len(token_ids)} tokens is too long")
        for worker in self.workers:
            assert worker.engine.held >= {"kv_cache", *WEIGHTS}, "generation without memory"
        output = RequestOutput(self, token_ids, sampling_params)
        self._running.add(output)
        return output

    async def pause_generation(self) -> None:
        self._is_paused = True
        for output in list(self._running):
            output.abort()
            await output
        await self.collective_rpc("wait_for_engine_idle")
        self._log("pause")

    async def resume_generation(self) -> None:
        self._is_paused = False

    def shutdown(self) -> None:
        self.workers.clear()

    def _log(self, event: str) -> None:
        _events.append(event)
        if (path := os.environ.get(LOG)) is not None:
            with open(path, "a") as file:  # one line in one write
                file.write(f"{os.getpid()} {event}\n")

    @torch.no_grad()
    def _draws(self, token_ids: list[int], params: Any) -> Iterator[tuple[int, Any]]:
        """Tokens with their log-probs as they are given: by token, the likeliest beside the one drawn."""
        first = self.workers[0].engine
        for worker in self.workers[1:]:
            for name, tensor in worker.engine.model_engine.model.state_dict().items():
                assert torch.equal(tensor, first.model_engine.model.state_dict()[name]), "workers differ"
        generator = torch.Generator().manual_seed(params.seed or 0)
        seen, cache, fed = list(token_ids), DynamicCache(), list(token_ids)
        for _ in range(params.max_tokens):
            raw = first.model_engine.model(torch.tensor([fed]), past_key_values=cache).logits[:, -1].float()
            if seen == token_ids:
                raw = first.prefixes.setdefault(tuple(token_ids), raw)
            processed = _processed(raw, seen, params)
            assert raw.isfinite().all(), "generation with weights that were lost"
            if params.is_greedy:
                token = int(processed.argmax())
            else:
                token = int(torch.multinomial(processed.softmax(-1), 1, generator=generator))
            is_raw = getattr(params, "logprobs_mode", LogprobMode.RAW) == LogprobMode.RAW
            told = (raw if is_raw else processed).log_softmax(-1)[0]
            entry = {int(told.argmax()): Logprob(float(told.max()), 1), token: Logprob(float(told[token]))}
            seen.append(token)
            fed = [token]
            yield token, entry if params.logprobs else None


class AsyncLLMOf121(AsyncLLM):
    release_name = OLDEST
    sampling_class = SamplingParamsOf121
    _memory_kinds = ExecutorMemoryTypeOf121
    pause_generation = resume_generation = None  # type: ignore[assignment]

    def _check_sleep(self, kwargs: dict[str, Any]) -> None:
        assert kwargs.pop("enable_sleep") is True


def _processed(logits: torch.Tensor, seen: list[int], params: Any) -> torch.Tensor:
    """[1, V] what is drawn from, by transformers' own processors."""
    processors: list[Any] = []
    if params.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.is_greedy:
        if params.temperature not in (None, 1.0):
            processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p not in (None, 1.0):
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            processors.append(MinPLogitsWarper(params.min_p))
    for processor in processors:
        logits = processor(torch.tensor([seen]), logits)
    return logits


_events: list[str] = []
"""What has happened in this process, in order."""


# ── The package ──────────────────────────────────────────────────────────────────────────────────────────


def modules(release: str) -> dict[str, ModuleType]:
    """The package's modules by their names."""
    is_newest = release == NEWEST
    llm = AsyncLLM if is_newest else AsyncLLMOf121
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": dict(
            __version__=release, AsyncLLM=llm, SamplingParams=llm.sampling_class, __path__=[]
        ),
        "tensorrt_llm.llmapi": dict(__path__=[], KvCacheConfig=KvCacheConfig),
        "tensorrt_llm.llmapi.llm_args": dict(ExecutorMemoryType=ExecutorMemoryType, SleepConfig=SleepConfig)
        if is_newest
        else {},
        "tensorrt_llm.llmapi.rlhf_utils": dict(WorkerExtension=WorkerExtension),
        "tensorrt_llm.sampling_params": dict(LogprobMode=LogprobMode) if is_newest else {},
        "tensorrt_llm._torch": dict(__path__=[]),
        "tensorrt_llm._torch.utils": dict(get_device_uuid=get_device_uuid),
        "tensorrt_llm._torch.virtual_memory": dict(ExecutorMemoryType=llm._memory_kinds),
    }
    made = {}
    for name, attributes in contents.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(attributes)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, made[name])
    return made


def install(release: str = NEWEST) -> None:
    """Put the package into this process for good."""
    sys.modules.update(modules(release))


@contextmanager
def installed(release: str = NEWEST) -> Iterator[list[str]]:
    """Put the package into this process; yields the list of what happens."""
    own = {"colocate_trtllm.weight_worker", *modules(release)}
    before = {name: sys.modules.pop(name, None) for name in own}
    install(release)
    _events.clear()
    try:
        yield _events
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
