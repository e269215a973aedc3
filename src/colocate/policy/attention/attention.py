"""Attention over a pack, forward and backward.

A group's completions attend to their shared prompt and to themselves in two parts, merged by their
log-sum-exps. The backward pass needs no merging: with P = exp(S - lse) and the whole attention's output and
log-sum-exp, each part's gradients are those of its own keys (FlashAttention-2, arXiv:2307.08691, algorithm 2,
in which keys are visited block by block: a part is a block).

On CUDA in half precision the parts run through cuDNN where it can be called (`cudnn_attention`), else through
the FlashAttention kernels that PyTorch brings; both accept runs of different lengths without padding.
Elsewhere they run on padded batches of runs (`padded_attention`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from colocate.kernels.checks.fallbacks import why_not_flash
from colocate.kernels.train.operations import merge_attention
from colocate.policy.attention import cudnn_attention, padded_attention
from colocate.policy.attention.pack import Pack, Runs


def attention(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, *, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of every sequence of the pack.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with K dividing H.
        window: a token sees itself and the `window - 1` before it; None: all before it.

    Returns:
        [T, H, D] and the log-sum-exp of the scores, [H, T] in float32 (float64 for float64).
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
        return padded_attention.forward(q, k, v, runs, scale, window)
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
        return padded_attention.backward(grad, q, k, v, out, lse, runs, scale, window)
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
