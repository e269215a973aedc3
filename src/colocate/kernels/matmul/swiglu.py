"""silu(x Wg^T) * (x Wu^T) in one kernel (SwiGLU, Shazeer 2020, arXiv:2002.05202).

Gate and up, the widest tensors of a layer, stay in registers; after a product of their own they would be
written, read back and multiplied by one more kernel. The kernels are for compute capability 9.0 and 16-bit
types. With few rows the time goes into loading the weights from memory (the kernel below); with many rows it
goes into the tensor cores' products (`swiglu_many_rows.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from colocate.kernels.launch import can_overlap
from colocate.kernels.matmul.gate import gated
from colocate.kernels.matmul.ping_pong import (
    DEPTH,
    can_multiply,
    fills_tiles,
    num_multiprocessors,
)
from colocate.kernels.matmul.swiglu_many_rows import Tiling, many_rows

FEW_ROWS = 64
"""The smallest warp-group product has 64 rows."""
MIN_WAVES = 2.2
"""The kernel for many rows is used from 2.2 waves of its tiles on. With fewer waves, cuBLAS is as fast with
tiles of other shapes, and the kernel takes three seconds to compile when it is first needed."""
MAX_X_BYTES = 25 * 2**20
"""Most bytes of x: x is read once for every 64 columns of the output, which is cheap as long as x stays in
the L2 cache beside the weights."""


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether `swiglu` can run these tensors, and was faster on an H200 (models of 0.5 to 7 B) than a matrix
    product and a kernel for the gate.

    Args:
        x: [T, in].
        weight: [2i, in].
    """
    return (
        can_multiply(x, weight)
        and len(weight) % 16 == 0  # the output's rows begin at whole 16 bytes
        and x.nbytes <= MAX_X_BYTES
        and has_kernel_for(len(x), _tiling(x, weight))
    )


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, with gate, up and silu(gate) each rounded to the model's type.

    Args:
        x: [T, in] bfloat16 or float16, contiguous, `in` a multiple of 8.
        weight: [2i, in] of the same type, gates first, contiguous; i too is a multiple of 8.

    Returns:
        [T, i], contiguous.
    """
    assert x.is_contiguous() and weight.is_contiguous(), "x or weight has gaps"
    output = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    tiling = _tiling(x, weight)
    if is_for_many_rows(len(x), tiling):
        many_rows(x, weight, output, tiling)
    else:
        few_rows(x, weight, output)
    return output


def _tiling(x: Tensor, weight: Tensor) -> Tiling:
    return Tiling.of(len(x), len(weight) // 2, num_multiprocessors(x.device.index))


def has_kernel_for(num_rows: int, tiling: Tiling) -> bool:
    """Whether one of the two kernels is made for `num_rows` rows."""
    return num_rows in (FEW_ROWS, 2 * FEW_ROWS) or is_for_many_rows(num_rows, tiling)


def is_for_many_rows(num_rows: int, tiling: Tiling) -> bool:
    return num_rows > FEW_ROWS and fills_tiles(num_rows) and tiling.num_waves >= MIN_WAVES


def few_rows(x: Tensor, weight: Tensor, output: Tensor) -> None:
    """Write `swiglu` of up to 128 rows to `output`; a program computes some columns of up to 64 rows."""
    num_rows, width = output.shape
    # With more columns a program, x is read less often; with fewer, more programs run beside each other.
    columns, num_stages = (32, 4) if num_rows <= FEW_ROWS else (64, 3)
    overlaps = can_overlap(x)
    swiglu_few_rows_kernel[(triton.cdiv(num_rows, FEW_ROWS) * triton.cdiv(width, columns),)](
        TensorDescriptor.from_tensor(x, [FEW_ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight.view(2, width, -1), [2, columns, DEPTH]),
        TensorDescriptor.from_tensor(output, [FEW_ROWS, columns]), num_rows, x.shape[1],
        ROWS=FEW_ROWS, COLUMNS=columns, DEPTH=DEPTH, OVERLAPS=overlaps, launch_pdl=overlaps, num_warps=4,
        num_stages=num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "depth"])
def swiglu_few_rows_kernel(
    x, weight, output, num_rows, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one tile [ROWS, COLUMNS] of silu(gate) * up, with gate and up as one product of 2 * COLUMNS
    columns. Program numbers count row tiles first, so that programs that run at the same time read the same
    weights."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row_tiles = tl.cdiv(num_rows, ROWS)
    first_row = tl.program_id(0) % row_tiles * ROWS
    first_column = tl.program_id(0) // row_tiles * COLUMNS
    both = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    for step in range(0, depth, DEPTH):
        # One product for gate and up: with half as many columns the rows' tile would be read twice.
        columns = weight.load([0, first_column, step]).reshape(2 * COLUMNS, DEPTH)
        both = tl.dot(x.load([first_row, step]), columns.T, both)
    gates, up = both.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
    dtype = output.dtype
    activated = gated(gates.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    output.store([first_row, first_column], activated)
