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
from transformers.activations import SiLUActivation

from colocate.weights.low_rank import LowRank

BLOCK_SIZE = 256
"""Tokens per block of the sampler's two-level draw. Part of the definition of a completion: changing it
changes all draws."""


@dataclass(frozen=True)
class Rotation:
    """The steps of heads of queries and keys before attention: norms (Qwen3's), then rotary embedding."""

    cos: Tensor  # [positions, D] in the model's type, contiguous
    sin: Tensor  # [positions, D] in the model's type, contiguous
    q_norm: Tensor | None  # [D], weights of the heads' norm; None: the architecture has none
    k_norm: Tensor | None  # [D], there if `q_norm` is
    eps: float  # of the norms
    offset: float | None = None  # of the norms' weights, see `rms_norm`


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864): value i of a head is turned with value i + D / 2.

    Args:
        x: [T, heads, D].
        cos, sin: [T, 1, D].
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def norm_and_rotate(
    heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, offset: float | None = None
) -> Tensor:
    """`rotate` of heads [T, heads, D], after their norm with weights `norm` [D] where there is one."""
    normed = heads if norm is None else rms_norm(heads, norm, eps, offset)
    return rotate(normed, cos[:, None], sin[:, None])


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
    """Whether the activation is SiLU, the one that the gate's kernels compute."""
    return activation is F.silu or isinstance(activation, (nn.SiLU, SiLUActivation))


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
