"""Norms of the heads (Qwen3's) and rotary embedding (Su et al. 2021, arXiv:2104.09864), as Triton kernels.

Three forward kernels round where `definitions.norm_and_rotate` does: the engine's, which also writes pages,
the trainer's, and decode attention (`attention_levels`), which turns heads as it loads them. In the
engine's and the trainer's both halves of a head lie with the same threads, so that turning a pair needs no
exchange between threads. Angles and norm weights are read once per head: all but the first read of each hit
the L1 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.kernels.fp8.int8 import head_block_size
from colocate.kernels.fp8.quantize_int8 import factors, largest_of, numbers, quantized, scales_for
from colocate.kernels.launch import num_programs
from colocate.kernels.layer.norms import inverse_rms, multiplied, rms_normed

_TILE = 1024
"""Pairs that a program turns at a time. With 4 warps a thread has 8 of them: 16-byte loads of bfloat16."""
_NUM_WARPS = 4


@triton.jit
def pair_columns(pairs, HEAD_DIM: tl.constexpr, DISTANCE: tl.constexpr):
    """The place in a head of each pair's first value, and the distance from there to the second
    (`definitions.Rotation.pair_distance`). Values that are not turned are paired, too: their angle is 0."""
    HALF: tl.constexpr = HEAD_DIM // 2
    if DISTANCE is None:
        columns, gap = pairs, HALF
    elif DISTANCE == 1:
        columns, gap = 2 * pairs, 1
    else:
        columns = tl.where(pairs < DISTANCE, pairs, pairs + DISTANCE)
        gap = tl.where(pairs < DISTANCE, DISTANCE, HALF - DISTANCE)
    return columns, gap


@triton.jit
def load_pairs(pointers, mask, gap):
    """The first and second values of pairs in float32, given pointers to the first."""
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + gap, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def turned(x, partner, cosine, sine, SIGN: tl.constexpr, DTYPE: tl.constexpr, FUSES: tl.constexpr):
    """x * cosine + SIGN * partner * sine in the model's type; products are rounded first, as in PyTorch.

    Where the kernel is compiled with fusion of products and sums (FUSES), the compiler would narrow plain
    products to the type and fuse one with the sum, which loses a rounding; sums with a zero it leaves alone.
    """
    if FUSES:
        along, across = tl.fma(x, cosine, 0.0), tl.fma(partner, sine, 0.0)
    else:
        along, across = x * cosine, partner * sine
    along, across = along.to(DTYPE).to(tl.float32), across.to(DTYPE).to(tl.float32)
    return (along + across if SIGN > 0 else along - across).to(DTYPE)


@triton.jit
def heads_inverse_rms(first, second, eps, HEAD_DIM: tl.constexpr):
    """1 / root mean square, [R, 1], of heads that are given as pairs, [R, D / 2] twice."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return inverse_rms(squares, HEAD_DIM, eps)[:, None]


@triton.jit
def norm_and_turn(
    first, second, cos, sin, is_query, q_norm, k_norm, columns, gap, mask, eps, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, OFFSET: tl.constexpr, NORMS_LAST: tl.constexpr,
):  # fmt: skip
    """Heads given as float32 pairs, normed (if there are norms) and turned, in the model's type; with
    NORMS_LAST turned and normed.

    `cos` and `sin` point to the angles of the first values, of the shape of `first`. It is for kernels that
    are compiled without fusion of products and sums.
    """
    if q_norm is not None and not NORMS_LAST:
        inverse = heads_inverse_rms(first, second, eps, HEAD_DIM)
        weights = load_pairs(tl.where(is_query, q_norm, k_norm) + columns, mask, gap)
        first = rms_normed(first, inverse, weights[0], DTYPE, OFFSET).to(tl.float32)
        second = rms_normed(second, inverse, weights[1], DTYPE, OFFSET).to(tl.float32)
    cos_first, cos_second = load_pairs(cos, mask, gap)
    sin_first, sin_second = load_pairs(sin, mask, gap)
    new_first = turned(first, second, cos_first, sin_first, -1, DTYPE, False)
    new_second = turned(second, first, cos_second, sin_second, 1, DTYPE, False)
    if q_norm is not None and NORMS_LAST:
        wide_first, wide_second = new_first.to(tl.float32), new_second.to(tl.float32)
        inverse = heads_inverse_rms(wide_first, wide_second, eps, HEAD_DIM)
        weights = load_pairs(tl.where(is_query, q_norm, k_norm) + columns, mask, gap)
        new_first = rms_normed(wide_first, inverse, weights[0], DTYPE, OFFSET)
        new_second = rms_normed(wide_second, inverse, weights[1], DTYPE, OFFSET)
    return new_first, new_second


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
    offset: float | None = None,
    pair_distance: int | None = None,
    norms_last: bool = False,
) -> None:
    """`TorchBackend.rotate_and_store`: rotated in place; with a cache in 8 bits keys and values are replaced
    by what was stored, and positions past the tables' last row read that one. A token's part is
    contiguous."""
    num_tokens, num_rows, head_dim = qkv.shape
    page_size = k_cache.shape[2]
    assert num_rows == num_heads + 2 * num_kv_heads, f"{num_rows} is not {num_heads} + 2 * {num_kv_heads}"
    assert head_dim % 2 == 0, f"rotary embedding turns pairs, and a head has {head_dim} values"
    assert qkv.stride()[1:] == (head_dim, 1), "a token's heads must be contiguous"
    assert cos.is_contiguous() and sin.is_contiguous(), "rotary tables must be contiguous"
    head_block = head_block_size(page_size, head_dim, k_cache.dtype)
    for cache in (k_cache, v_cache):
        assert num_kv_heads == 1 or cache.stride(1) == head_block, "a page's heads are apart"
        assert cache.stride()[2:] == (head_dim, 1), "a page's tokens are apart"
    block_heads = min(8, triton.next_power_of_2(num_rows))
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_rows, block_heads))](
        qkv, cos, sin, positions, slots, q_norm, k_norm, k_cache, v_cache, qkv.stride(0), k_cache.stride(0),
        v_cache.stride(0), cos.shape[0], eps, OFFSET=offset, DISTANCE=pair_distance, NORMS_LAST=norms_last,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        HEAD_BLOCK=head_block, BLOCK_HEADS=block_heads, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _rotate_and_store_kernel(
    qkv, cos, sin, positions, slots, q_norm, k_norm, k_cache, v_cache, qkv_stride, k_page_stride,
    v_page_stride, max_len, eps, OFFSET: tl.constexpr, DISTANCE: tl.constexpr, NORMS_LAST: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """`rotate_and_store` of some heads of one token. Values are stored unturned."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    # Norm weights and angles, too, are read once per head: in the layout of the heads they need no exchange
    # between threads, and all but the first read hit the L1 cache.
    pairs = tl.broadcast_to(tl.arange(0, BLOCK_HALF)[None, :], [BLOCK_HEADS, BLOCK_HALF])
    columns, gap = pair_columns(pairs, HEAD_DIM, DISTANCE)
    dtype = qkv.dtype.element_ty
    in_half = pairs < HEAD_DIM // 2
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half

    pointers = qkv + token * qkv_stride + heads * HEAD_DIM + columns
    first, second = load_pairs(pointers, mask, gap)
    position = tl.minimum(tl.load(positions + token), max_len - 1).to(tl.int64)
    angle = position * HEAD_DIM + columns
    new_first, new_second = norm_and_turn(
        first, second, cos + angle, sin + angle, is_query, q_norm, k_norm, columns, gap, in_half, eps, dtype,
        HEAD_DIM, OFFSET, NORMS_LAST,
    )  # fmt: skip
    turns = is_query | is_key if k_cache.dtype.element_ty != tl.uint8 else is_query
    tl.store(pointers, new_first, mask=mask & turns)
    tl.store(pointers + gap, new_second, mask=mask & turns)

    slot = tl.load(slots + token).to(tl.int64)
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    is_stored = (is_key | is_value) & (slot >= 0)
    kv_heads = heads - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    cache = tl.where(is_value, v_cache + page * v_page_stride, k_cache + page * k_page_stride)
    cache += kv_heads * HEAD_BLOCK
    first = tl.where(is_value, first.to(dtype), new_first)
    second = tl.where(is_value, second.to(dtype), new_second)
    if k_cache.dtype.element_ty == tl.uint8:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        larger = tl.maximum(tl.abs(wide_first), tl.abs(wide_second), propagate_nan=tl.PropagateNan.ALL)
        scales = scales_for(largest_of(larger))
        first, second = quantized(wide_first, scales), quantized(wide_second, scales)
        places = cache + (PAGE_SIZE * HEAD_DIM + offset)
        tl.store(places, scales[:, None].to(tl.uint8), mask=is_stored)
        read_first = (numbers(first) * factors(scales)[:, None]).to(dtype)
        read_second = (numbers(second) * factors(scales)[:, None]).to(dtype)
        tl.store(pointers, read_first, mask=mask & (is_key | is_value))
        tl.store(pointers + gap, read_second, mask=mask & (is_key | is_value))
    places = cache + offset * HEAD_DIM + columns
    tl.store(places, first, mask=mask & is_stored)
    tl.store(places + gap, second, mask=mask & is_stored)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float | None = None,
    pair_distance: int | None = None,
    norms_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """`train.operations.rotate`: a token's part of `qkv` and the tables are contiguous, of one type."""
    num_tokens, num_parts, head_dim = qkv.shape
    num_kv_heads = (num_parts - num_heads) // 2
    _check(qkv, cos, sin, q_norm, k_norm)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((num_tokens, num_kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_half = triton.next_power_of_2(head_dim // 2)
    rows = max(_TILE // block_half, 1)
    num_rows = num_tokens * (num_heads + num_kv_heads)
    _rotate_kernel[(triton.cdiv(num_rows, rows),)](
        qkv, cos, sin, q_norm, k_norm, q, k, qkv.stride(0), eps, num_rows, OFFSET=offset,
        DISTANCE=pair_distance, NORMS_LAST=norms_last, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, ROWS=rows, BLOCK_HALF=block_half, num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return q, k


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    qkv, cos, sin, q_norm, k_norm, q, k, qkv_stride, eps, num_rows, OFFSET: tl.constexpr,
    DISTANCE: tl.constexpr, NORMS_LAST: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """`rotate` of some queries and keys, in the order of `qkv`: heads of one token, then the next token's."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    columns, gap = pair_columns(pairs, HEAD_DIM, DISTANCE)
    token = (row // (NUM_HEADS + NUM_KV_HEADS)).to(tl.int64)
    head = row % (NUM_HEADS + NUM_KV_HEADS)
    is_query = head < NUM_HEADS
    mask = (row < num_rows) & (pairs < HEAD_DIM // 2)
    dtype = qkv.dtype.element_ty

    pointers = qkv + token * qkv_stride + head * HEAD_DIM + columns
    first, second = load_pairs(pointers, mask, gap)
    angle = token * HEAD_DIM + columns
    new_first, new_second = norm_and_turn(
        first, second, cos + angle, sin + angle, is_query, q_norm, k_norm, columns, gap, mask, eps, dtype,
        HEAD_DIM, OFFSET, NORMS_LAST,
    )  # fmt: skip
    q_row = q + (token * NUM_HEADS + head) * HEAD_DIM
    k_row = k + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    output = tl.where(is_query, q_row, k_row) + columns
    tl.store(output, new_first, mask=mask)
    tl.store(output + gap, new_second, mask=mask)


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
    offset: float | None = None,
    pair_distance: int | None = None,
    norms_last: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`train.operations.rotate_backward`: gradients of one type, a token's part contiguous in each."""
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
        grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, grad_qkv, sums, grad_q.stride(0),
        grad_k.stride(0), grad_v.stride(0), qkv.stride(0), eps, num_rows, OFFSET=offset,
        DISTANCE=pair_distance, NORMS_LAST=norms_last, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, ROWS=rows, BLOCK_HALF=block_half, num_warps=_NUM_WARPS,
    )  # fmt: skip
    if sums is None:
        return grad_qkv, None, None
    grad_q_norm, grad_k_norm = sums.sum(0)
    return grad_qkv, grad_q_norm, grad_k_norm


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_backward_kernel(
    grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, grad_qkv, sums, grad_q_stride, grad_k_stride,
    grad_v_stride, qkv_stride, eps, num_rows, OFFSET: tl.constexpr, DISTANCE: tl.constexpr,
    NORMS_LAST: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """`rotate_backward` of every `num_programs`-th tile of ROWS heads of `qkv`, values included.

    With g a head's gradient turned back by its angle, it writes g for heads without norms; with norms, the
    norm's gradient given g (see `rms_norm_backward`), and adds up the weights' gradients in `sums` [programs,
    2, D], queries' before keys'. With NORMS_LAST the norm's gradient comes first, at the turned heads. The
    values of a pair (`*_first`, `*_second`) are held apart.
    """
    NUM_PARTS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    program = tl.program_id(0)
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    columns, gap = pair_columns(pairs, HEAD_DIM, DISTANCE)
    in_half = pairs < HEAD_DIM // 2
    dtype = grad_qkv.dtype.element_ty
    if q_norm is not None:
        # Sums are kept per row, too, and added up once at the end: no exchange between threads in the loop.
        q_sum_first = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
        q_sum_second = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
        k_sum_first = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
        k_sum_second = tl.zeros([ROWS, BLOCK_HALF], dtype=tl.float32)
    # The loop is not pipelined: pipelined copies bypass the L1 cache, so every row would fetch angles.
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
        grad_first, grad_second = load_pairs(pointers, mask, gap)

        angle = token * HEAD_DIM + columns
        cos_first, cos_second = load_pairs(cos + angle, turns, gap)
        sin_first, sin_second = load_pairs(sin + angle, turns, gap)
        if NORMS_LAST:
            first, second = grad_first, grad_second
        else:
            first = grad_first * cos_first + grad_second * sin_second
            second = grad_second * cos_second - grad_first * sin_first

        if q_norm is not None:
            x = qkv + token * qkv_stride + head * HEAD_DIM + columns
            x_first, x_second = load_pairs(x, turns, gap)
            if NORMS_LAST:
                new_first = turned(x_first, x_second, cos_first, sin_first, -1, dtype, True)
                new_second = turned(x_second, x_first, cos_second, sin_second, 1, dtype, True)
                x_first, x_second = new_first.to(tl.float32), new_second.to(tl.float32)
            inverse = heads_inverse_rms(x_first, x_second, eps, HEAD_DIM)
            x_first, x_second = x_first * inverse, x_second * inverse
            grad_weight_first = first * multiplied(x_first, dtype, OFFSET)
            grad_weight_second = second * multiplied(x_second, dtype, OFFSET)
            # Rows that hold values, and rows past the end, have gradients of zero here.
            q_sum_first += tl.where(is_query, grad_weight_first, 0.0)
            q_sum_second += tl.where(is_query, grad_weight_second, 0.0)
            k_sum_first += tl.where(is_query, 0.0, grad_weight_first)
            k_sum_second += tl.where(is_query, 0.0, grad_weight_second)
            norm = tl.where(is_query, q_norm, k_norm) + columns
            weight_first, weight_second = load_pairs(norm, turns, gap)
            if OFFSET is not None:
                weight_first, weight_second = OFFSET + weight_first, OFFSET + weight_second
            first, second = first * weight_first, second * weight_second
            mean = (tl.sum(first * x_first, axis=1) + tl.sum(second * x_second, axis=1))[:, None] / HEAD_DIM
            first = inverse * (first - x_first * mean)
            second = inverse * (second - x_second * mean)
            if NORMS_LAST:
                normed_first, normed_second = first, second
                first = normed_first * cos_first + normed_second * sin_second
                second = normed_second * cos_second - normed_first * sin_first

        first, second = tl.where(is_value, grad_first, first), tl.where(is_value, grad_second, second)
        output = grad_qkv + row.to(tl.int64) * HEAD_DIM + columns
        tl.store(output, first.to(dtype), mask=mask)
        tl.store(output + gap, second.to(dtype), mask=mask)
    if q_norm is not None:
        total = sums + program * (2 * HEAD_DIM) + columns
        tl.store(total, tl.sum(q_sum_first, axis=0)[None, :], mask=in_half)
        tl.store(total + gap, tl.sum(q_sum_second, axis=0)[None, :], mask=in_half)
        tl.store(total + HEAD_DIM, tl.sum(k_sum_first, axis=0)[None, :], mask=in_half)
        tl.store(total + HEAD_DIM + gap, tl.sum(k_sum_second, axis=0)[None, :], mask=in_half)


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
