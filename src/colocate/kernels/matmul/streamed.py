"""Matrix products of few rows, bound by reading the weights, in Gluon for compute capability 9.0.

A program multiplies 64 rows of the weights by all rows of x: the tensor cores' smallest product, which is 64
high, is filled by the weights and not by padding. It fills a ring of stages through the copy engine. The
first stages of weights are requested before the kernel waits for the one that makes x (`launch.py`): memory
is busy while that kernel ends. Where the output has too few columns to occupy the device, the sum is cut
into parts, which the reader of the output adds up in their order: a result never depends on which program
ends first.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from colocate.kernels.matmul.gate import silu
from colocate.kernels.matmul.ping_pong import (
    DEPTH,
    STEP,
    can_multiply,
    descriptor,
    load_tile,
    num_multiprocessors,
    thread_barrier,
)

COLUMN_TILE = 64
"""Rows of the weights, that is columns of the output, that a program multiplies at a time."""
MAX_ROWS = 128
MAX_GATED_ROWS = 64
"""Each program reads all of x for 32 columns of the output. With 128 rows the larger tiles of
`swiglu.swiglu`, which read x less often, are as fast."""
MAX_PARTS = 8
"""Most parts of a sum. Each is written and read back in float32."""
RING_BYTES = 192 * 2**10
"""The ring of a program that has a multiprocessor to itself: there are no more programs than these. What is
left of 227 KiB holds none of the next kernel's rings, so a larger one costs nothing."""
SHARED_RING_BYTES = 72 * 2**10
"""The ring of a program where there are more: three run on a multiprocessor."""

COLUMNS = gl.constexpr(COLUMN_TILE)


def can_stream(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can multiply `x` [T, in] by `weight` [out, in] transposed."""
    return len(x) <= MAX_ROWS and len(weight) % COLUMN_TILE == 0 and can_multiply(x, weight)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias as parts of its sum.

    Args:
        x: [T, in] bfloat16 or float16, T up to 128, contiguous, `in` a multiple of 8.
        weight: [out, in] of the same type, contiguous; `out` a multiple of 64.
        bias: [out], contiguous; it belongs to the first part.

    Returns:
        [parts, T, out] float32, whose sum over the parts is the product.
    """
    num_steps, num_tiles = triton.cdiv(x.shape[1], DEPTH), len(weight) // COLUMN_TILE
    num_parts = num_parts_for(num_tiles, num_steps, num_multiprocessors(x.device.index))
    out = torch.empty((num_parts, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, num_parts, is_gated=False)
    return out


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, with gate, up and silu(gate) each rounded to the model's type; see `swiglu.swiglu`."""
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, out, 1, is_gated=True)
    return out


def num_parts_for(num_tiles: int, num_steps: int, num_multiprocessors: int) -> int:
    """Parts to cut a sum of `num_steps` steps into, so that no multiprocessor gets a second program."""
    num_parts = max(1, min(num_multiprocessors // num_tiles, num_steps, MAX_PARTS))
    # No part may be empty: with 24 steps, 7 parts of 4 would leave the last one none.
    return triton.cdiv(num_steps, triton.cdiv(num_steps, num_parts))


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, num_parts: int, *, is_gated: bool
) -> None:
    rows, num_tiles = max(8, triton.next_power_of_2(len(x))), len(weight) // COLUMN_TILE
    has_room = num_tiles * num_parts <= num_multiprocessors(x.device.index)
    ring_bytes = RING_BYTES if has_room else SHARED_RING_BYTES
    num_stages = ring_bytes // ((COLUMN_TILE + rows) * DEPTH * x.element_size())
    num_stages = min(num_stages, triton.cdiv(triton.cdiv(x.shape[1], DEPTH), num_parts))
    block = COLUMN_TILE // 2 if is_gated else COLUMN_TILE
    streamed_kernel[(num_tiles, num_parts)](
        descriptor(x, rows, DEPTH), descriptor(weight, block, DEPTH), bias, out, len(x), out.shape[-1],
        x.shape[1], num_parts, ROWS=rows, STAGES=num_stages, IS_GATED=is_gated, launch_pdl=True, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _request_weights(weight, stage, copied, column, width, k, is_wanted, IS_GATED: gl.constexpr):
    """Have the copy engine load 64 rows of the weights from k on: those from `column` on, or half of them of
    gate and half of up."""
    if IS_GATED:
        HALF: gl.constexpr = COLUMNS // 2
        load_tile(weight, [column, k], copied, stage.slice(0, HALF), is_wanted)
        up = stage.slice(HALF, HALF)
        load_tile(weight, [width + column, k], copied, up, is_wanted)
    else:
        load_tile(weight, [column, k], copied, stage, is_wanted)


@gluon.jit(do_not_specialize=["num_rows", "num_parts"])
def streamed_kernel(
    x, weight, bias, out, num_rows, width, depth, num_parts,
    ROWS: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of the weights by x along one part of the sum.

    `x` and `weight` are the copy engine's descriptors, of blocks of ROWS and of 64 rows (gated: 32); `bias`
    [width] or None is added in the first part. `out` is
    [num_parts, num_rows, width] float32, or silu(gate) * up, [num_rows, width]. `depth` is the sum's length.
    """
    gdc_launch_dependents()
    column = gl.program_id(0) * (COLUMNS // 2 if IS_GATED else COLUMNS)
    steps_per_part = gl.cdiv(gl.cdiv(depth, STEP), num_parts)
    first = gl.program_id(1) * steps_per_part
    num_steps = gl.minimum(steps_per_part, gl.cdiv(depth, STEP) - first)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, STEP], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, STEP], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    STAGE_BYTES: gl.constexpr = (COLUMNS + ROWS) * STEP * 2
    for stage in gl.static_range(STAGES):
        copied, k = full.index(stage), (first + stage) * STEP
        mbarrier.expect(copied, STAGE_BYTES, stage < num_steps)
        _request_weights(weight, weights.index(stage), copied, column, width, k, stage < num_steps, IS_GATED)
    gdc_wait()
    for stage in gl.static_range(STAGES):
        k = (first + stage) * STEP
        load_tile(x, [0, k], full.index(stage), rows.index(stage), stage < num_steps)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    total = gl.zeros([COLUMNS, ROWS], gl.float32, layout)
    for step in range(num_steps):
        at = step % STAGES
        mbarrier.wait(full.index(at), step // STAGES & 1)
        total = warpgroup_mma(weights.index(at), rows.index(at).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        # The product before this one is done on all warps: its stage is free.
        thread_barrier()
        free, following = (step + STAGES - 1) % STAGES, step + STAGES - 1
        is_wanted = (step > 0) & (following < num_steps)
        copied, k = full.index(free), (first + following) * STEP
        mbarrier.expect(copied, STAGE_BYTES, is_wanted)
        _request_weights(weight, weights.index(free), copied, column, width, k, is_wanted, IS_GATED)
        load_tile(x, [0, k], copied, rows.index(free), is_wanted)
    total = warpgroup_mma_wait(0, deps=(total,))
    if IS_GATED:
        _store_gated(out, total, column, num_rows, width, x.dtype)
    else:
        columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
        numbers = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        if bias is not None:
            added = gl.load(bias + columns).to(gl.float32)
            total += gl.where(gl.program_id(1) == 0, added, 0.0)[:, None]
        pointers = out + (gl.program_id(1) * num_rows + numbers[None, :]) * width + columns[:, None]
        gl.store(pointers, total, mask=(numbers < num_rows)[None, :])


@gluon.jit
def _store_gated(out, total, column, num_rows, width, DTYPE: gl.constexpr):
    """Write silu(gate) * up of `total` [64, rows], gate's 32 columns before up's."""
    HALF: gl.constexpr = COLUMNS // 2
    ROWS: gl.constexpr = total.shape[1]
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [0, 1, 2])
    both = gl.convert_layout(total.reshape([2, HALF, ROWS]).permute([1, 2, 0]), pairs)
    gate, up = both.split()
    activated = silu(gate.to(DTYPE).to(gl.float32), DTYPE) * up.to(DTYPE).to(gl.float32)
    layout: gl.constexpr = activated.type.layout
    columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    numbers = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    pointers = out + numbers[None, :] * width + columns[:, None]
    gl.store(pointers, activated.to(DTYPE), mask=(numbers < num_rows)[None, :])
