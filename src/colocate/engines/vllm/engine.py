"""vLLM in the trainer's process, taking turns with the trainer on the same GPU.

Each process of the run has its own engine, or each `tensor_parallel_size` consecutive processes have one
together. vLLM's external launcher joins processes that the run's launcher (torchrun, `accelerate launch`) has
started.

In a rollout phase vLLM takes and gives back memory in this order:

    wake_up()   takes memory for weights, publishes them if they are old, takes memory for the KV cache
    generate()  may be called several times; nothing is loaded or published again
    sleep()     gives both back; if weights are shared, the KV cache alone, as vLLM has no weights of its own
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colocate.engines.turns import Turn, TurnEngine
from colocate.engines.vllm import internals
from colocate.engines.vllm.arguments import (
    CPU_KV_CACHE_BYTES,
    KV_CACHE_SHARE,
    MAX_NUM_SEQS,
    MEMORY_SHARE_AWAKE,
    SMALLEST_MEMORY_SHARE,
    WAKE_UP_BYTES,
    check_engine_kwargs,
    config_directory,
    memory_share,
)
from colocate.engines.vllm.environment import check_installed
from colocate.engines.vllm.groups import TensorParallelGroup
from colocate.engines.vllm.logprobs_mode import PROCESSED, ReportedLogprobs
from colocate.engines.vllm.open_turns import OpenTurns
from colocate.engines.vllm.requests import LLMRequest, llm_requests
from colocate.engines.vllm.shared_weights import (
    SharedWeights,
    forget,
    num_bytes,
    start_source,
    why_not_shared,
)
from colocate.memory import garbage
from colocate.memory.timeline import NOTHING_POOLED
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import causal_lm, layout_for, num_embeddings
from colocate.weights.shared_views import fuse_parameters
from colocate.weights.source import BUCKET_BYTES, WeightSource, why_not_publishable
from colocate.weights.weight_parts import whole_tensor

logger = logging.getLogger(__name__)

SMALLEST_TEMPERATURE = 0.01
"""vLLM raises any lower temperature but 0 to this one, so log-probs would be those of another temperature."""


class VLLMEngine(TurnEngine):
    """Generates with vLLM in this process, with the weights of `model`.

    Completions with equal (seed, prompt key, member) are drawn with equal noise, whatever else is in the
    batch; the logits depend a little on the batch. vLLM filters by `min_p` before `top_k` and `top_p`, the
    other engines after them.

    Weights are shared where possible (`shared_weights.why_not_shared`); publishing them moves nothing.
    Otherwise vLLM has a copy. It is read from `model`, with adapters merged, when the engine wakes up, or in
    `update_weights` if it is awake.

    The state of the process that vLLM's start changes (random states, precision, environment) is restored.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one, on the device to use. It must
            not be moved afterwards if weights are shared.
        max_num_seqs: sequences that decode at the same time; None: `MAX_NUM_SEQS` on a GPU, else vLLM's
            default.
        max_model_len: longest prompt + completion in tokens; None: the model's own limit.
        tensor_parallel_size: consecutive processes that run one engine.
        gpu_memory_utilization: share of the device's memory that vLLM may use, its copy of the weights
            included; None: the result of `memory_share`, or `MEMORY_SHARE_AWAKE` if vLLM never sleeps.
        reserve_bytes: memory that the trainer will take later and hold during rollouts; read only for
            `gpu_memory_utilization=None`.
        usable_kv_cache_bytes: size of the KV cache beyond which no rollout uses it; None: unknown. A smaller
            cache leaves the trainer memory that it need not free before rollouts. It is read only for
            `gpu_memory_utilization=None`.
        weights: "shared", "buckets" (vLLM has a copy), or "auto": shared where possible.
        logprobs_mode: `mode_for` the sampling to come. With other sampling completions may have no log-probs.
        enable_sleep_mode: give memory back while asleep. False: the device holds training and vLLM at once.
        model_impl: vLLM's implementation of the model: "auto", "vllm" or "transformers".
        trust_remote_code: run code that comes with the model.
        engine_kwargs: further arguments of `vllm.LLM`.
        bucket_bytes: largest size of the weights that are merged or dequantised at a time.

    Raises:
        ImportError: vLLM is missing or too old.
        ValueError: an argument is out of range or a user cannot set it, the processes do not divide into
            groups, or weights="shared" is impossible for this model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        reserve_bytes: int = 0,
        usable_kv_cache_bytes: int | None = None,
        weights: str = "auto",
        logprobs_mode: str = PROCESSED,
        enable_sleep_mode: bool = True,
        model_impl: str = "vllm",
        trust_remote_code: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        check_installed()
        user_kwargs = dict(engine_kwargs or {})
        check_engine_kwargs(user_kwargs)
        if (reason := why_not_publishable(model)) is not None:
            raise ValueError(f"vLLM cannot generate with this policy: {reason}.")
        self._is_stale = False
        self.published_bytes = 0
        """Bytes that the last publication moved: 0 where weights are shared."""
        self._source: WeightSource | None = WeightSource(model, bucket_bytes)
        self._base: Any = causal_lm(model)
        self._device = next(self._base.parameters()).device
        self._group = TensorParallelGroup(tensor_parallel_size)
        self._reported = ReportedLogprobs(logprobs_mode, is_main=self._group.rank == 0)
        # vLLM sleeps on GPUs only. Elsewhere `sleep` only makes `generate` refuse, and frees no memory.
        on_gpu = self._device.type == "cuda"
        self._frees_memory = enable_sleep_mode and on_gpu
        self._shared = self._shared_weights(weights, model_impl)
        kwargs = user_kwargs | {
            "max_num_seqs": MAX_NUM_SEQS if max_num_seqs is None and on_gpu else max_num_seqs,
            "max_model_len": max_model_len,
            **self._memory_kwargs(gpu_memory_utilization, reserve_bytes, usable_kv_cache_bytes, user_kwargs),
        }
        self._llm: Any = self._start(
            {name: value for name, value in kwargs.items() if value is not None},
            model_impl=model_impl,
            trust_remote_code=trust_remote_code,
        )
        self._open_turns = OpenTurns(self._llm)
        self._note_what_has_started()
        self._say_where_weights_are(weights)
        atexit.register(_close_at_exit, weakref.ref(self))
        self.sleep()

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of vLLM's KV cache; 0 asleep, also where it keeps the cache and could not give it back."""
        return self._kv_cache_bytes if self._is_awake else 0

    @property
    def rollout_weight_bytes(self) -> int:
        """Bytes of vLLM's copy of the weights; 0 asleep, or if weights are shared."""
        return self._weight_bytes if self._is_awake else 0

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`.

        Every process of a tensor-parallel group calls this, with prompts of its own or none.

        Raises:
            ValueError: a request of this process or another one of the group is refused, also for a
                temperature that vLLM would change.
        """
        self._open_turns.abort()  # whoever runs vLLM's engine to the end gets all that it has finished
        error = None
        try:
            self._check(prompts, sampling)
        except ValueError as refused:
            error = refused
        requests = [] if error else list(llm_requests(prompts, sampling))
        return self._reported.of(self._group.run(requests, self._generate, error=error), sampling)

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool = False) -> list[int]:
        """Note the sequences. See `RolloutEngine.submit`.

        Raises:
            ValueError: a request is refused, or several processes run this engine: they generate together.
        """
        if self._group.size > 1:
            raise ValueError(
                f"vllm_tensor_parallel_size={self._group.size}: these processes take every step of vLLM "
                "together, which only `generate` can do. Set it to 1 for rollouts of several turns."
            )
        return super().submit(prompts, sampling, keep=keep)

    def abort(self, sequences: Iterable[int]) -> None:
        sequences = list(sequences)
        self._open_turns.abort(sequences)
        super().abort(sequences)

    def _draw(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        self.counts.measure(self._num_tokens)
        with internals.random_states_kept(self._device):
            ended = self._open_turns.draw(waiting, sampling, self.policy_version)
        return dict(zip(ended, self._reported.of(list(ended.values()), sampling), strict=True))

    def _num_tokens(self) -> dict[str, int]:
        under_way = internals.num_drawn_tokens(self._llm).values()
        return {"tokens": self.counts.done("tokens") + sum(under_way)}

    def sleep(self, keep_bytes: int = 0) -> None:
        """Give all memory back. `keep_bytes` has no effect, because vLLM cannot give back a part."""
        self._open_turns.abort()
        if self._is_awake and self._frees_memory:
            # vLLM's sleep drops the KV cache, saves the rest on the host at level 1 and drops it at level 2.
            # With shared weights the rest is a few buffers. A copy of the weights is dropped: it is usually
            # old at the next rollout, and copying the trainer's is faster than reading it back.
            with internals.reserve_kept():
                self._llm.sleep(level=1 if self.shares_weights else 2)
            self._is_stale = self._is_stale or not self.shares_weights
        super().sleep()

    def wake_up(self) -> None:
        """Take memory for the weights, publish them if they are missing or old, take the KV cache's memory.

        Raises:
            RuntimeError: the engine is closed, or shared parameters have moved.
        """
        self._check_open()
        if self._is_awake:
            return
        if self._frees_memory:
            if torch.cuda.mem_get_info(self._device)[0] < internals.unmapped_bytes() + WAKE_UP_BYTES:
                torch.cuda.empty_cache()  # vLLM maps device memory, which PyTorch holds without using it
            with internals.reserve_kept():
                self._llm.wake_up(tags=["weights"])
        if self.shares_weights:
            self._shared.check_in_place()
        if self._is_stale:
            self._publish()
        if self._frees_memory:
            with internals.reserve_kept():
                self._llm.wake_up(tags=["kv_cache"])
        self._is_awake = True

    def update_weights(self, version: int) -> None:
        """Publish the weights that `model` has now; if asleep, those that it will have in `wake_up`.

        So publishing takes no memory while the trainer has the device.
        """
        self._open_turns.abort()
        self.policy_version = version
        self._is_stale = True
        if self._is_awake:
            self._publish()

    def close(self) -> None:
        """End vLLM and free its memory."""
        if self._is_closed:
            return
        super().close()
        self._source = self._base = None
        llm, self._llm = self._llm, None
        if self._frees_memory:
            internals.keep_pools()
        internals.shut_down(llm, owns_process_group=self._owns_process_group)
        del llm
        garbage.collect()
        if self._frees_memory:
            internals.free_pools()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ── Start ────────────────────────────────────────────────────────────────────────────────────────────

    def _shared_weights(self, weights: str, model_impl: str) -> SharedWeights:
        assert self._source is not None
        model = self._source.model
        reason: str | None = "vllm_weights='buckets'"
        if weights != "buckets":
            size = self._group.size
            reason = why_not_shared(model, tensor_parallel_size=size, model_impl=model_impl)
        if reason is None:
            # Here and not where vLLM loads, because memory allocated there is in the pool that sleep drops.
            fuse_parameters(layout_for(model))
        elif weights == "shared":
            raise ValueError(
                f"vllm_weights='shared' is not possible: {reason}. Set vllm_weights='auto' or 'buckets', "
                "with which vLLM has its own copy."
            )
        return SharedWeights(model, wants_sharing=reason is None, reason=reason or "")

    def _memory_kwargs(
        self,
        utilization: float | None,
        reserve_bytes: int,
        usable_kv_cache_bytes: int | None,
        user_kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """vLLM's arguments for how much memory it takes."""
        if utilization is not None:
            return {"gpu_memory_utilization": utilization}
        if user_kwargs.get("kv_cache_memory_bytes") is not None:
            return {}
        if self._device.type != "cuda":
            is_set = "VLLM_CPU_KVCACHE_SPACE" in os.environ
            return {} if is_set else {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        share = MEMORY_SHARE_AWAKE
        if self._frees_memory:
            share = memory_share(free_bytes, total_bytes, reserve_bytes=reserve_bytes)
        kwargs: dict[str, Any] = {"gpu_memory_utilization": share}
        if usable_kv_cache_bytes is not None:
            assert self._source is not None
            copy_bytes = 0 if self._shared.wants_sharing else self._source.num_bytes / self._group.size
            if usable_kv_cache_bytes < KV_CACHE_SHARE * (share * total_bytes - copy_bytes):
                kwargs["kv_cache_memory_bytes"] = usable_kv_cache_bytes
        return kwargs

    def _start(self, kwargs: dict[str, Any], *, model_impl: str, trust_remote_code: bool) -> Any:
        with (
            internals.random_states_kept(self._device),
            internals.process_settings_kept(),
            internals.own_process_group(self._device) as self._owns_process_group,
            internals.launched(self._device),
        ):
            import vllm

            load_kwargs, key = start_source(self._shared)
            if (share := kwargs.get("gpu_memory_utilization")) is not None:
                kwargs = kwargs | {"gpu_memory_utilization": self._utilization(share)}
            try:
                with internals.plain_segments(self._device):
                    return vllm.LLM(
                        str(config_directory(self._base)),
                        **load_kwargs,
                        runner="generate",
                        skip_tokenizer_init=True,
                        generation_config="vllm",
                        dtype=str(self._base.get_input_embeddings().weight.dtype).removeprefix("torch."),
                        logprobs_mode=self._reported.mode,
                        distributed_executor_backend="external_launcher",
                        tensor_parallel_size=self._group.size,
                        enable_sleep_mode=self._frees_memory,
                        model_impl=model_impl,
                        trust_remote_code=trust_remote_code,
                        seed=self._group.index,
                        **kwargs,
                    )
            except BaseException:
                if self._frees_memory:
                    # The error's traceback refers to half of an engine, whose memory must be freed.
                    internals.keep_pools()
                    internals.free_pools()
                raise
            finally:
                forget(key)

    def _note_what_has_started(self) -> None:
        """Read off the running vLLM, which is awake, whether weights are shared and what memory it holds."""
        self.shares_weights = bool(self._shared.shared)
        self._max_len = internals.max_model_len(self._llm)
        self._max_len_reason = f"vLLM's max_model_len = {self._max_len}"
        self._vocab_size = num_embeddings(self._base)
        self._kv_cache_bytes = internals.kv_cache_bytes(self._llm)
        self.pooled_bytes = internals.pooled_bytes() if self._frees_memory else NOTHING_POOLED
        self._weight_bytes = 0 if self.shares_weights else self._llm.apply_model(_num_bytes)[0]
        self._is_awake = True

    def _utilization(self, share: float) -> float:
        """The `gpu_memory_utilization` with which vLLM takes `share` of the device."""
        if not (self._frees_memory and self._shared.wants_sharing and internals.counts_freed_weights()):
            return share
        total_bytes = torch.cuda.mem_get_info(self._device)[1]
        return max(share - num_bytes(self._shared.model) / total_bytes, SMALLEST_MEMORY_SHARE)

    def _say_where_weights_are(self, asked: str) -> None:
        if self.shares_weights:
            logger.info("vLLM reads the trainer's own parameters: publishing moves nothing.")
            return
        assert self._source is not None
        # A reason against sharing that was known before the start was an error then; this one is new.
        say = logger.warning if asked == "shared" else logger.info
        say(
            f"vLLM has its own copy of the weights, because {self._shared.reason}. They are published in "
            f"buckets of up to {self._source.max_bytes / 2**20:,.0f} MiB before each rollout."
        )

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        super()._check(prompts, sampling)
        if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature={sampling.temperature}, and vLLM samples at {SMALLEST_TEMPERATURE} at least. "
                f"Set it to 0 (greedy), or to {SMALLEST_TEMPERATURE} or more, or set engine='native'."
            )

    def _generate(self, requests: list[LLMRequest]) -> list[Completion]:
        self.counts.begin("tokens", sum(request.max_tokens for request in requests), is_limit=True)
        self.counts.begin("completions", len(requests))
        self.counts.measure(_DrawnSoFar(self._llm))
        with internals.random_states_kept(self._device):
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(request.prompt)} for request in requests],
                [request.params() for request in requests],
                use_tqdm=False,
            )
        completions = [
            request.completion(output, self.policy_version)
            for output, request in zip(outputs, requests, strict=True)
        ]
        self._count_ended(completions)
        return completions

    def _publish(self) -> None:
        """Give vLLM the trainer's present weights, and drop the prefixes that it computed with older ones."""
        start = time.perf_counter()
        self.published_bytes = 0
        assert self._source is not None
        if not self.shares_weights:
            with torch.no_grad():
                if self._shared.is_plain:
                    self._llm.apply_model(lambda module: module.load_weights(self._weights()))
                else:
                    name = self._source.tied_head
                    head = None if name is None else whole_tensor(self._base.get_parameter(name))
                    internals.reload_weights(self._llm, self._weights(), head)
        if self.published_bytes:
            logger.debug(
                f"Published version {self.policy_version}: {self.published_bytes / 2**30:.3f} GiB in "
                f"{time.perf_counter() - start:.3f} s."
            )
        self._llm.reset_prefix_cache()
        self._is_stale = False

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self._source is not None
        for name, tensor in self._source.tensors():
            self.published_bytes += tensor.nbytes
            yield name, tensor


class _DrawnSoFar:
    """The tokens that vLLM has drawn; those of a finished request as they were seen last."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._seen: dict[str, int] = {}

    def __call__(self) -> dict[str, int]:
        under_way = internals.num_drawn_tokens(self._llm)
        self._seen |= under_way
        return {"tokens": sum(self._seen.values()), "completions": len(self._seen) - len(under_way)}


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _close_at_exit(engine: weakref.ref[VLLMEngine]) -> None:
    """Close an engine before the interpreter takes its modules apart, which vLLM's destructors still need."""
    if (alive := engine()) is not None:
        alive.close()
