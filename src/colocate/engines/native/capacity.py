"""The size of a rollout's KV cache: how large it should be, and how large it can be."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.kv_cache import KVCache
from colocate.engines.native.pages import pages_for
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.memory.arena import HANDLE_BYTES, ArenaExhausted
from colocate.types import Prompt
from colocate.weights.layouts import Layout

logger = logging.getLogger(__name__)

FREE_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.5}
"""Largest share of the free memory that the cache takes, by device. The rest of a GPU is for a prefill's
activations and CUDA graphs, the rest of a machine's memory for other programs."""

COPY_BREAK_EVEN = 0.8
"""Decoding from a dequantised copy of 4-bit weights is faster than dequantising them one by one if the memory
left for the KV cache is at least this share of the copy's size C. Decoding is bound by memory traffic. With
memory M in all, a step with the copy reads M bytes and serves sequences whose KV cache takes M - C; a step
without the copy moves M + 2.3 C bytes and serves sequences whose KV cache takes M. The copy serves more per
byte if (M - C) / M > M / (M + 2.3 C), that is from M = 1.8 C on, where the KV cache has 0.8 C."""


def longest_sequence(prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Tokens of the longest prompt + completion."""
    return max(len(prompt.token_ids) + max(prompt.limits(max_tokens)) for prompt in prompts)


def pages_of_longest(prompts: Sequence[Prompt], max_tokens: int, page_size: int) -> int:
    """Pages that the longest sequence needs at its end, alone in the cache."""
    # The last token drawn is never fed to the model: it has no key and value.
    return pages_for(longest_sequence(prompts, max_tokens) - 1, page_size)


def longest_allowed(layout: Layout, max_model_len: int | None) -> tuple[int, str]:
    """Tokens of the longest sequence that is decoded, and the reason for that limit."""
    if max_model_len is None:
        return layout.max_position, layout.max_position_reason
    if max_model_len > layout.max_position:
        raise ValueError(
            f"vllm_max_model_length={max_model_len} exceeds what can be decoded with this model: "
            f"{layout.max_position_reason}. Lower vllm_max_model_length, or leave it out."
        )
    return max_model_len, f"vllm_max_model_length = {max_model_len}"


def useful_pages(prompts: Sequence[Prompt], max_tokens: int, page_size: int, max_num_seqs: int) -> int:
    """Pages with which the rollout never waits for a page: those of the `max_num_seqs` largest sequences.

    The full pages of a prompt count once for all its completions. Each completion has its own pages for its
    tokens and for the end of the prompt that fills no page.
    """
    shared, own = [], []
    for prompt in prompts:
        length = len(prompt.token_ids)
        shared.append(length // page_size)
        own += [
            pages_for(length + limit - 1, page_size) - length // page_size
            for limit in prompt.limits(max_tokens)
        ]
    largest_own, largest_shared = sorted(own)[-max_num_seqs:], sorted(shared)[-max_num_seqs:]
    # Each running sequence keeps one page in reserve (`Scheduler._has_room`), and each prompt whose
    # completions still wait keeps the page in which it ends.
    return sum(largest_own) + sum(largest_shared) + len(largest_own) + len(largest_shared)


def take_weights(
    weights: RolloutWeights,
    cache: KVCache,
    layout: Layout,
    *,
    kv_dtype: torch.dtype,
    wanted_pages: int,
    needed_pages: int,
) -> None:
    """Take memory for weights that a rollout does not read from the trainer, before the cache takes pages.

    They are copies of the adapters' A if the weights are split, or the dequantised weights of a model in 4
    bits.

    Memory for a copy of all weights is taken if there is still room for `wanted_pages` of the cache. It is
    also taken if the cache can have `needed_pages` and is large enough that the copy is faster all the same
    (see `COPY_BREAK_EVEN`). Otherwise there is memory for one weight at a time. Pages that the cache kept
    during sleep are given up where the weights need the memory.

    Args:
        kv_dtype: the type of keys and values in the cache.
        wanted_pages: pages with which no sequence waits (`useful_pages`), or the size that was set.
        needed_pages: pages of the longest sequence (`pages_of_longest`).

    Raises:
        ArenaExhausted: the device has no memory for even one weight, or for the adapters.
    """
    copy_bytes = weights.needed_bytes(layout, is_copy=True)
    if not copy_bytes:
        return
    if layout.part.count > 1:  # adapters, which take little
        try:
            weights.allocate(layout, is_copy=True)
        except ArenaExhausted:
            cache.free()
            weights.allocate(layout, is_copy=True)
        return
    dtype, device = layout.dtype, layout.device
    usable_bytes = _usable_bytes(cache.num_bytes + weights.num_bytes, device)
    num_pages = _pages_within(usable_bytes - copy_bytes, cache, kv_dtype, device)
    is_copy_faster = num_pages * cache.page_bytes(kv_dtype) >= COPY_BREAK_EVEN * copy_bytes
    is_copy = num_pages >= wanted_pages or (num_pages >= needed_pages and is_copy_faster)
    was_copy = weights.is_copy
    if weights.needed_bytes(layout, is_copy=is_copy) > weights.num_bytes:
        cache.free()
    try:
        weights.allocate(layout, is_copy=is_copy)
    except ArenaExhausted:
        if not is_copy:
            raise
        is_copy = False
        weights.allocate(layout, is_copy=False)
    if is_copy != was_copy:
        how = (
            f"a {dtype} copy of {copy_bytes / 2**30:.2f} GiB"
            if is_copy
            else f"weights dequantised one by one: a {dtype} copy of {copy_bytes / 2**30:.2f} GiB would "
            f"leave {num_pages} pages of KV cache, and {wanted_pages} are of use"
        )
        logger.info(f"The 4-bit model decodes from {how}.")


def take_8bit(weights: EightBitWeights, cache: KVCache, layout: Layout) -> None:
    """Take memory for the weights in 8 bits, if need be that of pages that the cache kept during sleep.

    Raises:
        ArenaExhausted: the device has too little memory for them.
    """
    try:
        weights.allocate(layout)
    except ArenaExhausted:
        cache.free()
        weights.allocate(layout)


def take_pages(cache: KVCache, num_pages: int, dtype: torch.dtype, device: torch.device) -> int:
    """Give the cache `num_pages` pages, or as many as memory allows. Returns how many it has."""
    affordable = _pages_within(_usable_bytes(cache.num_bytes, device), cache, dtype, device)
    if affordable < num_pages:
        logger.info(f"A KV cache of {num_pages} pages would be of use; memory allows {affordable}.")
        num_pages = affordable
    # On a CPU, pages that are still of use are copied if the old cache and the new one have room together.
    has_room = num_pages * cache.page_bytes(dtype) <= _usable_bytes(0, device)
    try:
        cache.allocate(num_pages, dtype, device, has_room_to_copy=has_room)
    except ArenaExhausted as error:
        # Another process took memory in the meantime, or it is too fragmented for whole handles.
        left_bytes = error.mapped_bytes + error.free_bytes
        num_pages = _pages_within(left_bytes * FREE_MEMORY_FRACTION["cuda"], cache, dtype, device)
        logger.warning(f"{error} The KV cache is cut to {num_pages} pages; more sequences wait their turn.")
        cache.allocate(num_pages, dtype, device)
    return cache.num_pages


def _pages_within(num_bytes: float, cache: KVCache, dtype: torch.dtype, device: torch.device) -> int:
    """Pages of the cache that fit into `num_bytes` together with its scratch; on a GPU memory comes in
    handles."""
    unit_bytes = HANDLE_BYTES if device.type == "cuda" else 1
    whole_bytes = int(num_bytes) // unit_bytes * unit_bytes
    return max(0, whole_bytes - cache.scratch_bytes) // cache.page_bytes(dtype)


def _usable_bytes(held_bytes: int, device: torch.device) -> float:
    """Bytes of free memory that may be taken; `held_bytes`, already taken, count as free."""
    free_bytes = held_bytes
    if device.type == "cuda":
        # The cache can have memory that PyTorch has reserved and does not use: PyTorch gives it back then.
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free_bytes += torch.cuda.mem_get_info(device)[0] + unused_bytes
    else:
        free_bytes += os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free_bytes * FREE_MEMORY_FRACTION[device.type]
