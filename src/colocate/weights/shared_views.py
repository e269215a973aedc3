"""One storage of weights for both trainer and engine.

The projections q, k and v (and gate and up) read one input, so a single matrix product computes them if their
weights lie one below the other. The module's parameters become row slices of such a storage. An optimizer
that updates them in place thereby updates the weights that the engine reads, without a copy.

Below the weights there can be room for the A of the projection's adapters, for products that read both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from colocate.weights.adapters import AdapterStack, base_linear, projection_adapters
from colocate.weights.layouts import Layout
from colocate.weights.quantized import is_4bit


def fuse_parameters(layout: Layout, *, room_for_adapters: bool = False) -> None:
    """Make q/k/v and gate/up weights and biases contiguous row slices of one [sum of rows, hidden] storage.

    With `room_for_adapters` the storage of every projection has rows for an `AdapterStack` below the weights,
    zeros at first (see `stacked_view`). Split weights have no such rows, because the adapters are whole; and
    their o and down stay transposed.

    The `nn.Parameter` objects stay the same, so optimizers, hooks and `.grad` keep working; only `.data`
    moves. A second call finds the storage fused and does nothing. `model.to(...)` undoes the fusion, and the
    next call fuses again. During the call one fused block at a time exists twice. The weights of a projection
    with 4-bit codes are not fused, because products read its dequantised weights elsewhere.
    """
    # Inference mode is left, because tensors made in it cannot be trained.
    is_split = layout.part.count > 1
    with torch.inference_mode(False):
        for layer in layout.layers:
            for modules in layer.projection_groups():
                if is_split and len(modules) == 1:
                    continue
                linears = [base_linear(module) for module in modules]
                has_room = room_for_adapters and not is_split
                stack = AdapterStack.of(projection_adapters(modules)) if has_room else None
                num_spare = 0 if stack is None else stack.num_rows
                if not any(map(is_4bit, linears)):
                    _fuse([linear.weight for linear in linears], num_spare)
                if linears[0].bias is not None:
                    _fuse([linear.bias for linear in linears], num_spare)


def fused_view(parts: Sequence[Tensor]) -> Tensor:
    """The tensor [sum of rows, ...] whose consecutive row slices are `parts`; a single part is the tensor."""
    if len(parts) == 1:
        return parts[0].detach()
    if not _is_fused(parts):
        raise RuntimeError(
            "These parameters are not slices of one storage. Call "
            "colocate.weights.shared_views.fuse_parameters after moving or re-assigning parameters."
        )
    first = parts[0].detach()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def stacked_view(parts: Sequence[Tensor], num_rows: int) -> Tensor | None:
    """`fused_view` with the `num_rows` rows below it; None if `fuse_parameters` has not made them."""
    first, rows = parts[0].data, sum(part.shape[0] for part in parts) + num_rows
    # A storage of exactly this size was made by `fuse_parameters`, so the rows below hold nothing else.
    num_bytes = rows * math.prod(first.shape[1:]) * first.element_size()
    is_whole = first.storage_offset() == 0 and first.untyped_storage().nbytes() == num_bytes
    if not (is_whole and _is_fused(parts)):
        return None
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _is_fused(parts: Sequence[Tensor]) -> bool:
    expected = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == storage
        if not (same_storage and part.is_contiguous() and part.data_ptr() == expected):
            return False
        expected += part.numel() * part.element_size()
    return True


def _fuse(parameters: Sequence[Tensor], num_spare: int) -> None:
    if _is_fused(parameters) and (not num_spare or stacked_view(parameters, num_spare) is not None):
        return
    rows = sum(parameter.shape[0] for parameter in parameters)
    fused = parameters[0].detach().new_zeros(rows + num_spare, *parameters[0].shape[1:])
    torch.cat([parameter.detach() for parameter in parameters], out=fused[:rows])
    row = 0
    for parameter in parameters:
        parameter.data = fused[row : row + parameter.shape[0]]
        row += parameter.shape[0]
    assert _is_fused(parameters), "parameters do not share the fused storage after fusing"
