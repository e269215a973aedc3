"""One storage for the trainer and the engine.

q, k and v (and gate and up) read the same input, so one matrix product serves them if their weights lie one
below the other. The module's parameters become row slices of that storage: an optimizer that updates them in
place has updated what the engine reads, and nothing is ever copied from one to the other.

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

    With `room_for_adapters` that storage, and those of the other projections, have the rows of an
    `AdapterStack` below, zeros at first (see `stacked_view`).

    The `nn.Parameter` objects stay the same, so optimizers, hooks and `.grad` keep working; only `.data`
    moves. Done again, it finds the storage fused and does nothing; after `model.to(...)`, which undoes it, it
    fuses anew. While it runs, one fused block exists twice. Weights in 4 bits stay as they are, and so do
    those beside them: no product reads codes.
    """
    # Outside inference mode, whose tensors could not be trained.
    with torch.inference_mode(False):
        for layer in layout.layers:
            for modules in layer.projection_groups():
                linears = [base_linear(module) for module in modules]
                stack = AdapterStack.of(projection_adapters(modules)) if room_for_adapters else None
                num_spare = 0 if stack is None else stack.num_rows
                if not any(map(is_4bit, linears)):
                    _fuse([linear.weight for linear in linears], num_spare)
                if linears[0].bias is not None:
                    _fuse([linear.bias for linear in linears], num_spare)


def fused_view(parts: Sequence[Tensor]) -> Tensor:
    """The [sum of rows, ...] tensor of which `parts` are the consecutive row slices; of one part, itself.

    Raises:
        RuntimeError: they are not (`fuse_parameters` was not called, or something re-assigned a parameter).
    """
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
    """`fused_view`, and the `num_rows` rows below it; None if `fuse_parameters` has made no such room."""
    first, rows = parts[0].data, sum(part.shape[0] for part in parts) + num_rows
    # Of exactly this size, the storage was made there, and what is below belongs to nobody else.
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
