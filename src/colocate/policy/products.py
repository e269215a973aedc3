"""Matrix products that are summed in float32 and rounded once, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


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
