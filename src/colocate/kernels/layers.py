"""A decoder layer's work between its matrix products, as Triton kernels: norms, rotary embedding with the
page write. (The activation is in `gate`.)

All of it is bound by memory, so each kernel reads and writes every byte once. Values are rounded to the
model's type exactly where the operations of transformers would store them: the trainer's forward runs those,
and the log-probs of engine and trainer must agree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual sum and its root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [T, hidden], rows contiguous; output of the attention or the MLP, or the embeddings.
        residual: [T, hidden], rows contiguous; None: there is none yet.
        weight: [hidden], the norm's.

    Returns:
        The norm, [T, hidden], and the sum, [T, hidden]: the next residual, `x` itself if there was none.
    """
    num_tokens, hidden_size = x.shape
    assert x.stride(1) == 1, "a row of x must be contiguous"
    assert residual is None or residual.stride(1) == 1, "a row of the residual must be contiguous"
    normed = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    block = triton.next_power_of_2(hidden_size)
    _add_rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        normed,
        summed,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        hidden_size,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),  # 8 values a thread: one 16-byte load of bfloat16
    )
    return normed, summed


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    summed,
    x_stride,
    residual_stride,
    eps,
    hidden_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden_size
    dtype = normed.dtype.element_ty
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(summed + row * hidden_size + columns, value, mask=mask)
    upcast = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(upcast * upcast, axis=0) / hidden_size + eps)
    rounded = (upcast * scale).to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * hidden_size + columns, (weights * rounded).to(dtype), mask=mask)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Norms of the heads (Qwen3's), rotary embedding (Su et al. 2021, arXiv:2104.09864) and the page write.

    Args:
        qkv: [T, H + 2K, D], queries, keys, values; a token's part is contiguous. Queries and keys are
            replaced by their rotated selves.
        cos, sin: [max_len, D] in the model's type, contiguous.
        positions: [T], rows of `cos` and `sin`. Later ones than the last row read that one, so that none
            reads outside the tables.
        slots: [T], page * page_size + offset in the page; negative: nothing is stored for this token.
        q_norm, k_norm: [D], weights of the heads' norms; None: the architecture has none.
        eps: of those norms.
        k_cache, v_cache: [num_pages, K, page_size, D], contiguous but for the first dimension.
        num_heads: H.
        num_kv_heads: K.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    page_size = k_cache.shape[2]
    assert num_rows == num_heads + 2 * num_kv_heads, f"{num_rows} is not {num_heads} + 2 * {num_kv_heads}"
    assert head_dim % 2 == 0, f"rotary embedding turns pairs, and a head has {head_dim} values"
    assert qkv.stride()[1:] == (head_dim, 1), "a token's heads must be contiguous"
    assert cos.is_contiguous() and sin.is_contiguous(), "rotary tables must be contiguous"
    for cache in (k_cache, v_cache):
        assert cache.stride()[1:] == (page_size * head_dim, head_dim, 1), "a page must be contiguous"
    block_heads = min(8, triton.next_power_of_2(num_rows))
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_rows, block_heads))](
        qkv,
        cos,
        sin,
        positions,
        slots,
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        qkv.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        cos.shape[0],
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
        # Else the compiler narrows products and sums to the type and fuses them: one rounding of two is lost.
        enable_fp_fusion=False,
    )


@triton.jit
def _rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    positions,
    slots,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    qkv_stride,
    k_page_stride,
    v_page_stride,
    max_len,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    # Norm weights and angles, too, are read once per head: in the layout of the heads they need no exchange
    # between threads, and all but the first read hit the L1 cache.
    columns = tl.broadcast_to(tl.arange(0, BLOCK_HALF)[None, :], [BLOCK_HEADS, BLOCK_HALF])
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = qkv.dtype.element_ty
    in_half = columns < HALF
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half

    pointers = qkv + token * qkv_stride + heads * HEAD_DIM + columns
    loaded_first = tl.load(pointers, mask=mask, other=0.0)
    loaded_second = tl.load(pointers + HALF, mask=mask, other=0.0)
    first, second = loaded_first.to(tl.float32), loaded_second.to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        norm = tl.where(is_query, q_norm, k_norm) + columns
        first_weight = tl.load(norm, mask=in_half, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + HALF, mask=in_half, other=0.0).to(tl.float32)
        first = first_weight * (first * scale).to(dtype).to(tl.float32)
        second = second_weight * (second * scale).to(dtype).to(tl.float32)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)

    position = tl.minimum(tl.load(positions + token), max_len - 1).to(tl.int64)
    angle = position * HEAD_DIM + columns
    cos_first = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF + angle, mask=in_half, other=0.0).to(tl.float32)
    # Each product is rounded before the sum, as PyTorch's separate operations store it.
    first_cos, second_cos = (first * cos_first).to(dtype), (second * cos_second).to(dtype)
    first_sin, second_sin = (first * sin_second).to(dtype), (second * sin_first).to(dtype)
    new_first = (first_cos.to(tl.float32) - second_sin.to(tl.float32)).to(dtype)
    new_second = (second_cos.to(tl.float32) + first_sin.to(tl.float32)).to(dtype)
    tl.store(pointers, new_first, mask=mask & (is_query | is_key))
    tl.store(pointers + HALF, new_second, mask=mask & (is_query | is_key))

    slot = tl.load(slots + token).to(tl.int64)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    in_page = offset * HEAD_DIM + columns
    store_key = mask & is_key & (slot >= 0)
    key_pointers = k_cache + page * k_page_stride + (heads - NUM_HEADS) * (PAGE_SIZE * HEAD_DIM) + in_page
    tl.store(key_pointers, new_first, mask=store_key)
    tl.store(key_pointers + HALF, new_second, mask=store_key)
    store_value = mask & is_value & (slot >= 0)
    value_heads = heads - (NUM_HEADS + NUM_KV_HEADS)
    value_pointers = v_cache + page * v_page_stride + value_heads * (PAGE_SIZE * HEAD_DIM) + in_page
    tl.store(value_pointers, loaded_first, mask=store_value)
    tl.store(value_pointers + HALF, loaded_second, mask=store_value)
