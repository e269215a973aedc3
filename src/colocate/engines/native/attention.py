"""Attention over a paged KV cache, by PyTorch's scaled-dot-product attention.

The three functions are the whole interface between the model runner and the kernels. Shapes: H query heads, K
key-value heads, D head size; a cache is one layer's keys or values, [num_pages, page_size, K, D]; a block
table lists the pages of a sequence in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store keys and values [T, K, D] at `slots` [T] = page * page_size + offset in the page."""
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Sequence[Tensor],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention of packed queries, whose keys and values are already in the cache.

    Args:
        q: [T, H, D], the sequences' queries one after the other.
        block_tables: per sequence its pages, [num_pages of the sequence].
        query_lens: queries of each sequence; they are its last tokens.
        context_lens: tokens of each sequence in the cache, its queries included.
        sliding_window: a query sees this many keys, itself included; None: all before it.

    Returns:
        [T, H, D].
    """
    outputs = []
    for query, table, query_len, context_len in zip(
        q.split(list(query_lens)), block_tables, query_lens, context_lens, strict=True
    ):
        key = k_cache.index_select(0, table).flatten(0, 1)[:context_len]
        value = v_cache.index_select(0, table).flatten(0, 1)[:context_len]
        mask = None
        if query_len < context_len or sliding_window is not None:
            query_positions = torch.arange(context_len - query_len, context_len, device=q.device)[:, None]
            distances = query_positions - torch.arange(context_len, device=q.device)
            mask = distances >= 0
            if sliding_window is not None:
                mask &= distances < sliding_window
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """Attention of one query per sequence, whose key and value are already in the cache.

    Args:
        q: [B, H, D].
        block_tables: [B, at least the pages of the longest sequence]; entries past a sequence's pages may be
            any valid page.
        context_lens: [B], tokens of each sequence in the cache, the query's own included.
        max_context_len: the largest of them, known on the host.
        sliding_window: a query sees this many keys, itself included; None: all before it.

    Returns:
        [B, H, D].
    """
    page_size = k_cache.shape[1]
    pages = block_tables[:, : -(-max_context_len // page_size)]
    shape = (len(q), -1, *k_cache.shape[2:])
    key = k_cache.index_select(0, pages.flatten()).view(shape)[:, :max_context_len]
    value = v_cache.index_select(0, pages.flatten()).view(shape)[:, :max_context_len]
    positions = torch.arange(max_context_len, device=q.device)
    mask = positions < context_lens[:, None]
    if sliding_window is not None:
        mask &= positions >= context_lens[:, None] - sliding_window
    output = F.scaled_dot_product_attention(
        q[:, :, None],
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask[:, None, None],
        scale=scale,
        enable_gqa=True,
    )
    return output[:, :, 0]
