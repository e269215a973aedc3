"""What a decoder layer does between its matrix products, with the backward passes written out.

Everything here is bound by memory: on a GPU each function is one Triton kernel that reads and writes every
byte once (`colocate.policy.kernels`), elsewhere the PyTorch operations below, which are also their
definition. Values are rounded to the model's type where the operations of transformers would store them, so
that log-probs agree with the engine's; gradients are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last dimension.

    Args:
        x: [T, hidden] or [T, heads, D].
        weight: [hidden] or [D].
    """
    return weight * (_wide(x) * _inverse_rms(x, eps)).to(x.dtype)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` with respect to its input and its weight.

    With r = 1 / rms(x), y = x r and g = grad * weight: dx = r (g - y mean(g y)), dweight = sum_T grad y.

    Args:
        grad: of the norm's output, like `x`.
        grad_residual: like `x`: a gradient that reaches `x` past the norm, added to the result.

    Returns:
        like `x`, in its dtype; [hidden] in float32 (float64 for float64).
    """
    inverse = _inverse_rms(x, eps)
    normed = _wide(x) * inverse
    wide_grad = _wide(grad)
    grad_weight = (wide_grad * normed.to(x.dtype)).flatten(0, -2).sum(0)
    scaled = wide_grad * weight
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_residual is not None:
        grad_x += grad_residual
    return grad_x.to(x.dtype), grad_weight


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Norms of the heads (Qwen3's), then rotary embedding (Su et al. 2021, arXiv:2104.09864).

    Args:
        qkv: [T, H + 2K, D], queries, keys, values; not changed.
        cos, sin: [T, D] in the model's type.
        num_heads: H.
        q_norm, k_norm: [D], weights of the heads' norms; None: the architecture has none.

    Returns:
        queries [T, H, D] and keys [T, K, D], contiguous.
    """
    q, k, _ = _heads(qkv, num_heads)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


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

    A rotation's inverse is its transpose, so gradients are turned back by the negative angle.

    Args:
        grad_q: [T, H, D]; grad_k, grad_v: [T, K, D].
        qkv: what `rotate` was given; read only where there are norms.

    Returns:
        [T, H + 2K, D] in the dtype of `qkv`; [D] float32 (or float64) for either norm's weight, or None.
    """
    grads: list[Tensor] = []
    weight_grads: list[Tensor | None] = []
    q, k, _ = _heads(qkv, grad_q.shape[1])
    for grad, x, norm in ((grad_q, q, q_norm), (grad_k, k, k_norm)):
        turned = _wide(_rotated(_wide(grad), _wide(cos), -_wide(sin)))
        if norm is None:
            grads.append(turned.to(qkv.dtype))
            weight_grads.append(None)
        else:
            grad_x, grad_norm = rms_norm_backward(turned, x, norm, eps)
            grads.append(grad_x)
            weight_grads.append(grad_norm)
    return torch.cat([*grads, grad_v], dim=1), weight_grads[0], weight_grads[1]


def gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """activation(gate) * up of [T, 2i], gates first; returns [T, i] (Shazeer 2020, arXiv:2002.05202)."""
    gates, up = gate_up.chunk(2, dim=1)
    return activation(gates) * up


def gate_backward(
    grad: Tensor, activation: Callable[[Tensor], Tensor], gate_up: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of `gate` with respect to its input, and `gate`'s output once more.

    The output is not kept for backward, where the next matrix needs it for its own gradient: making it again
    while gate and up are at hand costs nothing.

    Args:
        grad: [T, i]; gate_up: [T, 2i].

    Returns:
        [T, 2i] and [T, i].
    """
    gates, up = gate_up.chunk(2, dim=1)
    with torch.enable_grad():
        leaf = gates.detach().requires_grad_()
        activated = activation(leaf)
    (grad_gates,) = torch.autograd.grad(activated, leaf, grad * up)
    activated = activated.detach()
    return torch.cat([grad_gates, grad * activated], dim=1), activated * up


def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys from the attention over each.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i) (FlashAttention-2, arXiv:2307.08691,
    section 2.3). A set without keys has lse = -inf.

    Args:
        out, other_out: [T, H, D]; lse, other_lse: [H, T] float32 (float64 for float64).

    Returns:
        Like `out` and `lse`, which may be overwritten.
    """
    merged = torch.logaddexp(lse, other_lse)
    share, other_share = (lse - merged).exp().T[..., None], (other_lse - merged).exp().T[..., None]
    return (share * out + other_share * other_out).to(out.dtype), merged


def _heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(_wide(x).square().mean(-1, keepdim=True) + eps)
