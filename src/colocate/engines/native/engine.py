"""The native rollout engine: continuous batching on the trainer's own parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from colocate.engines.native.batch import DecodeBatch
from colocate.engines.native.kv_cache import KVCache
from colocate.engines.native.model_runner import ModelRunner
from colocate.engines.native.pages import PagePool, pages_for
from colocate.engines.native.sampler import Sampler
from colocate.engines.native.scheduler import Admission, Scheduler
from colocate.engines.native.scheduler import Sequence as RunningSequence
from colocate.engines.requests import check_no_tensors, check_requests
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import Layout, layout_for
from colocate.weights.shared_views import fuse_parameters

FREE_MEMORY_FRACTION = 0.5
"""Share of the free memory that the KV cache takes at most when its size is not given."""


class NativeEngine:
    """Generates with the parameters of `model`, which the trainer may update in place between rollouts.

    The model's q/k/v and gate/up parameters become views of fused storage (see `fuse_parameters`); LoRA
    adapters of PEFT are read where they are. A group's prompt is prefilled and stored once. With equal (seed,
    prompt key, member) a completion is the same whatever else is in the batch, up to the rounding of
    differently shaped matrix products.

    Args:
        model: a Hugging Face causal language model with a layout, or a PEFT model around one.
        max_num_seqs: sequences that decode at the same time.
        page_size: tokens per page of the KV cache.
        kv_cache_tokens: size of the KV cache in tokens; it is then taken in `wake_up`. None: taken in
            `generate`, as large as that rollout can use, up to half of the free memory.
        max_model_len: longest prompt + completion in tokens; None: the model's own limit.

    Raises:
        ValueError: the model has no layout, or a size is out of range.
    """

    shares_weights = True

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int = 64,
        page_size: int = 16,
        kv_cache_tokens: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        layout = layout_for(model)
        if max_num_seqs < 1 or page_size < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} and page_size={page_size} must be at least 1.")
        if kv_cache_tokens is not None and kv_cache_tokens < page_size:
            raise ValueError(
                f"kv_cache_tokens={kv_cache_tokens} is less than one page of {page_size} tokens. Raise it, "
                "or set it to None to size the cache by the rollout."
            )
        if max_model_len is not None and max_model_len > layout.max_position:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds what the native engine can decode with this model: "
                f"{layout.max_position_reason}. Lower max_model_len, or use the 'transformers' engine."
            )
        self.policy_version = 0
        self._model: nn.Module | None = model
        self._max_num_seqs = max_num_seqs
        self._page_size = page_size
        self._kv_cache_tokens = kv_cache_tokens
        self._max_len = layout.max_position if max_model_len is None else max_model_len
        self._max_len_reason = (
            layout.max_position_reason if max_model_len is None else f"max_model_len = {max_model_len}"
        )
        self._layout = layout
        self._cache = KVCache(
            num_layers=len(layout.layers),
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            page_size=page_size,
        )
        self._is_awake = False
        fuse_parameters(model)

    @property
    def kv_cache_bytes(self) -> int:
        return self._cache.num_bytes

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`.

        Raises:
            ValueError: also if one sequence alone would not fit in the KV cache.
        """
        if not self._is_awake or self._model is None:
            raise RuntimeError("The engine is asleep; call wake_up() before generate().")
        check_requests(
            prompts,
            sampling,
            max_len=self._max_len,
            max_len_reason=self._max_len_reason,
            vocab_size=self._layout.embed_tokens.num_embeddings,
        )
        prompts = [prompt for prompt in prompts if len(prompt.samples)]
        if not prompts:
            return []
        # Adapters may have come or gone, and `model.to(...)` moves parameters out of their fused storage.
        self._layout = layout_for(self._model)
        fuse_parameters(self._model)
        with torch.inference_mode():
            self._size_cache(prompts, sampling.max_tokens)
            return _Rollout(self._layout, self._cache, self._max_num_seqs, prompts, sampling).run(
                self.policy_version
            )

    def sleep(self) -> None:
        """Give the KV cache's memory back."""
        self._cache.free()
        self._is_awake = False

    def wake_up(self) -> None:
        """Take the KV cache's memory, if its size was given.

        Raises:
            RuntimeError: the engine is closed.
        """
        if self._model is None:
            raise RuntimeError("The engine is closed and cannot be used again.")
        if not self._is_awake and self._kv_cache_tokens is not None:
            num_pages = self._kv_cache_tokens // self._page_size
            self._cache.allocate(num_pages, self._layout.dtype, self._layout.device)
        self._is_awake = True

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Note the version of the weights, which are in place already.

        Raises:
            ValueError: tensors were passed.
        """
        check_no_tensors(named_tensors)
        self.policy_version = version

    def close(self) -> None:
        """Free the KV cache and let go of the model."""
        self.sleep()
        self._model = None

    def _size_cache(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Check that one sequence fits; take memory for this rollout if no size was given."""
        page_size, layout = self._page_size, self._layout
        # The last token drawn is never fed back: it needs no key and value.
        longest = _longest(prompts, max_tokens) - 1
        needed = pages_for(longest, page_size)
        is_in_place = self._cache.is_on(layout.dtype, layout.device)
        available = self._cache.num_pages if is_in_place else 0
        if self._kv_cache_tokens is not None:
            if not is_in_place:  # the model was converted or moved since wake_up
                available = self._kv_cache_tokens // page_size
                self._cache.allocate(available, layout.dtype, layout.device)
        else:
            num_seqs = min(self._max_num_seqs, sum(len(prompt.samples) for prompt in prompts))
            # One more sequence's worth: the prompt kept for the members that still wait.
            wanted = needed * (num_seqs + 1)
            if wanted > available:
                self._cache.free()
                free_bytes = _free_memory_bytes(layout.device)
                affordable = int(free_bytes * FREE_MEMORY_FRACTION) // self._cache.page_bytes(layout.dtype)
                available = min(wanted, affordable)
                self._cache.allocate(available, layout.dtype, layout.device)
        if available < needed:
            remedy = f"Set kv_cache_tokens to at least {needed * page_size}"
            if self._kv_cache_tokens is None:
                remedy += f" (not set, the cache takes at most {FREE_MEMORY_FRACTION:.0%} of the free memory)"
            raise ValueError(
                f"One sequence of {longest} tokens (prompt + max_tokens - 1) needs ceil({longest} / "
                f"{page_size}) = {needed} pages of KV cache and there are {available}. {remedy}, or lower "
                "max_completion_length."
            )


class _Rollout:
    """One `generate` call."""

    def __init__(
        self,
        layout: Layout,
        cache: KVCache,
        max_num_seqs: int,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
    ) -> None:
        self.cache = cache
        self.sampling = sampling
        self.pool = PagePool(cache.num_pages)
        self.scheduler = Scheduler(
            prompts,
            max_tokens=sampling.max_tokens,
            pool=self.pool,
            page_size=cache.page_size,
            max_num_seqs=max_num_seqs,
        )
        max_len = _longest(prompts, sampling.max_tokens)
        self.runner = ModelRunner(layout, cache, max_len)
        self.batch = DecodeBatch(
            max_num_seqs=min(max_num_seqs, len(self.scheduler.sequences)),
            max_num_pages=pages_for(max_len, cache.page_size),
            max_tokens=sampling.max_tokens,
            vocab_size=layout.vocab_size,
            sampler=Sampler(sampling),
            stop_token_ids=sampling.stop_token_ids,
            device=layout.device,
        )

    def run(self, policy_version: int) -> list[Completion]:
        scheduler = self.scheduler
        while scheduler.has_work:
            admission = scheduler.admit()
            if admission.started:
                self._start(admission)
            else:
                self._step()
            self._retire()
        assert self.pool.num_free == self.pool.num_pages, "KV pages are still held after the rollout"
        stop_token_ids = set(self.sampling.stop_token_ids)
        return [
            Completion(
                token_ids=tuple(sequence.token_ids),
                logprobs=tuple(sequence.logprobs),
                finish_reason="stop" if sequence.token_ids[-1] in stop_token_ids else "length",
                policy_version=policy_version,
            )
            for sequence in scheduler.sequences
        ]

    def _start(self, admission: Admission) -> None:
        if admission.prefills:
            logits = self.runner.prefill([prefill for prefill, _ in admission.prefills])
            for row, (_, owner) in zip(logits, admission.prefills, strict=True):
                owner.logits = row
        if admission.page_copies:
            self.cache.copy_pages(*zip(*admission.page_copies, strict=True))
        started = admission.started
        self.batch.start(started, torch.stack([sequence.next_logits for sequence in started]))
        for sequence in started:
            sequence.logits = None
            if sequence.group.num_unstarted == 0:
                sequence.group.logits = None

    def _step(self) -> None:
        scheduler, batch = self.scheduler, self.batch
        preempted = scheduler.make_room()
        if preempted:
            self._read_back([sequence.row for sequence in preempted], preempted)
        grown = scheduler.grow()
        if grown[0]:
            batch.set_pages(*grown)
        rows = slice(0, batch.num_rows)
        logits = self.runner.decode(
            batch.last_tokens[rows],
            batch.positions[rows],
            batch.block_tables[rows],
            scheduler.max_context_len,
        )
        batch.draw(rows, logits)
        scheduler.advance()

    def _retire(self) -> None:
        rows = self.batch.finished_rows()
        if rows:
            self._read_back(rows, [self.scheduler.running[row] for row in rows])
            self.scheduler.finish(rows)

    def _read_back(self, rows: Sequence[int], sequences: Sequence[RunningSequence]) -> None:
        for sequence, (token_ids, logprobs) in zip(sequences, self.batch.read(rows), strict=True):
            sequence.token_ids, sequence.logprobs = token_ids, logprobs
        self.batch.remove(rows)


def _longest(prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Tokens of the longest prompt + completion."""
    return max(len(prompt.token_ids) + max(prompt.limits(max_tokens)) for prompt in prompts)


def _free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
