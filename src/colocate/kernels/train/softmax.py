"""Softmax of a head's products with the hidden states, and its gradient, each in one pass over them.

Both are bound by memory: [n, V] in float32 is 622 MB for 1024 tokens and a vocabulary of 152k, most of the
traffic of the neighbouring matrix product. So a logit is made of its product in registers (bias, scale, soft
cap and temperature), the forward pass reads each product once and writes a few numbers per row, and the
backward pass reads it once and writes the gradient in the type that the next matrix product takes.

In both, with x a product:  z = inner * (x + bias),  or with a soft cap  z = outer * tanh(inner * (x + bias)).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 512
"""Columns that one row of a tile spans: each thread has four, one load of 16 bytes."""
_UNROLL = 8
"""Rows of a tile. A thread loads them all before it waits, and rescales its sums once for all of them."""
_TILES_PER_SPLIT = 8
"""Tiles that one program reduces. A row of 152k columns is then cut into five programs: 1024 rows keep 132
multiprocessors evenly busy to the end, where one program per row would leave the last wave half empty."""
_GRADIENT_BLOCK = 4096

_LOWEST = tl.constexpr(-1e30)
"""Stands in for -inf, whose difference from itself is NaN."""


def num_splits(vocab_size: int) -> int:
    """The programs that share a row in `softmax_statistics`; each leaves three float32 in memory."""
    return triton.cdiv(vocab_size, _TILES_PER_SPLIT * _UNROLL * _LANES)


def softmax_statistics(
    products: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    inner: float,
    outer: float | None,
    *,
    log_z: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
) -> None:
    """Write every row's log-sum-exp, log-probability of the target and entropy, in nats, in one pass.

    With m = max z, s = Σ exp(z - m) and t = Σ exp(z - m) (z - m): log_z = m + log s, the log-probability is
    z_target - m - log s, and the entropy is log s - t / s. No term of t is positive and log s is not
    negative, so nothing cancels in the entropy, however sure the model is. (The textbook's log_z - Σ p z
    subtracts two numbers of the logits' size from each other.)

    One kernel leaves m, s and t of each of a row's parts (`num_splits`), and a second combines them.

    Args:
        products: [n, V] float32, rows contiguous.
        targets: [n] int64. One outside of [0, V) gives a NaN log-probability.
        bias: [V].
        inner, outer: see the module; `outer` None: no soft cap.
        log_z, logprobs, entropies: [n] float32, written.
    """
    num_rows, vocab_size = products.shape
    assert products.dtype == torch.float32 and products.stride(1) == 1, "rows of float32, each contiguous"
    assert targets.is_contiguous() and log_z.is_contiguous(), "one number per row, next to each other"
    assert logprobs.is_contiguous() and entropies.is_contiguous(), "one number per row, next to each other"
    splits = num_splits(vocab_size)
    partials = torch.empty(3, num_rows, splits, dtype=torch.float32, device=products.device)
    num_tiles = min(triton.cdiv(vocab_size, _UNROLL * _LANES), _TILES_PER_SPLIT)
    _reduce_split_kernel[(num_rows, splits)](
        products, bias, partials, products.stride(0), vocab_size, inner, 0.0 if outer is None else outer,
        HAS_CAP=outer is not None, NUM_TILES=num_tiles, UNROLL=_UNROLL, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    _combine_splits_kernel[(num_rows,)](
        products, targets, bias, partials, log_z, logprobs, entropies, products.stride(0), vocab_size, splits,
        inner, 0.0 if outer is None else outer,
        HAS_CAP=outer is not None, MAX_SPLITS=triton.next_power_of_2(splits), num_warps=1,
    )  # fmt: skip


def softmax_gradient(
    products: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    inner: float,
    outer: float | None,
    *,
    log_z: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    first_column: int,
    out: Tensor,
) -> None:
    """Write the gradient with respect to the products of some columns of the vocabulary.

    d(logp_t)/dz_v = 1[v = t] - p_v and dH/dz_v = -p_v (log p_v + H), each times its row's incoming gradient,
    summed, and times dz/dx, which is `inner` or, with a soft cap, inner * outer * (1 - (z / outer)^2). As
    p_v = exp(z_v - log_z) needs only the row's `log_z`, any columns can be done by themselves.

    Args:
        products: [n, columns] float32, rows contiguous: columns `first_column` on of the vocabulary.
        targets: [n] int64, as tokens of the whole vocabulary.
        bias: [columns].
        log_z: [n] float32, over the whole vocabulary.
        entropies: [n] float32; needed for `grad_entropies` only.
        grad_logprobs, grad_entropies: [n] float32; None: zero.
        out: [n, columns] bfloat16, float16 or float32, rows contiguous, written.
    """
    num_rows, num_columns = products.shape
    assert products.dtype == torch.float32 and products.stride(1) == 1, "rows of float32, each contiguous"
    assert out.shape == products.shape and out.stride(1) == 1, "the gradient has the products' shape"
    assert targets.is_contiguous() and log_z.is_contiguous(), "one number per row, next to each other"
    assert grad_entropies is None or entropies is not None, "the entropy's gradient needs the entropy"
    if grad_logprobs is not None:
        grad_logprobs = grad_logprobs.contiguous()  # the gradient of a sum is one number, expanded
    if grad_entropies is not None:
        grad_entropies = grad_entropies.contiguous()
    _gradient_kernel[(num_rows, triton.cdiv(num_columns, _GRADIENT_BLOCK))](
        products, targets, bias, log_z, entropies, grad_logprobs, grad_entropies, out, products.stride(0),
        out.stride(0), num_columns, first_column, inner, 0.0 if outer is None else outer,
        HAS_CAP=outer is not None, BLOCK=_GRADIENT_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _tanh(x):
    """tanh(x), off by at most 2e-7, which is as exact as a float32 logit needs it."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _logits(values, bias, columns, mask, inner, outer, HAS_CAP: tl.constexpr):
    """Logits z made of products `values`: inner * (x + bias), and with HAS_CAP outer * tanh of that."""
    if bias is not None:
        values += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    values = values * inner
    if HAS_CAP:
        values = outer * _tanh(values)
    return values


@triton.jit
def _reduce_split_kernel(
    products, bias, partials, stride, vocab_size, inner, outer,
    HAS_CAP: tl.constexpr, NUM_TILES: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Reduce one part of one row to its m, s and t (see `softmax_statistics`).

    Each of the LANES columns of a tile keeps three numbers of its own to the end (`lane_max`, `lane_sum` and
    `lane_weighted` are its m, s and t), so that no thread waits for another within the loop. When m rises by
    d, every z - m falls by d: s becomes s exp(-d), and t becomes (t - d s) exp(-d).
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    offsets = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_max = tl.full([LANES], _LOWEST, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    lane_weighted = tl.zeros([LANES], tl.float32)
    for tile in range(NUM_TILES):
        columns = (split * NUM_TILES + tile) * (UNROLL * LANES) + offsets
        mask = columns < vocab_size
        values = tl.load(products + row * stride + columns, mask=mask, other=0.0)
        values = _logits(values, bias, columns, mask, inner, outer, HAS_CAP)
        # A comparison and not a maximum, which may lose a NaN: that must show in the result.
        values = tl.where(mask, tl.where(values < _LOWEST, _LOWEST, values), _LOWEST)
        highest = tl.maximum(lane_max, tl.max(values, axis=0))
        distance = values - highest[None, :]
        shares = tl.exp(distance)
        rise = lane_max - highest
        decay = tl.exp(rise)
        lane_weighted = decay * (lane_weighted + rise * lane_sum) + tl.sum(shares * distance, axis=0)
        lane_sum = decay * lane_sum + tl.sum(shares, axis=0)
        lane_max = highest
    highest = tl.max(lane_max, axis=0)
    rise = lane_max - highest
    decay = tl.exp(rise)
    weighted = tl.sum(decay * (lane_weighted + rise * lane_sum), axis=0)
    total = tl.sum(decay * lane_sum, axis=0)
    num_splits = tl.num_programs(1)
    pointer = partials + row * num_splits + split
    step = tl.num_programs(0).to(tl.int64) * num_splits
    tl.store(pointer, highest)
    tl.store(pointer + step, total)
    tl.store(pointer + 2 * step, weighted)


@triton.jit
def _combine_splits_kernel(
    products, targets, bias, partials, log_z, logprobs, entropies, stride, vocab_size, num_splits, inner,
    outer,
    HAS_CAP: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the m, s and t of a row's parts, by the rule of `_reduce_split_kernel`, and write its results.

    `partials` is [3, rows, num_splits]. log_z, log-probability and entropy follow as in `softmax_statistics`.
    """
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    pointers = partials + row * num_splits + splits
    step = tl.num_programs(0).to(tl.int64) * num_splits
    maxima = tl.load(pointers, mask=mask, other=_LOWEST)
    sums = tl.load(pointers + step, mask=mask, other=0.0)
    weighted = tl.load(pointers + 2 * step, mask=mask, other=0.0)
    highest = tl.max(maxima, axis=0)
    rise = maxima - highest
    decay = tl.exp(rise)
    total = tl.sum(decay * sums, axis=0)
    # log 1 = 0, but the hardware's logarithm near 1 is off by 1e-7: the entropy would come out below zero.
    log_total = tl.maximum(tl.log(total), 0.0)
    log_total = tl.where(total == total, log_total, total)
    entropy = log_total - tl.sum(decay * (weighted + rise * sums), axis=0) / total

    target = tl.load(targets + row)
    in_vocab = (target >= 0) & (target < vocab_size)
    value = tl.load(products + row * stride + target, mask=in_vocab, other=float("nan"))
    value = _logits(value, bias, target, in_vocab, inner, outer, HAS_CAP)
    tl.store(log_z + row, highest + log_total)
    tl.store(logprobs + row, (value - highest) - log_total)
    tl.store(entropies + row, entropy)


@triton.jit
def _gradient_kernel(
    products, targets, bias, log_z, entropies, grad_logprobs, grad_entropies, out, stride, out_stride,
    num_columns, first_column, inner, outer,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`softmax_gradient` of one row's BLOCK columns: one read of the products, one write of `out`.

    `stride` and `out_stride` are from row to row; column 0 of `products` is the vocabulary's `first_column`.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    values = tl.load(products + row * stride + columns, mask=mask, other=0.0)
    values = _logits(values, bias, columns, mask, inner, outer, HAS_CAP)
    log_p = values - tl.load(log_z + row)
    p = tl.exp(log_p)
    gradient = tl.zeros([BLOCK], tl.float32)
    if grad_logprobs is not None:
        grad_logprob = tl.load(grad_logprobs + row)
        target = tl.load(targets + row) - first_column
        gradient = grad_logprob * (tl.where(columns == target, 1.0, 0.0) - p)
    if grad_entropies is not None:
        # p log p is 0 where p is, also where log p is -inf.
        log_p = tl.where(p > 0, log_p, 0.0)
        gradient -= tl.load(grad_entropies + row) * p * (log_p + tl.load(entropies + row))
    if HAS_CAP:
        ratio = values / outer
        gradient *= inner * outer * (1.0 - ratio * ratio)
    else:
        gradient *= inner
    tl.store(out + row * out_stride + columns, gradient.to(out.dtype.element_ty), mask=mask)
