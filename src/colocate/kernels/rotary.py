"""Norms of the heads (Qwen3's) and rotary embedding (Su et al. 2021, arXiv:2104.09864), forward and backward.

A row is one head of one token; both halves of a row lie with the same threads, so that turning a pair needs
no exchange between them. Angles and norm weights are read once per row: all but the first read of each hit
the L1 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.kernels.programs import num_programs

_TILE = 1024
"""Pairs a program turns at a time; with 4 warps 8 a thread: 16-byte loads of bfloat16."""
_NUM_WARPS = 4


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed where there are norms, and turned; each operation rounded to the type.

    Args:
        qkv: [T, H + 2K, D], queries, keys, values; a token's part is contiguous. Not changed.
        cos, sin: [T, D] in the type of `qkv`, contiguous.
        num_heads: H.
        q_norm, k_norm: [D], weights of the heads' norms, both or neither.
        eps: of those norms.

    Returns:
        queries [T, H, D] and keys [T, K, D], contiguous.
    """
    num_tokens, num_parts, head_dim = qkv.shape
    num_kv_heads = (num_parts - num_heads) // 2
    _check(qkv, cos, sin, q_norm, k_norm)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((num_tokens, num_kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_half = triton.next_power_of_2(head_dim // 2)
    rows = max(_TILE // block_half, 1)
    num_rows = num_tokens * (num_heads + num_kv_heads)
    _rotate_kernel[(triton.cdiv(num_rows, rows),)](
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        q,
        k,
        qkv.stride(0),
        eps,
        num_rows,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK_HALF=block_half,
        num_warps=_NUM_WARPS,
        # Else the compiler narrows products and sums to the type and fuses them: one rounding of two is lost.
        enable_fp_fusion=False,
    )
    return q, k


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k,
    qkv_stride,
    eps,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    token = (row // (NUM_HEADS + NUM_KV_HEADS)).to(tl.int64)
    head = row % (NUM_HEADS + NUM_KV_HEADS)
    is_query = head < NUM_HEADS
    mask = (row < num_rows) & (columns < HALF)
    dtype = qkv.dtype.element_ty

    pointers = qkv + token * qkv_stride + head * HEAD_DIM + columns
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        norm = tl.where(is_query, q_norm, k_norm) + columns
        first_weight = tl.load(norm, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + HALF, mask=mask, other=0.0).to(tl.float32)
        first = first_weight * (first * inverse).to(dtype).to(tl.float32)
        second = second_weight * (second * inverse).to(dtype).to(tl.float32)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)

    angle = token * HEAD_DIM + columns
    cos_first = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF + angle, mask=mask, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF + angle, mask=mask, other=0.0).to(tl.float32)
    # Each product is rounded before the sum, as PyTorch's separate operations store it.
    first_cos, second_cos = (first * cos_first).to(dtype), (second * cos_second).to(dtype)
    second_sin, first_sin = (second * sin_first).to(dtype), (first * sin_second).to(dtype)
    new_first = (first_cos.to(tl.float32) - second_sin.to(tl.float32)).to(dtype)
    new_second = (second_cos.to(tl.float32) + first_sin.to(tl.float32)).to(dtype)
    q_row = q + (token * NUM_HEADS + head) * HEAD_DIM
    k_row = k + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    output = tl.where(is_query, q_row, k_row) + columns
    tl.store(output, new_first, mask=mask)
    tl.store(output + HALF, new_second, mask=mask)


def rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `rotate` and of the values beside it.

    Args:
        grad_q: [T, H, D]; grad_k, grad_v: [T, K, D]; of one type, a token's part contiguous in each.
        qkv: [T, H + 2K, D], as `rotate` was given it; read only where there are norms.
        cos, sin, q_norm, k_norm, eps: as `rotate` was given them.

    Returns:
        [T, H + 2K, D] in the type of `qkv`, contiguous; [D] float32 for either norm's weight, or None.
    """
    num_tokens, num_heads, head_dim = grad_q.shape
    num_kv_heads = grad_k.shape[1]
    assert qkv.shape == (num_tokens, num_heads + 2 * num_kv_heads, head_dim), f"qkv is {tuple(qkv.shape)}"
    _check(qkv, cos, sin, q_norm, k_norm)
    for grad in (grad_q, grad_k, grad_v):
        assert grad.dtype == grad_q.dtype, "gradients of queries, keys and values must be of one type"
        assert grad.stride()[1:] == (head_dim, 1), "a token's gradients must be contiguous"
    has_norms = q_norm is not None
    grad_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    block_half = triton.next_power_of_2(head_dim // 2)
    rows = max(_TILE // block_half, 1)
    num_rows = num_tokens * (num_heads + 2 * num_kv_heads)
    num_tiles = triton.cdiv(num_rows, rows)
    if has_norms:
        num_tiles = min(num_tiles, num_programs(qkv.device, _NUM_WARPS))
    sums = (
        torch.empty((num_tiles, 2, head_dim), dtype=torch.float32, device=qkv.device) if has_norms else None
    )
    _rotate_backward_kernel[(num_tiles,)](
        grad_q,
        grad_k,
        grad_v,
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        grad_qkv,
        sums,
        grad_q.stride(0),
        grad_k.stride(0),
        grad_v.stride(0),
        qkv.stride(0),
        eps,
        num_rows,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK_HALF=block_half,
        num_warps=_NUM_WARPS,
    )
    if sums is None:
        return grad_qkv, None, None
    grad_q_norm, grad_k_norm = sums.sum(0)
    return grad_qkv, grad_q_norm, grad_k_norm


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_backward_kernel(
    grad_q,
    grad_k,
    grad_v,
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    grad_qkv,
    sums,
    grad_q_stride,
    grad_k_stride,
    grad_v_stride,
    qkv_stride,
    eps,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_PARTS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = columns < HALF
    dtype = grad_qkv.dtype.element_ty
    if q_norm is not None:
        # Kept apart by row, too, and summed once at the end: no exchange between threads in the loop.
        q_sum_first = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
        q_sum_second = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
        k_sum_first = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
        k_sum_second = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
    # Not pipelined: such copies pass by the L1 cache, and angles would be fetched anew for every row.
    for tile in tl.range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        token = (row // NUM_PARTS).to(tl.int64)
        head = row % NUM_PARTS
        is_query = head < NUM_HEADS
        is_value = head >= NUM_HEADS + NUM_KV_HEADS
        mask = (row < num_rows) & in_half
        turns = mask & (head < NUM_HEADS + NUM_KV_HEADS)

        q_row = grad_q + token * grad_q_stride + head * HEAD_DIM
        k_row = grad_k + token * grad_k_stride + (head - NUM_HEADS) * HEAD_DIM
        v_row = grad_v + token * grad_v_stride + (head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
        pointers = tl.where(is_query, q_row, tl.where(is_value, v_row, k_row)) + columns
        grad_first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        grad_second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)

        angle = token * HEAD_DIM + columns
        cos_first = tl.load(cos + angle, mask=turns, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + HALF + angle, mask=turns, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + HALF + angle, mask=turns, other=0.0).to(tl.float32)
        first = grad_first * cos_first + grad_second * sin_second
        second = grad_second * cos_second - grad_first * sin_first

        if q_norm is not None:
            x = qkv + token * qkv_stride + head * HEAD_DIM + columns
            x_first = tl.load(x, mask=turns, other=0.0).to(tl.float32)
            x_second = tl.load(x + HALF, mask=turns, other=0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first, axis=1) + tl.sum(x_second * x_second, axis=1)
            inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            x_first, x_second = x_first * inverse, x_second * inverse
            weight_first = first * x_first.to(dtype).to(tl.float32)
            weight_second = second * x_second.to(dtype).to(tl.float32)
            # Rows of values, and those past the end, have gradients of zero here.
            q_sum_first += tl.where(is_query, weight_first, 0.0)
            q_sum_second += tl.where(is_query, weight_second, 0.0)
            k_sum_first += tl.where(is_query, 0.0, weight_first)
            k_sum_second += tl.where(is_query, 0.0, weight_second)
            norm = tl.where(is_query, q_norm, k_norm) + columns
            first *= tl.load(norm, mask=turns, other=0.0).to(tl.float32)
            second *= tl.load(norm + HALF, mask=turns, other=0.0).to(tl.float32)
            mean = (tl.sum(first * x_first, axis=1) + tl.sum(second * x_second, axis=1))[:, None] / HEAD_DIM
            first = inverse * (first - x_first * mean)
            second = inverse * (second - x_second * mean)

        first, second = tl.where(is_value, grad_first, first), tl.where(is_value, grad_second, second)
        output = grad_qkv + row.to(tl.int64) * HEAD_DIM + columns
        tl.store(output, first.to(dtype), mask=mask)
        tl.store(output + HALF, second.to(dtype), mask=mask)
    if q_norm is not None:
        total = sums + program * (2 * HEAD_DIM) + columns
        tl.store(total, tl.sum(q_sum_first, axis=0)[None, :], mask=in_half)
        tl.store(total + HALF, tl.sum(q_sum_second, axis=0)[None, :], mask=in_half)
        tl.store(total + HEAD_DIM, tl.sum(k_sum_first, axis=0)[None, :], mask=in_half)
        tl.store(total + HEAD_DIM + HALF, tl.sum(k_sum_second, axis=0)[None, :], mask=in_half)


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
    num_tokens, _, head_dim = qkv.shape
    assert head_dim % 2 == 0, f"rotary embedding turns pairs, and a head has {head_dim} values"
    assert qkv.stride()[1:] == (head_dim, 1), "a token's heads must be contiguous"
    for table in (cos, sin):
        assert table.shape == (num_tokens, head_dim), f"table {tuple(table.shape)} for {num_tokens} tokens"
        assert table.dtype == qkv.dtype and table.is_contiguous(), "tables: the type of qkv, contiguous"
    assert (q_norm is None) == (k_norm is None), "norms for queries and keys, or for neither"
    assert q_norm is None or q_norm.is_contiguous(), "weights of the norms must be contiguous"
    assert k_norm is None or k_norm.is_contiguous(), "weights of the norms must be contiguous"
