"""The native rollout engine: continuous batching on the trainer's own parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed import ProcessGroup

from colocate.engines.base import BaseEngine
from colocate.engines.native.backends import backend_for, default_sizes
from colocate.engines.native.capacity import (
    FREE_MEMORY_FRACTION,
    longest_allowed,
    longest_sequence,
    pages_of_longest,
    take_8bit,
    take_pages,
    take_weights,
    useful_pages,
)
from colocate.engines.native.decoder import Decoder, capacity_for
from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.kept_pages import HostRoom
from colocate.engines.native.kv_cache import KVCache
from colocate.engines.native.prefix_cache import salt_of
from colocate.engines.native.rollout import Rollout
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.submissions import Submissions
from colocate.engines.native.tensor_parallel import joined_groups, parallel_for
from colocate.engines.requests import unextendable
from colocate.kernels.fp8 import int8
from colocate.memory.recovery import Recovery
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fuse_parameters

SMALLEST_PREFILL_TOKENS = 512
"""Tokens below which a prefill is not made smaller: it would save little memory and take much more time."""

ADVICE = (
    "The rollout needs this much beside a KV cache of one page. Lower max_num_seqs, set load_in_4bit, or "
    "free memory on the device."
)


class NativeEngine(BaseEngine):
    """Generates with the parameters of `model`, which the trainer may update in place between rollouts.

    The model's q/k/v and gate/up parameters become views of fused storage (see `fuse_parameters`), and LoRA
    adapters of PEFT are read where they lie. Weights in bitsandbytes' 4 bits are dequantised for a rollout:
    all at once where memory allows, else one by one (see `capacity.take_weights`). The prompt of a group is
    prefilled and stored once. A completion depends only on (seed, prompt key, member) and not on the rest of
    the batch, up to the rounding of differently shaped matrix products.

    Where ranks split the weights (`weights.weight_parts`), they are one engine: all of them must call
    `generate` together, each with its own prompts, and decode the prompts of all. `max_num_seqs` and
    `kv_cache_tokens` are the engine's then, not a rank's.

    Args:
        model: a Hugging Face causal language model with a layout, or a PEFT model around one.
        group: the ranks that hold the parts of the weights, in the order of parts; None: this rank holds all.
        max_num_seqs: sequences that decode at the same time; None: 64 on a CPU, 512 on a GPU.
        page_size: tokens per page of the KV cache, on a GPU a power of two, at least 16; None: 16 on a CPU,
            64 on a GPU.
        kv_cache_tokens: size of the KV cache in tokens, which `wake_up` takes. None: `generate` takes a cache
            as large as its rollout can use. In both cases free memory is the limit.
        max_model_len: longest prompt + completion in tokens; None: the model's own limit.
        rollout_precision: "bf16": the model's own type. "fp8_kv": keys and values are stored in 8 bits.
            "fp8": products with q, k, v, gate, up and down are also in 8 bits (`EightBitWeights`).

    Raises:
        ValueError: the model has no layout, a size is out of range, or `group` has not one rank for each part
            of the weights.
    """

    # PyTorch's allocator does not count the arena, so `pooled_bytes` stays `NOTHING_POOLED`.

    def __init__(
        self,
        model: nn.Module,
        *,
        group: ProcessGroup | None = None,
        max_num_seqs: int | None = None,
        page_size: int | None = None,
        kv_cache_tokens: int | None = None,
        max_model_len: int | None = None,
        rollout_precision: str = "bf16",
    ) -> None:
        self._layout = layout = layout_for(model)
        self._backend = backend_for(layout.device)
        defaults = default_sizes(layout.device.type)
        max_num_seqs = defaults[0] if max_num_seqs is None else max_num_seqs
        page_size = defaults[1] if page_size is None else page_size
        if max_num_seqs < 1 or page_size < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} and page_size={page_size} must be at least 1.")
        self._backend.check_page_size(page_size)
        self._backend.check_precision(rollout_precision, layout)
        self._backend.tell_fallbacks(layout)
        if kv_cache_tokens is not None and kv_cache_tokens < page_size:
            raise ValueError(
                f"kv_cache_tokens={kv_cache_tokens} is less than one page of {page_size} tokens. Raise it, "
                "or set it to None to size the cache by the rollout."
            )
        self._model: nn.Module | None = model
        self._rollout_precision = rollout_precision
        self._max_num_seqs = max_num_seqs
        self._page_size = page_size
        self._kv_cache_tokens = kv_cache_tokens
        self._max_len, self._max_len_reason = longest_allowed(layout, max_model_len)
        self._vocab_size = layout.embed_tokens.num_embeddings
        capacity = capacity_for(max_num_seqs, self._backend)
        self._parallel = self._backend.parallel = parallel_for(layout, group, capacity)
        self._cache = KVCache(
            num_layers=len(layout.layers),
            num_kv_heads=layout.num_local_kv_heads,
            head_dim=layout.head_dim,
            page_size=page_size,
            scratch_bytes=self._backend.scratch_bytes(layout, capacity),
        )
        self._weights = RolloutWeights(stacks_adapters=self._backend.stacks_adapters)
        self._in_8bit = EightBitWeights()
        self._decoder: Decoder | None = None
        self._max_pages: int | None = None
        """Upper limit of the KV cache's pages, set when memory ran out with more pages; None: no limit."""
        self._wanted_pages = 0
        """Pages that the KV cache was asked for when the present rollout began."""
        self._submissions = Submissions()
        self._host_room = HostRoom()
        self._rollout: Rollout | None = None
        self._recovery = Recovery([self._shrink_prefill, self._shrink_cache], ADVICE)
        fuse_parameters(layout, room_for_adapters=self._backend.stacks_adapters)

    @property
    def kv_cache_bytes(self) -> int:
        return self._cache.num_bytes

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache has room for now."""
        return self._num_pages * self._page_size

    @property
    def rollout_weight_bytes(self) -> int:
        return self._weights.num_bytes + self._in_8bit.num_bytes

    @property
    def num_weight_parts(self) -> int:
        """The number of ranks over which the weights are split, which decode together."""
        return self._parallel.num_parts

    @property
    def is_busy(self) -> bool:
        return bool(self._submissions.ended) or self._submissions.has_active

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`.

        Raises:
            ValueError: a request is refused, or one sequence alone would not fit in the KV cache.
        """
        prompts, own = self._parallel.share(prompts, sampling)
        if self._parallel.num_parts > 1:
            prompts = joined_groups(prompts, sampling.max_tokens)
        numbers = self._submit(prompts, sampling, keep=False, is_findable=False)
        self._count_requests(prompts, sampling)
        try:
            # One agreement for all windows: ranks that decode together then meet only within steps.
            self._recovery.run(partial(self._parallel.together, self._finish))
        except BaseException:
            self.abort(numbers)
            raise
        return [self._submissions.ended.pop(number) for number in numbers][own]

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool = False) -> list[int]:
        """Queue sequences. See `RolloutEngine.submit`.

        The first `poll` sizes the KV cache for the sequences submitted by then, so submit all known ones
        before it. If later ones could use more than twice that size, the next `poll` enlarges the cache, and
        recomputes keys and values that it does not find there.

        Prompts begin with pages that earlier ones have left in the cache. See `PrefixCache`.

        Raises:
            ValueError: a request is refused, or ranks split the weights: they generate together.
        """
        if self._parallel.num_parts > 1:
            raise ValueError(
                f"{self._parallel.num_parts} ranks split the weights and decode together, which only "
                "`generate` can do. Set shard to 1 or 'none' for rollouts of several turns."
            )
        return self._submit(prompts, sampling, keep=keep, is_findable=True)

    def poll(self) -> dict[int, Completion]:
        """Launch a window of steps, read the one before, and return the turns that have ended.

        Raises:
            ValueError: one sequence alone would not fit in the KV cache.
            RuntimeError: the engine is asleep.
        """
        self._check_awake("poll")
        if self._submissions.has_active:
            self._recovery.run(self._advance)
        ended, self._submissions.ended = self._submissions.ended, {}
        return ended

    def progress(self, sequence: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
        running = self._submissions.sequences.get(sequence)
        if running is None or running.is_resting:
            return (), None
        return tuple(running.token_ids[start:]), tuple(running.logprobs[start:])

    def num_cached_tokens(self, sequence: int) -> int | None:
        running = self._submissions.sequences.get(sequence)
        return None if running is None else running.num_found

    def extend(self, sequence: int, token_ids: Sequence[int], max_tokens: int) -> None:
        kept, sampling = self._submissions.sequences.get(sequence), self._submissions.sampling
        if kept is None or not kept.is_resting or sampling is None:
            raise unextendable(sequence)
        num_prompt = len(kept.prompt)
        self._check_extension(
            sequence,
            token_ids,
            max_tokens,
            num_prompt=num_prompt,
            num_after=kept.num_context - num_prompt,
            sampling=sampling,
        )
        kept.begin_turn(list(token_ids), max_tokens)
        if self._rollout is not None:
            self._rollout.scheduler.wait([kept])

    def abort(self, sequences: Iterable[int]) -> None:
        removed = self._submissions.remove(sequences)
        if self._rollout is not None:
            self._rollout.drop(removed)
        self._close_if_done()

    def set_aside(self) -> Submissions:
        """Take all sequences out, wherever they are in their turns, so that others can be generated.

        They keep their pages, copied to the host, if it has room. `take_back` lets them go on.
        """
        if self._rollout is not None:
            self._submissions.kept = self._rollout.keep(self._host_room)
            self._suspend()
        aside, self._submissions = self._submissions, Submissions()
        return aside

    def take_back(self, aside: Submissions) -> None:
        """Queue sequences again that were set aside. With newer weights they go on from keys and values of
        older ones; each token has the log-prob with which it was drawn."""
        if self._submissions.sequences:
            raise RuntimeError(
                f"The engine has {len(self._submissions.sequences)} sequences: finish or abort these before "
                "others are taken back."
            )
        self._submissions = aside

    def _submit(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool, is_findable: bool
    ) -> list[int]:
        submissions = self._submissions
        self._check_submission(prompts, sampling, submissions.sampling)
        added = submissions.add(prompts, sampling, keep=keep, is_findable=is_findable)
        if self._rollout is not None:
            if self._is_outgrown(submissions.prompts(self._max_len), sampling.max_tokens):
                self._suspend()
            else:
                self._rollout.scheduler.wait(added.values())
        return list(added)

    def _is_outgrown(self, prompts: Sequence[Prompt], max_tokens: int) -> bool:
        """Whether the rollout is too small for its sequences. If no size of the cache was given, it is also
        too small if they could use more than twice the size it was made for: so it begins anew at most once
        per doubling."""
        assert self._rollout is not None
        if not self._rollout.fits(longest_sequence(prompts, max_tokens)):
            return True
        useful = useful_pages(prompts, max_tokens, self._page_size, self._max_num_seqs)
        return self._kv_cache_tokens is None and useful > 2 * self._wanted_pages

    def _finish(self) -> None:
        while self._submissions.has_active:
            num_ended = len(self._submissions.ended)
            self._advance()
            self.counts.add("completions", len(self._submissions.ended) - num_ended)

    def _advance(self) -> None:
        """Generate a little further. Tokens of a turn that an error loses are drawn again, and are equal."""
        rollout, self._rollout = self._rollout, None
        try:
            rollout = rollout or self._open_rollout()
            rollout.advance()
        except BaseException:
            self._cache.forget()  # pages may have names of what was to be written there
            raise
        finally:
            self._submissions.end_turns(self.policy_version)
        self._rollout = rollout
        self._close_if_done()

    def _open_rollout(self) -> Rollout:
        """Open a rollout and queue all sequences that do not rest; those that have tokens are recomputed."""
        assert self._model is not None
        # Adapters may have come or gone, and `model.to(...)` moves parameters out of their fused storage.
        self._layout = layout_for(self._model)
        fuse_parameters(self._layout, room_for_adapters=self._backend.stacks_adapters)
        with torch.inference_mode():
            return self._rollout_of_all()

    def _rollout_of_all(self) -> Rollout:
        submissions, parallel = self._submissions, self._parallel
        prompts, sampling = submissions.prompts(self._max_len), submissions.sampling
        assert sampling is not None
        parallel.attempt(partial(self._size_cache, prompts, sampling.max_tokens), None)
        # Free memory may differ from rank to rank; the scheduler must not.
        num_pages = parallel.least(self._num_pages)
        self._check_pages(num_pages, prompts, sampling.max_tokens)
        decoder = parallel.attempt(partial(self._decoder_for, prompts, sampling.max_tokens), None)
        if not parallel.least(0 if decoder is None else decoder.num_graphs) and decoder is not None:
            decoder.forget_graphs()  # or one rank would capture a step where another one replays it
        assert decoder is not None, "a rank without a decoder raises before"
        salt = salt_of(self._layout, self.policy_version)
        rollout = Rollout(
            decoder,
            sampling,
            num_pages=num_pages,
            salt=salt,
            finished=submissions.finished,
            counts=self.counts,
        )
        rollout.restart(submissions.sequences.values(), submissions.kept)
        submissions.kept = None
        return rollout

    def _suspend(self) -> None:
        """End the rollout: the next `poll` recomputes its sequences, except for pages that the cache still
        has."""
        if self._rollout is not None:
            self._rollout.close()
            self._submissions.end_turns(self.policy_version)
            self._submissions.note_version(self.policy_version)  # what comes next others may draw
        self._rollout = None

    def _close_if_done(self) -> None:
        """Let go of the rollout with the last sequence: the next one takes a cache of its own size."""
        rollout = self._rollout
        if rollout is not None and not self._submissions.sequences:
            assert rollout.pool.num_free == rollout.pool.num_pages, "KV pages are still held"
            self._rollout = None

    def _shrink_prefill(self) -> str | None:
        self._decoder = None  # memory may have run out while it was made, and its graphs hold memory
        if self._backend.max_prefill_tokens <= SMALLEST_PREFILL_TOKENS:
            return None
        self._backend.max_prefill_tokens //= 2
        return f"Prompts are now read {self._backend.max_prefill_tokens:,} tokens at a time"

    def _shrink_cache(self) -> str | None:
        num_pages = self._parallel.least(self._cache.num_pages)
        if num_pages <= 1:
            return None
        self._max_pages = num_pages // 2
        self._cache.free()
        return f"The KV cache is cut to {self._max_pages * self._page_size:,} tokens"

    def sleep(self, keep_bytes: int = 0) -> None:
        """Give memory back, on a GPU all but `keep_bytes`. Captured graphs stay valid.

        The engine keeps the memory for rollout weights first, then that of the KV cache, but no contents.
        """
        self._suspend()
        for memory in (self._weights, self._in_8bit, self._cache):
            memory.free(keep_bytes)
            keep_bytes = max(0, keep_bytes - memory.num_bytes)
        if not self._backend.captures_graphs:
            self._decoder = None  # cheap to make again, and it refers to weights that may be moved
        super().sleep()

    def wake_up(self) -> None:
        """Take the KV cache's memory if `kv_cache_tokens` was given; otherwise `generate` will."""
        self._check_open()
        if not self._is_awake and self._kv_cache_tokens is not None:
            wanted = self._kv_cache_tokens // self._page_size
            take = partial(self._take_weights, wanted_pages=wanted, needed_pages=1)
            self._parallel.attempt(take, None)
            num_pages = take_pages(self._cache, wanted, self._kv_dtype, self._layout.device)
            if num_pages < wanted:
                share = FREE_MEMORY_FRACTION[self._layout.device.type]
                warnings.warn(
                    f"kv_cache_tokens={self._kv_cache_tokens} was asked for, and memory allows "
                    f"{num_pages * self._page_size} (at most {share:.0%} of what is free): more sequences "
                    "wait their turn. Set kv_cache_tokens lower, or free memory.",
                    stacklevel=2,
                )
        self._is_awake = True

    def update_weights(self, version: int) -> None:
        self._suspend()
        self._cache.forget()
        super().update_weights(version)

    def close(self) -> None:
        """Free the KV cache and let go of the model."""
        super().close()
        self._suspend()
        self._decoder = self._model = None
        self._cache.close()
        self._weights.close()
        self._in_8bit.close()

    def _decoder_for(self, prompts: Sequence[Prompt], max_tokens: int) -> Decoder:
        """The decoder of earlier rollouts if it is large enough for this rollout, else a new one."""
        layout, decoder = self._layout, self._decoder
        self._weights.prepare(layout)
        if self._rollout_precision == "fp8":
            self._in_8bit.prepare(layout, self._weights)
        max_len = longest_sequence(prompts, max_tokens)
        if decoder is not None and decoder.fits(layout, max_len=max_len):
            decoder.refresh(layout)
            return decoder
        if decoder is not None:  # never shorter than before: training and evaluation may alternate
            max_len = max(max_len, decoder.max_len)
        self._decoder = None
        # Rounded up, so that a rollout a little longer than the last does not capture its graphs again.
        max_len = min(1 << (max_len - 1).bit_length(), self._max_len)
        self._decoder = Decoder(
            self._cache,
            self._weights,
            self._in_8bit,
            self._backend,
            layout,
            max_num_seqs=self._max_num_seqs,
            max_len=max_len,
        )
        return self._decoder

    @property
    def _kv_dtype(self) -> torch.dtype:
        """The type of keys and values in the cache."""
        return self._layout.dtype if self._rollout_precision == "bf16" else int8.DTYPE

    @property
    def _num_pages(self) -> int:
        """Pages of the KV cache for weights of the model's present type and device."""
        is_in_place = self._cache.is_on(self._kv_dtype, self._layout.device)
        return self._cache.num_pages if is_in_place else 0

    def _size_cache(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Take memory for this rollout if no size was given."""
        page_size, layout = self._page_size, self._layout
        needed = pages_of_longest(prompts, max_tokens, page_size)
        if self._kv_cache_tokens is None:
            wanted = max(needed, useful_pages(prompts, max_tokens, page_size, self._max_num_seqs))
        else:
            wanted = self._kv_cache_tokens // page_size
        self._wanted_pages = wanted
        wanted = min(wanted, self._max_pages or wanted)
        self._take_weights(wanted_pages=wanted, needed_pages=needed)
        is_in_place = self._cache.is_on(self._kv_dtype, layout.device)
        # A given size was taken by `wake_up`, unless the model was converted or moved since then.
        if self._num_pages < wanted and (self._kv_cache_tokens is None or not is_in_place):
            take_pages(self._cache, wanted, self._kv_dtype, layout.device)

    def _take_weights(self, *, wanted_pages: int, needed_pages: int) -> None:
        """Take memory for weights that the rollout does not read from the trainer."""
        layout, cache = self._layout, self._cache
        if self._rollout_precision == "fp8":
            take_8bit(self._in_8bit, cache, layout)
        sizes = dict(wanted_pages=wanted_pages, needed_pages=needed_pages)
        take_weights(self._weights, cache, layout, kv_dtype=self._kv_dtype, **sizes)

    def _check_pages(self, available: int, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Raises ValueError unless one sequence alone fits into the `available` pages."""
        page_size, layout = self._page_size, self._layout
        needed = pages_of_longest(prompts, max_tokens, page_size)
        if available < needed:
            remedy = f"Set kv_cache_tokens to at least {needed * page_size}"
            if self._kv_cache_tokens is None or self._max_pages is not None:
                share = FREE_MEMORY_FRACTION[layout.device.type]
                remedy = f"Free memory (the cache takes at most {share:.0%} of what is free)"
            tokens = longest_sequence(prompts, max_tokens) - 1
            raise ValueError(
                f"One sequence of {tokens} tokens (prompt + max_tokens - 1) needs ceil({tokens} / "
                f"{page_size}) = {needed} pages of KV cache and there are {available}. {remedy}, or lower "
                "max_completion_length."
            )
