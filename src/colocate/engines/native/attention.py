"""Attention over a paged KV cache, in plain PyTorch.

Letters in shapes: T tokens, B rows, H query heads, K key-value heads, D head size. A cache holds one layer's
keys or values, [num_pages, K, page_size, D]: one head's part of a page is contiguous, and so is a page, but
the next page need not follow directly. In 8 bits each head's part of a page ends with its scales
(`kernels.fp8.int8`). A block table lists the pages of a sequence in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from colocate.kernels.fp8 import int8


class PagedAttention:
    """Attention over the cache, with a workspace into which decode steps gather a sequence's pages.

    The workspace is kept from call to call. Megabytes that are taken from the system anew in every layer and
    step cause page faults, which take longer than the matrix products do.
    """

    def __init__(self) -> None:
        self._workspaces = [torch.empty(0), torch.empty(0)]

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, K, D] at `slots` [T], each page * page_size + offset in the page."""
        _, num_kv_heads, page_size, head_dim = k_cache.shape
        if int8.is_8bit(k_cache):
            pages, offsets = slots // page_size, slots % page_size
            for x, cache in ((k, k_cache), (v, v_cache)):
                cache[pages, :, offsets], int8.scales_of(cache)[pages, :, offsets] = int8.quantize(x)
            return
        heads = torch.arange(num_kv_heads, device=slots.device)
        first_row = (slots // page_size)[:, None] * (k_cache.stride(0) // head_dim)
        rows = first_row + heads * page_size + (slots % page_size)[:, None]
        _pieces(k_cache, head_dim).index_copy_(0, rows.flatten(), k.flatten(0, 1))
        _pieces(v_cache, head_dim).index_copy_(0, rows.flatten(), v.flatten(0, 1))

    def prefill(
        self,
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
            k_cache, v_cache: [num_pages, K, page_size, D].
            block_tables: the pages of each sequence, [pages of the sequence].
            query_lens: queries of each sequence; they belong to its last tokens.
            context_lens: tokens of each sequence in the cache, those of its queries included.
            scale: factor of q · k before the softmax.
            sliding_window: number of keys that a query sees, its own included; None: all up to its own.

        Returns:
            Attended values, [T, H, D].
        """
        outputs = []
        for query, table, query_len, context_len in zip(
            q.split(list(query_lens)), block_tables, query_lens, context_lens, strict=True
        ):
            key = _read(k_cache, table, q.dtype).transpose(0, 1).flatten(1, 2)[:, :context_len]
            value = _read(v_cache, table, q.dtype).transpose(0, 1).flatten(1, 2)[:, :context_len]
            mask = None
            if query_len < context_len or sliding_window is not None:
                query_positions = torch.arange(context_len - query_len, context_len, device=q.device)[:, None]
                distances = query_positions - torch.arange(context_len, device=q.device)
                mask = distances >= 0
                if sliding_window is not None:
                    mask &= distances < sliding_window
            output = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key[None],
                value[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)

    def decode(
        self,
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
            k_cache, v_cache: [num_pages, K, page_size, D].
            block_tables: [B, at least the pages of the longest sequence]; entries past a sequence's pages may
                be any valid page.
            context_lens: [B], tokens of each sequence in the cache, the query's own included.
            max_context_len: the largest of `context_lens`, known on the host.
            scale: factor of q · k before the softmax.
            sliding_window: number of keys that a query sees, its own included; None: all up to its own.

        Returns:
            Attended values, [B, H, D].
        """
        num_seqs, num_heads, head_dim = q.shape
        _, num_kv_heads, page_size, _ = k_cache.shape
        pages = block_tables[:, : -(-max_context_len // page_size)]
        heads = torch.arange(num_kv_heads, device=q.device)[:, None]
        piece_size = int8.head_block_size(page_size, head_dim, k_cache.dtype)
        pieces = (pages[:, None] * (k_cache.stride(0) // piece_size) + heads).flatten()
        # [B * K, whole pages of tokens, D]: all query heads of one key-value head go into one matrix product.
        shape = (num_seqs * num_kv_heads, -1, head_dim)
        key, value = (
            _values(
                self._gather(which, _pieces(cache, piece_size), pieces), page_size, head_dim, q.dtype
            ).view(shape)
            for which, cache in enumerate((k_cache, v_cache))
        )
        positions = torch.arange(key.shape[1], device=q.device)
        is_hidden = positions >= context_lens[:, None]
        if sliding_window is not None:
            is_hidden |= positions < context_lens[:, None] - sliding_window
        scores = torch.bmm(q.reshape(num_seqs * num_kv_heads, -1, head_dim), key.transpose(1, 2))
        scores = scores.view(num_seqs, num_heads, -1).float().mul_(scale)
        weights = scores.masked_fill_(is_hidden[:, None], -torch.inf).softmax(dim=-1).to(value.dtype)
        return torch.bmm(weights.view(num_seqs * num_kv_heads, -1, key.shape[1]), value).view(q.shape)

    def _gather(self, which: int, pieces: Tensor, index: Tensor) -> Tensor:
        """`pieces[index]` in workspace `which` (0 or 1), valid until the next call with that workspace."""
        numel = len(index) * pieces.shape[1]
        if self._workspaces[which].numel() < numel:
            # Twice the present need, because contexts grow with every step.
            self._workspaces[which] = pieces.new_empty(2 * numel)
        output = self._workspaces[which][:numel].view(len(index), pieces.shape[1])
        return torch.index_select(pieces, 0, index, out=output)


def tokens_at(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [T, K, D] in `dtype` at `slots` [T], each page * page_size + offset in the page."""
    pages, offsets = slots // cache.shape[2], slots % cache.shape[2]
    if not int8.is_8bit(cache):
        return cache[pages, :, offsets]
    return int8.dequantize(cache[pages, :, offsets], int8.scales_of(cache)[pages, :, offsets], dtype)


def _read(cache: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages `table` of keys or values, [pages, K, page_size, D] in `dtype`."""
    if not int8.is_8bit(cache):
        return cache.index_select(0, table)
    return int8.dequantize(cache.index_select(0, table), int8.scales_of(cache).index_select(0, table), dtype)


def _values(pieces: Tensor, page_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Keys or values in heads' parts of pages, a row of `pieces` each: [rows, page_size, D] in `dtype`."""
    if pieces.shape[1] == page_size * head_dim:
        return pieces.view(-1, page_size, head_dim)
    stored, scales = pieces.split([page_size * head_dim, page_size], dim=1)
    return int8.dequantize(stored.unflatten(1, (page_size, head_dim)), scales, dtype)


def _pieces(cache: Tensor, piece_size: int) -> Tensor:
    """Memory of `cache` as rows [:, piece_size]; page p begins at p * stride(0) / size."""
    num_pages, num_kv_heads, page_size, head_dim = cache.shape
    page_numel = num_kv_heads * int8.head_block_size(page_size, head_dim, cache.dtype)
    numel = (num_pages - 1) * cache.stride(0) + page_numel
    return cache.as_strided((numel // piece_size, piece_size), (piece_size, 1))
