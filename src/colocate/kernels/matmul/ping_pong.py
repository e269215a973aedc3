"""Tiles of matrix products on the tensor cores of compute capability 9.0, in Gluon.

One program runs on each multiprocessor to the end and computes one tile after the other. One of its warps
*loads*: it has the copy engine fill a ring of stages, tiles ahead of their use. Two groups of four warps
*multiply*, in turns: while one group works on its result and stores it, the tensor cores belong to the other
group ("ping-pong", CUTLASS's term). Shared memory sets the limit: a stage of 128 rows and 128 columns keeps
the tensor cores busy for 512 cycles, and shared memory for 384 cycles of reading its operands and 256 of
being filled by the copies.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_Shared = gl.shared_memory_descriptor
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Start a copy from a descriptor's tensor to shared memory; Triton 3.9 has renamed these four."""
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Start a copy from shared memory to a descriptor's tensor."""
reinterpret = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret
"""Shared memory as one of another shape and layout, and as many bytes."""
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Wait for all threads of the program."""

ROW_TILE = 128
COLUMN_TILE = 128
DEPTH = 64
"""A stage's length along the summed dimension: 128 bytes, as wide as the copy engine's swizzle."""
MAX_PADDING = 1.15
"""The rows that whole tiles cover may exceed the matrix's rows by 15 %. Copies of tiles that hang over the
end take longer than copies of full ones."""

ROWS = gl.constexpr(ROW_TILE)
COLUMNS = gl.constexpr(COLUMN_TILE)
STEP = gl.constexpr(DEPTH)
STAGES = gl.constexpr(6)
"""The ring has six stages of 32 KiB each; seven would fit into a program's 227 KiB."""
REGISTERS = gl.constexpr(232)
"""A thread that multiplies gets 232 registers, of which 128 hold sums."""
LOADER_REGISTERS = gl.constexpr(24)


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether kernels built on these tiles can multiply `x` [T, in] by `weight` [out, in] transposed."""
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
    """Whether whole tiles cover `num_rows` rows with little padding (`MAX_PADDING`)."""
    return -(-num_rows // ROW_TILE) * ROW_TILE <= MAX_PADDING * num_rows


@functools.cache
def num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    """The copy engine's description of `tensor`, cut into blocks of shape `block`."""
    dtype = getattr(gl, str(tensor.dtype).removeprefix("torch."))
    return TensorDescriptor.from_tensor(
        tensor, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    )


@gluon.jit
def make_ring(x, weight, WIDTH: gl.constexpr):
    """Allocate the ring: its stages in shared memory, and the barriers that hand them over.

    Returns `rows` [STAGES, ROWS, STEP] and `columns` [STAGES, WIDTH, STEP], and the barriers: a stage is
    `full` when the copies into it have arrived and `empty` when its product is done; a group of warps has its
    turn (`turns`) when the other group has started the last product of its tile.
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
    """Wait until the stage that step number `step` of the program fills is empty.

    Returns the stage's rows, its columns and the barrier at which the copies into them arrive.
    """
    rows, columns, full, empty, _ = ring
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), (ROWS + WIDTH) * STEP * 2)
    return rows.index(stage), columns.index(stage), full.index(stage)


@gluon.jit
def multiply_tile(ring, number, depth, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """Multiply the program's tile `number`, whose stages the loading warp fills: [ROWS, WIDTH] float32.

    Every product is started before the one before it is waited for, so that the tensor cores never idle
    within a tile; a stage goes back to the loader only once the product that reads it is done. `depth` is the
    length of the sum, `GROUP` the group of warps, 0 or 1, which takes the tiles with number % 2 == GROUP.
    """
    rows, columns, full, empty, turns = ring
    step = number * gl.cdiv(depth, STEP)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    total = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    # A barrier holds one bit, which tells this round of the ring from the next but not from the one after: a
    # wait for a stage two rounds ahead would end at once. The program's first tile has no turn to wait for.
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
