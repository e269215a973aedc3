"""Attention over a pack, forward and backward.

A group's completions attend to their shared prompt and to themselves in two parts, merged by their
log-sum-exps. The backward pass needs no merging: with P = exp(S - lse) and the whole attention's output and
log-sum-exp, each part's gradients are those of its own keys (FlashAttention-2, arXiv:2307.08691, algorithm 2,
in which keys are visited block by block: a part is a block).

On CUDA in half precision the parts run through cuDNN where it can be called (`cudnn_attention`), else through
the FlashAttention kernels that PyTorch brings; both accept runs of different lengths without padding.
Elsewhere they run through matrix products on padded batches of runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from colocate.kernels.fallbacks import why_not_flash
from colocate.policy import cudnn_attention
from colocate.policy.operations import merge_attention
from colocate.policy.pack import Pack, Runs

_MAX_SCORES = 2**25
"""The most scores that one padded batch may have: 128 MiB of them in float32."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, *, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of every sequence of the pack.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with K dividing H.
        window: a token sees itself and the `window - 1` before it; None: all before it.

    Returns:
        [T, H, D] and the log-sum-exp of the scores, [H, T] in float32 (float64 for float64).

    Raises:
        ValueError: a window shorter than a sequence whose prompt is shared.
    """
    out, lse = _forward(q, k, v, pack.own, scale, window)
    if pack.to_prompts is not None:
        _check_window(pack, window)
        runs = pack.to_prompts
        other = _forward(q[runs.queries], k[runs.keys], v[runs.keys], runs, scale, None)
        merged = merge_attention(out[runs.queries], lse[:, runs.queries], *other)
        out[runs.queries], lse[:, runs.queries] = merged
    return out, lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pack: Pack,
    *,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k and v of `attention`, whose results are `out` and `lse`.

    Args:
        grad: [T, H, D], the gradient of the output `out`.
    """
    grad_q, grad_k, grad_v = _backward(grad, q, k, v, out, lse, pack.own, scale, window)
    if pack.to_prompts is not None:
        runs = pack.to_prompts
        queries, keys = runs.queries, runs.keys
        part = _backward(
            grad[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries], runs, scale, None
        )
        grad_q[queries] += part[0]
        grad_k[keys] += part[1]
        grad_v[keys] += part[2]
    return grad_q, grad_k, grad_v


def _check_window(pack: Pack, window: int | None) -> None:
    if window is not None and window < pack.longest_sequence:
        raise ValueError(
            f"A layer sees {window} tokens back and sequences have up to {pack.longest_sequence}: their "
            "completions see only a part of the prompt, which therefore cannot be shared. Set "
            "share_prompts=False."
        )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    if not _runs_flash(q):
        return _plain_forward(q, k, v, runs, scale, window)
    if window is None and cudnn_attention.has_cudnn(q.device, q.dtype, q.shape[2]):
        return cudnn_attention.forward(q, k, v, runs, scale)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, runs.cu_queries, runs.cu_keys, max(runs.query_lengths), max(runs.key_lengths),
        0.0, runs.is_causal, False, scale=scale, window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if runs.is_causal else -1,
    )  # fmt: skip
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _runs_flash(q):
        return _plain_backward(grad, q, k, v, out, lse, runs, scale, window)
    if window is None and cudnn_attention.has_cudnn(q.device, q.dtype, q.shape[2]):
        return cudnn_attention.backward(grad, q, k, v, out, lse, runs, scale)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of its random numbers
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse.contiguous(), runs.cu_queries, runs.cu_keys,
        max(runs.query_lengths), max(runs.key_lengths), 0.0, runs.is_causal, no_dropout, no_dropout,
        scale=scale, window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if runs.is_causal else -1,
    )  # fmt: skip


def _runs_flash(q: Tensor) -> bool:
    return q.is_cuda and why_not_flash(q.dtype, q.shape[2]) is None


# ── Anywhere ─────────────────────────────────────────────────────────────────────────────────────────────


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
    for rows, columns, mask in _padded_batches(runs, q.shape[1], window, q.device):
        scores = _scores(q, k, rows, columns, mask, scale)
        batch_lse = scores.logsumexp(-1)  # [n, H, Lq]
        values = _padded(v, columns, q.shape[1])
        batch_out = (scores - batch_lse[..., None]).exp() @ values
        is_real = rows >= 0
        out[rows[is_real]] = batch_out.transpose(1, 2)[is_real].to(q.dtype)
        lse[:, rows[is_real]] = batch_lse.transpose(1, 2)[is_real].T
    return out, lse


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with P = exp(scale Q K^T - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)),
    dQ = scale dS K, dK = scale dS^T Q."""
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    wide = lse.dtype
    grad_q = torch.zeros_like(q, dtype=wide)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, columns, mask in _padded_batches(runs, num_heads, window, q.device):
        scores = _scores(q, k, rows, columns, mask, scale)
        p = (scores - lse.T[rows.clamp(min=0)].transpose(1, 2)[..., None]).exp()
        p.masked_fill_((rows < 0)[:, None, :, None], 0.0)
        d_out, queries = _padded(grad, rows, num_heads), _padded(q, rows, num_heads)
        delta = (d_out * _padded(out, rows, num_heads)).sum(-1, keepdim=True)
        d_scores = p * (d_out @ _padded(v, columns, num_heads).mT - delta) * scale
        d_queries = d_scores @ _padded(k, columns, num_heads)
        is_row, is_column = rows >= 0, columns >= 0
        grad_q[rows[is_row]] = d_queries.transpose(1, 2)[is_row]
        for total, per_head in ((grad_k, d_scores.mT @ queries), (grad_v, p.mT @ d_out)):
            # [n, H, Lk, D] -> [n, Lk, K, D]: the query heads of one key head add up.
            summed = per_head.unflatten(1, (num_kv_heads, -1)).sum(2).transpose(1, 2)
            total[columns[is_column]] = summed[is_column]
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _padded_batches(
    runs: Runs, num_heads: int, window: int | None, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of n runs of similar lengths: the token indices of their queries [n, Lq] and keys [n, Lk], -1
    for padding, and the mask [n, 1, Lq, Lk] of the keys that each query sees."""
    queries, keys = _starts(runs.query_lengths), _starts(runs.key_lengths)
    order = sorted(range(len(queries)), key=lambda n: (runs.query_lengths[n], runs.key_lengths[n]))
    while order:
        batch: list[int] = []
        longest = [0, 0]
        while order:
            grown = [
                max(longest[0], runs.query_lengths[order[-1]]),
                max(longest[1], runs.key_lengths[order[-1]]),
            ]
            if batch and (len(batch) + 1) * num_heads * grown[0] * grown[1] > _MAX_SCORES:
                break
            longest = grown
            batch.append(order.pop())
        rows = _indices([(queries[n], runs.query_lengths[n]) for n in batch], longest[0], device)
        columns = _indices([(keys[n], runs.key_lengths[n]) for n in batch], longest[1], device)
        mask = (columns >= 0)[:, None, None, :]
        if runs.is_causal:
            distance = torch.arange(longest[0], device=device)[:, None] - torch.arange(
                longest[1], device=device
            )
            mask = mask & (distance >= 0) & (distance < (window or longest[1]))
        yield rows, columns, mask


def _starts(lengths: tuple[int, ...]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]


def _indices(runs: list[tuple[int, int]], longest: int, device: torch.device) -> Tensor:
    start, length = torch.tensor(runs).T[..., None]
    offset = torch.arange(longest)
    return torch.where(offset < length, start + offset, -1).to(device)


def _scores(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = _padded(q, rows, q.shape[1]) @ _padded(k, columns, q.shape[1]).mT * scale
    # Padded queries see what others see: a row without any key would make their (unused) results NaN.
    return scores.masked_fill(~mask, -torch.inf)


def _padded(x: Tensor, indices: Tensor, num_heads: int) -> Tensor:
    """[T, heads, D] -> [n, num_heads, L, D] in float32 (or float64), heads repeated up to `num_heads`."""
    padded = x[indices.clamp(min=0)].transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    return padded.repeat_interleave(num_heads // x.shape[1], dim=1)
