"""The operations of a decoder layer between its matrix products, with the backward passes written out.

Everything here is bound by memory. On a GPU each function is one Triton kernel, which reads and writes every
byte once; elsewhere it is a few PyTorch operations, which are also its definition: the forward functions are
those of the native engine (`kernels.definitions`), the backward functions are below. Values are rounded to
the model's type where the operations of transformers would store them, so that log-probs agree with the
engine's; gradients are computed in float32 and rounded once. Forward and backward are called by hand:
autograd does not see through kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colocate.kernels import definitions
from colocate.kernels.definitions import has_gate_kernels, inverse_rms, is_silu, is_tanh_gelu, wide
from colocate.weights.low_rank import LowRank


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension; see `definitions.rms_norm`.

    Args:
        x: [T, hidden] or [T, heads, D].
        weight: [hidden] or [D].
        offset: added to the weight.
    """
    if x.dim() == 2 and _have_kernels(x, weight):
        from colocate.kernels.layer import norms

        return norms.rms_norm(x, weight, eps, offset)
    return definitions.rms_norm(x, weight, eps, offset)


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad_residual: Tensor | None = None,
    offset: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` with respect to its input and its weight.

    With r = 1 / rms(x), y = x r and g = grad * weight: dx = r (g - y mean(g y)), dweight = sum_T grad y.

    Args:
        grad: gradient of the norm's output, shaped like `x`.
        grad_residual: a gradient that reaches `x` past the norm, shaped like `x` and added to the result.
        out: contiguous, like `x`, for the gradient of `x`; None: a new tensor.

    Returns:
        the gradient of `x`, with its shape and dtype, and that of the weight, [hidden] in float32 (float64
        for float64).
    """
    if x.dim() == 2 and _have_kernels(x, weight):
        from colocate.kernels.layer import norms

        return norms.rms_norm_backward(grad, x, weight, eps, grad_residual, offset, out)
    inverse = inverse_rms(x, eps)
    normed = wide(x) * inverse
    wide_grad = wide(grad)
    multiplied = normed.to(x.dtype) if offset is None else normed
    grad_weight = (wide_grad * multiplied).flatten(0, -2).sum(0)
    scaled = wide_grad * (weight if offset is None else offset + wide(weight))
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_residual is not None:
        grad_x += grad_residual
    return grad_x.to(x.dtype) if out is None else out.copy_(grad_x), grad_weight


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
    """Norms of the heads (Qwen3's), then rotary embedding (Su et al. 2021, arXiv:2104.09864).

    Args:
        qkv: [T, H + 2K, D], queries, keys, values; not changed.
        cos, sin: [T, D] in the model's type.
        num_heads: H.
        q_norm, k_norm: [D], weights of the heads' norms; None: the architecture has none.
        eps, offset: constants of those norms; see `rms_norm`.
        pair_distance, norms_last: which values are turned together, and whether norms come after it; see
            `definitions.Rotation`.

    Returns:
        queries [T, H, D] and keys [T, K, D], contiguous.
    """
    constants = eps, offset, pair_distance, norms_last
    if _have_kernels(qkv, cos, sin, q_norm, k_norm):
        from colocate.kernels.layer import rotary

        return rotary.rotate(qkv, cos, sin, num_heads, q_norm, k_norm, *constants)
    q, k, _ = _heads(qkv, num_heads)
    turned_q = definitions.norm_and_rotate(q, q_norm, cos, sin, *constants)
    return turned_q, definitions.norm_and_rotate(k, k_norm, cos, sin, *constants)


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
    """Gradients of `rotate` with respect to `qkv` (the values' gradient is copied in) and the norms.

    A rotation's inverse is its transpose, so gradients are turned back by the negative angle. The code
    computes the transpose itself, which is the gradient for any tables: some are scaled (YaRN's), and the two
    halves of a table need not be equal.

    Args:
        grad_q: [T, H, D]; grad_k, grad_v: [T, K, D].
        qkv: the input of `rotate`; read only where there are norms.

    Returns:
        [T, H + 2K, D] in the dtype of `qkv`; [D] float32 (or float64) for either norm's weight, or None.
    """
    if _have_kernels(qkv, cos, sin, q_norm, k_norm):
        from colocate.kernels.layer import rotary

        constants = eps, offset, pair_distance, norms_last
        return rotary.rotate_backward(grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, *constants)
    grads: list[Tensor] = []
    weight_grads: list[Tensor | None] = []
    q, k, _ = _heads(qkv, grad_q.shape[1])
    for grad, x, norm in ((grad_q, q, q_norm), (grad_k, k, k_norm)):
        grad_norm = None
        if norm is not None and norms_last:
            turned = definitions.rotate(x, cos[:, None], sin[:, None], pair_distance)
            grad, grad_norm = rms_norm_backward(wide(grad), turned, norm, eps, offset=offset)
        grad = wide(grad)
        grad = grad * cos[:, None] - definitions.partners(grad * sin[:, None], pair_distance)
        if norm is not None and not norms_last:
            grad, grad_norm = rms_norm_backward(grad, x, norm, eps, offset=offset)
        grads.append(grad.to(qkv.dtype))
        weight_grads.append(grad_norm)
    return torch.cat([*grads, grad_v], dim=1), weight_grads[0], weight_grads[1]


def gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor, low_rank: LowRank | None = None) -> Tensor:
    """activation(gate) * up of [T, 2i], gates first; returns [T, i] (Shazeer 2020, arXiv:2002.05202).

    Args:
        low_rank: the adapters' term for `gate_up`, which is not changed.
    """
    if not (has_gate_kernels(activation) and _have_kernels(gate_up)):
        return definitions.gate(activation, gate_up, low_rank)
    from colocate.kernels.matmul import gate as kernels

    is_gelu = is_tanh_gelu(activation)
    if low_rank is None:
        return kernels.silu_mul(gate_up, is_gelu=is_gelu)
    return kernels.silu_mul_low_rank(gate_up, low_rank, is_gelu=is_gelu)


def gate_backward(
    grad: Tensor,
    activation: Callable[[Tensor], Tensor],
    gate_up: Tensor,
    low_rank: LowRank | None = None,
    grad_low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of `gate` with respect to its input, and `gate`'s output once more.

    The down projection needs `gate`'s output for its weight's gradient. The output is not kept from the
    forward pass: making it again here, where gate and up are read anyway, costs nothing.

    Args:
        grad: [T, i]; gate_up: [T, 2i].
        low_rank, grad_low_rank: terms to be added to `gate_up` and to `grad` first; None adds nothing.

    Returns:
        [T, 2i] and [T, i].
    """
    has_kernels, is_gelu = has_gate_kernels(activation) and _have_kernels(gate_up), is_tanh_gelu(activation)
    if has_kernels:
        from colocate.kernels.matmul import gate as kernels
    if has_kernels and low_rank is not None and grad_low_rank is not None:
        return kernels.silu_mul_low_rank_backward(grad, gate_up, low_rank, grad_low_rank, is_gelu=is_gelu)
    if low_rank is not None:
        gate_up = low_rank.added_to(gate_up)
    if grad_low_rank is not None:
        grad = grad_low_rank.added_to(grad)
    if has_kernels:
        return kernels.silu_mul_backward(grad, gate_up, is_gelu=is_gelu)
    gates, up = gate_up.chunk(2, dim=1)
    grad_gates = _activation_backward(wide(grad) * up, activation, wide(gates))
    activated = activation(gates)
    return torch.cat([grad_gates.to(gate_up.dtype), grad * activated], dim=1), activated * up


def _activation_backward(grad: Tensor, activation: Callable[[Tensor], Tensor], gates: Tensor) -> Tensor:
    """The gradient of `gates`, given that of activation(gates)."""
    if is_silu(activation):  # as autograd does, but for another pass forward
        return torch.ops.aten.silu_backward(grad, gates)
    with torch.enable_grad():
        leaf = gates.detach().requires_grad_()
        return torch.autograd.grad(activation(leaf), leaf, grad)[0]


def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each set.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i) (FlashAttention-2, arXiv:2307.08691,
    section 2.3). A set without keys has lse = -inf; where both have none, out is 0 and lse -inf.

    Args:
        out, other_out: [T, H, D]; lse, other_lse: [H, T] float32 (float64 for float64).

    Returns:
        the merged output and log-sum-exp, shaped like `out` and `lse`, which may be overwritten.
    """
    if _have_kernels(out, other_out):
        from colocate.kernels.train.attention_merge import merge_attention as merge

        merge(out, lse, other_out, other_lse)
        return out, lse
    merged = torch.logaddexp(lse, other_lse)
    finite = merged.masked_fill(merged.isneginf(), 0.0)  # without any key: exp(-inf - 0) = 0 and not NaN
    share, other_share = (lse - finite).exp().T[..., None], (other_lse - finite).exp().T[..., None]
    return (share * out + other_share * other_out).to(out.dtype), merged


def _have_kernels(*tensors: Tensor | None) -> bool:
    """Whether kernels can take these tensors: on a GPU, and of one type, as the model's weights are."""
    first, *rest = (tensor for tensor in tensors if tensor is not None)
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(tensor.dtype == first.dtype for tensor in rest)
    )


def _heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v
