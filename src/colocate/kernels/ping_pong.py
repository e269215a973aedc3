"""Tiles of matrix products on the tensor cores of compute capability 9.0, in Gluon.

Programs stay, one on each multiprocessor, and take one tile after the other. Of a program's warps one *loads*
(the copy engine fills a ring of stages, tiles ahead of their use), and two groups of four *multiply*, in
turns: while one group works on its result and stores it, the tensor cores are the other's ("ping-pong",
CUTLASS's term). What limits this is shared memory: a stage of 128 rows and 128 columns takes 512 cycles of
the tensor cores, 384 of reading their operands and 256 of being written.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROW_TILE = 128
COLUMN_TILE = 128
DEPTH = 64
"""Of a stage along the sum: 128 bytes, as wide as the copy engine's swizzle."""
MAX_PADDING = 1.15
"""Rows of tiles over those there are. Copies of tiles that hang over the end take longer than others."""

ROWS = gl.constexpr(ROW_TILE)
COLUMNS = gl.constexpr(COLUMN_TILE)
STEP = gl.constexpr(DEPTH)
STAGES = gl.constexpr(6)
"""Of 32 KiB, six of the seven that fit into a program's 227."""
REGISTERS = gl.constexpr(232)
"""Of a thread that multiplies: 128 of them are sums."""
LOADER_REGISTERS = gl.constexpr(24)


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels of such tiles take x [T, in] and weights [out, in]."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and weight.is_contiguous()
        # The copy engine wants every row to begin at whole 16 bytes.
        and x.shape[1] % 8 == 0
        and weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def fills_tiles(num_rows: int) -> bool:
    """Whether so many rows leave little of a row of tiles empty."""
    return -(-num_rows // ROW_TILE) * ROW_TILE <= MAX_PADDING * num_rows


@functools.cache
def num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """How the copy engine moves such blocks of the tensor."""
    dtype = getattr(gl, str(tensor.dtype).removeprefix("torch."))
    return TensorDescriptor.from_tensor(
        tensor, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    )


@gluon.jit
def make_ring(x, weight, WIDTH: gl.constexpr):
    """Stages, and barriers.

    A stage is `full` when the copies into it have arrived, `empty` when its product is done. A group of warps
    has its `turn` when the other one has started its last product.
    """
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, STEP], x.layout)
    columns = gl.allocate_shared_memory(x.dtype, [STAGES, WIDTH, STEP], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    return rows, columns, full, empty, turns


@gluon.jit
def next_stage(ring, step, WIDTH: gl.constexpr):
    """Wait until stage `step`, counted from the program's start, is empty.

    Returns its rows, its columns and the barrier that the copies into them arrive at.
    """
    rows, columns, full, empty, _ = ring
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), (ROWS + WIDTH) * STEP * 2)
    return rows.index(stage), columns.index(stage), full.index(stage)


@gluon.jit
def multiply_tile(ring, number, depth, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """The program's tile `number`, [128, WIDTH] float32."""
    rows, columns, full, empty, turns = ring
    step = number * gl.cdiv(depth, STEP)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    total = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    # A barrier tells only this round of the ring from the next one: waiting for a stage two rounds ahead
    # would end at once. The first tile of all has nobody to wait for.
    mbarrier.wait(turns.index(GROUP), (number // 2 & 1) ^ (1 - GROUP))
    for k in range(0, depth, STEP):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        transposed = columns.index(stage).slice(0, WIDTH).permute((1, 0))
        total = warpgroup_mma(rows.index(stage), transposed, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    mbarrier.arrive(turns.index(1 - GROUP))
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return total
