"""Definitions, in PyTorch operations, of the kernels of a decoder layer, with their constants.

The native engine (`TorchBackend`) and the trainer (`kernels.train.operations`) run these functions where no
kernel runs, so that both agree by construction; tests measure the kernels against them. They follow
transformers' modelling code operation by operation, roundings to the model's type included. No Triton is
imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from colocate.weights.low_rank import LowRank

BLOCK_SIZE = 256
"""Tokens per block of the sampler's two-level draw. Part of the definition of a completion: changing it
changes all draws."""


@dataclass(frozen=True)
class Rotation:
    """The steps of heads of queries and keys before attention: norms (Qwen3's), then rotary embedding, or in
    the other order."""

    cos: Tensor  # [positions, D] in the model's type, contiguous
    sin: Tensor  # [positions, D] in the model's type, contiguous
    q_norm: Tensor | None  # [D], weights of the heads' norm; None: the architecture has none
    k_norm: Tensor | None  # [D], there if `q_norm` is
    eps: float  # of the norms
    offset: float | None = None  # of the norms' weights, see `rms_norm`
    pair_distance: int | None = None
    """The distance of two values that are turned with one another: 1, neighbours (GLM-4), or half of the
    part of a head that is turned (Phi-4-mini); None: half of the head. Values that are not turned have an
    angle of 0 in the tables."""
    norms_last: bool = False
    """Whether the norms come after the rotation (Hunyuan's)."""


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square over the last dimension, which keeps size 1, in the type of `wide(x)`."""
    return torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last dimension.

    Args:
        x: [..., D].
        weight: [D].
        offset: None: the norm is rounded to the type of `x` and then multiplied by the weight, as in Llama. A
            number is added to the weight (1 in Gemma), and the product is taken in float32 and rounded once.
    """
    normed = wide(x) * inverse_rms(x, eps)
    if offset is None:
        return weight * normed.to(x.dtype)
    return (normed * (offset + wide(weight))).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pair_distance: int | None = None) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864): value i of a head is turned with value i + D / 2,
    or as `Rotation.pair_distance` says.

    Args:
        x: [T, heads, D].
        cos, sin: [T, 1, D].
    """
    return x * cos + partners(x, pair_distance) * sin


def partners(x: Tensor, pair_distance: int | None) -> Tensor:
    """The other value of each value's pair in heads [..., D], negated at the first of the two. The negative
    of this is its transpose."""
    if pair_distance == 1:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-second, first), dim=-1).flatten(-2)
    turned = x if pair_distance is None else x[..., : 2 * pair_distance]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((-second, first, x[..., turned.shape[-1] :]), dim=-1)


def norm_and_rotate(
    heads: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float | None = None,
    pair_distance: int | None = None,
    norms_last: bool = False,
) -> Tensor:
    """`rotate` of heads [T, heads, D], after their norm with weights `norm` [D] where there is one, or before
    it."""
    if norm is not None and not norms_last:
        heads = rms_norm(heads, norm, eps, offset)
    heads = rotate(heads, cos[:, None], sin[:, None], pair_distance)
    return rms_norm(heads, norm, eps, offset) if norm is not None and norms_last else heads


def gate(activation: Callable[[Tensor], Tensor], gate_up: Tensor, low_rank: LowRank | None = None) -> Tensor:
    """activation(gate) * up of [T, 2i], gates first; returns [T, i] (Shazeer 2020, arXiv:2002.05202).

    Args:
        low_rank: the adapters' term for `gate_up`, in two blocks of width i; `gate_up` is not changed.
    """
    if low_rank is not None:
        gate_up = low_rank.added_to(gate_up)
    gates, up = gate_up.chunk(2, dim=1)
    return activation(gates) * up


def is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether the activation is SiLU."""
    return activation is F.silu or isinstance(activation, (nn.SiLU, SiLUActivation))


def is_tanh_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether the activation is the tanh approximation of GELU."""
    return isinstance(activation, GELUTanh) or getattr(activation, "approximate", None) == "tanh"


def has_gate_kernels(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether the gate's kernels compute the activation."""
    return is_silu(activation) or is_tanh_gelu(activation)


def multiply(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """Write or add a @ b to `out`, rounded to the type of `out` only: logits around 20 that were rounded to
    bf16 on the way would be off by 0.06."""
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    if not (a.is_cuda and a.dtype == b.dtype):  # a CPU's products of bf16 round to bf16
        a, b = a.to(wide), b.to(wide)
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.dtype == wide:
        out.copy_(out + a @ b if accumulate else a @ b)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b in float32 at least."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    out = torch.empty(len(a), b.shape[1], dtype=dtype, device=a.device)
    multiply(a, b, out=out)
    return out
