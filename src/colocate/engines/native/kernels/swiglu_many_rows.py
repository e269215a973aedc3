"""SwiGLU's product for many rows, in Gluon: tiles for the tensor cores of compute capability 9.0.

Programs stay, one on each multiprocessor, and take one tile after the other. Of a program's warps one *loads*
(the copy engine fills a ring of stages, tiles ahead of their use), and two groups of four *multiply*, in
turns: while one group activates and stores its tile, the tensor cores work for the other ("ping-pong",
CUTLASS's term). What limits this is shared memory: a stage of 128 rows and 128 columns takes 512 cycles of
the tensor cores, 384 of reading their operands and 256 of being written.

512 rows of a Qwen2.5 1.5B have 560 tiles, on 132 multiprocessors 4.2 waves, the last one mostly idle. So
whole waves are computed in large tiles, and the columns that are left in *narrow* ones, cut such that each
program has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
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

ROW_TILE = 128
COLUMN_TILE = 64
"""Of gate, and as many of up."""
NARROW_TILES = (16, 32, 64)
DEPTH = 64
NUM_STAGES = 6
"""Of 32 KiB: with two tiles of output, all of the 227 KiB that a program may have."""

_ROWS = gl.constexpr(ROW_TILE)
_DEPTH = gl.constexpr(DEPTH)
_STAGES = gl.constexpr(NUM_STAGES)
_REGISTERS = gl.constexpr(232)
"""Of a thread that multiplies: 128 of them are sums."""
_LOADER_REGISTERS = gl.constexpr(24)


@dataclass(frozen=True)
class Tiling:
    """How the output's columns are divided."""

    num_tiles: int
    """Large tiles."""
    first_narrow: int
    """Columns from here on are in narrow tiles."""
    narrow_columns: int
    num_narrow: int
    num_programs: int
    num_waves: float
    """Of large tiles, if all of them were."""

    @classmethod
    def of(cls, num_rows: int, width: int, num_multiprocessors: int) -> Tiling:
        row_tiles, column_tiles = triton.cdiv(num_rows, ROW_TILE), triton.cdiv(width, COLUMN_TILE)
        in_all = row_tiles * column_tiles
        num_columns = in_all // num_multiprocessors * num_multiprocessors // row_tiles
        first = min(width, num_columns * COLUMN_TILE)

        def num_narrow(columns: int) -> int:
            return row_tiles * triton.cdiv(width - first, columns)

        fitting = (columns for columns in NARROW_TILES if num_narrow(columns) <= num_multiprocessors)
        columns = next(fitting, COLUMN_TILE)
        return cls(
            num_tiles=row_tiles * num_columns,
            first_narrow=first,
            narrow_columns=columns,
            num_narrow=num_narrow(columns),
            num_programs=min(num_multiprocessors, max(row_tiles * num_columns, num_narrow(columns))),
            num_waves=in_all / num_multiprocessors,
        )


def many_rows(x: Tensor, weight: Tensor, output: Tensor, tiling: Tiling) -> None:
    """Write silu(x Wg^T) * (x Wu^T) to `output`; `swiglu.swiglu` says what the tensors are."""
    width, narrow = output.shape[1], tiling.narrow_columns
    swiglu_many_rows_kernel[(tiling.num_programs,)](
        _descriptor(x, ROW_TILE, DEPTH),
        _descriptor(weight, COLUMN_TILE, DEPTH),
        _descriptor(weight, narrow, DEPTH),
        _descriptor(output, ROW_TILE, COLUMN_TILE),
        _descriptor(output, ROW_TILE, narrow),
        triton.cdiv(len(x), ROW_TILE),
        width,
        x.shape[1],
        tiling.num_tiles,
        tiling.first_narrow,
        tiling.num_narrow,
        COLUMNS=COLUMN_TILE,
        NARROW=narrow,
        num_warps=4,
    )


def _descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    dtype = getattr(gl, str(tensor.dtype).removeprefix("torch."))
    return TensorDescriptor.from_tensor(
        tensor, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    )


@gluon.jit(do_not_specialize=["row_tiles", "width", "depth", "num_tiles", "first_narrow", "num_narrow"])
def swiglu_many_rows_kernel(
    x,
    weight,
    narrow_weight,
    output,
    narrow_output,
    row_tiles,
    width,
    depth,
    num_tiles,
    first_narrow,
    num_narrow,
    COLUMNS: gl.constexpr,
    NARROW: gl.constexpr,
):
    """`first_narrow` and what is behind it are for narrow tiles, of which the first is `num_tiles`.

    Barriers: a stage is `full` when the copies into it have arrived, `empty` when its product is done; a
    group of warps has its `turn` when the other one has started its last product.
    """
    dtype: gl.constexpr = output.dtype
    rows = gl.allocate_shared_memory(dtype, [_STAGES, _ROWS, _DEPTH], x.layout)
    columns = gl.allocate_shared_memory(dtype, [_STAGES, 2 * COLUMNS, _DEPTH], weight.layout)
    results = gl.allocate_shared_memory(dtype, [2, _ROWS, COLUMNS], output.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    work = (row_tiles, depth, num_tiles, first_narrow, num_narrow)
    ring = (rows, columns, full, empty)
    outputs = (output, narrow_output, results, turns)
    gl.warp_specialize(
        [
            (_multiply, (ring, outputs, work, 0, COLUMNS, NARROW)),
            (_multiply, (ring, outputs, work, 1, COLUMNS, NARROW)),
            (_load, (ring, x, weight, narrow_weight, width, work, COLUMNS, NARROW)),
        ],
        [4, 1],
        [_REGISTERS, _LOADER_REGISTERS],
    )


@gluon.jit
def _load(ring, x, weight, narrow_weight, width, work, COLUMNS: gl.constexpr, NARROW: gl.constexpr):
    row_tiles, depth, num_tiles, first_narrow, num_narrow = work
    step = 0
    # Row tiles first: programs that run at the same time read the same weights.
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile % row_tiles * _ROWS, tile // row_tiles * COLUMNS
        step = _load_tile(ring, x, weight, row, column, width + column, depth, step, COLUMNS)
    for tile in range(gl.program_id(0), num_narrow, gl.num_programs(0)):
        row, column = tile % row_tiles * _ROWS, first_narrow + tile // row_tiles * NARROW
        step = _load_tile(ring, x, narrow_weight, row, column, width + column, depth, step, NARROW)


@gluon.jit
def _load_tile(ring, x, weight, row, gate_row, up_row, depth, step, COLUMNS: gl.constexpr):
    """Copy the operands of one tile into the ring; `step` counts stages from the program's start."""
    rows, columns, full, empty = ring
    for k in range(0, depth, _DEPTH):
        stage = step % _STAGES
        mbarrier.wait(empty.index(stage), (step // _STAGES & 1) ^ 1)
        arrived = full.index(stage)
        mbarrier.expect(arrived, (_ROWS + 2 * COLUMNS) * _DEPTH * 2)
        tma.async_copy_global_to_shared(x, [row, k], arrived, rows.index(stage))
        both = columns.index(stage)
        tma.async_copy_global_to_shared(weight, [gate_row, k], arrived, both.slice(0, COLUMNS))
        tma.async_copy_global_to_shared(weight, [up_row, k], arrived, both.slice(COLUMNS, COLUMNS))
        step += 1
    return step


@gluon.jit
def _multiply(ring, outputs, work, GROUP: gl.constexpr, COLUMNS: gl.constexpr, NARROW: gl.constexpr):
    """Every second tile of the program."""
    output, narrow_output, results, turns = outputs
    row_tiles, depth, num_tiles, first_narrow, num_narrow = work
    number = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        if number % 2 == GROUP:
            both = _multiply_tile(ring, turns, number, depth, GROUP, COLUMNS)
            row, column = tile % row_tiles * _ROWS, tile // row_tiles * COLUMNS
            _store_tile(output, results.index(GROUP), both, row, column, COLUMNS)
        number += 1
    for tile in range(gl.program_id(0), num_narrow, gl.num_programs(0)):
        if number % 2 == GROUP:
            both = _multiply_tile(ring, turns, number, depth, GROUP, NARROW)
            row, column = tile % row_tiles * _ROWS, first_narrow + tile // row_tiles * NARROW
            _store_tile(narrow_output, results.index(GROUP), both, row, column, NARROW)
        number += 1
    tma.store_wait(0)


@gluon.jit
def _multiply_tile(ring, turns, number, depth, GROUP: gl.constexpr, COLUMNS: gl.constexpr):
    """Gate and up of the program's tile `number`, [128, 2 * COLUMNS] float32."""
    rows, columns, full, empty = ring
    step = number * gl.cdiv(depth, _DEPTH)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    both = gl.zeros([_ROWS, 2 * COLUMNS], gl.float32, layout)
    # A barrier tells only this round of the ring from the next one: waiting for a stage two rounds ahead
    # would end at once. The first tile of all has nobody to wait for.
    mbarrier.wait(turns.index(GROUP), (number // 2 & 1) ^ (1 - GROUP))
    for k in range(0, depth, _DEPTH):
        stage = step % _STAGES
        mbarrier.wait(full.index(stage), step // _STAGES & 1)
        transposed = columns.index(stage).slice(0, 2 * COLUMNS).permute((1, 0))
        both = warpgroup_mma(rows.index(stage), transposed, both, is_async=True)
        both = warpgroup_mma_wait(1, deps=(both,))
        mbarrier.arrive(empty.index((step + _STAGES - 1) % _STAGES), pred=k > 0)
        step += 1
    mbarrier.arrive(turns.index(1 - GROUP))
    both = warpgroup_mma_wait(0, deps=(both,))
    mbarrier.arrive(empty.index((step + _STAGES - 1) % _STAGES))
    return both


@gluon.jit
def _store_tile(output, result, both, row, column, COLUMNS: gl.constexpr):
    dtype: gl.constexpr = output.dtype
    gate, up = both.reshape([_ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
    gate = gate.to(dtype).to(gl.float32)
    activated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
    tma.store_wait(0)  # the last tile has left shared memory
    result = result._reinterpret(dtype, [_ROWS, COLUMNS], output.layout)
    result.store(activated.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(output, [row, column], result)
