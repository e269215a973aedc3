"""SwiGLU's product for many rows; `ping_pong.py` says how its tiles are multiplied.

For 512 rows of a Qwen2.5 1.5B there are 560 tiles: on 132 multiprocessors that is 4.2 waves, of which the
last would leave most multiprocessors idle. So the whole waves are computed in large tiles, and the columns
that remain in *narrow* tiles, so narrow that each program gets one.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from colocate.kernels.matmul.gate import silu
from colocate.kernels.matmul.ping_pong import (
    DEPTH,
    LOADER_REGISTERS,
    REGISTERS,
    ROW_TILE,
    ROWS,
    STEP,
    descriptor,
    load_tile,
    make_ring,
    multiply_tile,
    next_stage,
    reinterpret,
    store_tile,
)

COLUMN_TILE = 64
"""Columns of the gate in a large tile, which has as many columns of up."""
NARROW_TILES = (16, 32, 64)


@dataclass(frozen=True)
class Tiling:
    """The division of the output's columns."""

    num_tiles: int
    """The number of large tiles."""
    first_narrow: int
    """The first column that is in narrow tiles; all columns after it are too."""
    narrow_columns: int
    num_narrow: int
    num_programs: int
    num_waves: float
    """The number of waves if all tiles were large."""

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
    narrow = tiling.narrow_columns
    swiglu_many_rows_kernel[(tiling.num_programs,)](
        descriptor(x, ROW_TILE, DEPTH), descriptor(weight, COLUMN_TILE, DEPTH),
        descriptor(weight, narrow, DEPTH), descriptor(output, ROW_TILE, COLUMN_TILE),
        descriptor(output, ROW_TILE, narrow), triton.cdiv(len(x), ROW_TILE), output.shape[1], x.shape[1],
        tiling.num_tiles, tiling.first_narrow, tiling.num_narrow,
        COLUMNS=COLUMN_TILE, NARROW=narrow, num_warps=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["row_tiles", "width", "depth", "num_tiles", "first_narrow", "num_narrow"])
def swiglu_many_rows_kernel(
    x, weight, narrow_weight, output, narrow_output, row_tiles, width, depth, num_tiles, first_narrow,
    num_narrow,
    COLUMNS: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Start a program's warps: one loads tiles of `x` and the weights, two groups multiply them in turns.

    `x`, `weight`, `narrow_weight`, `output` and `narrow_output` are the copy engine's descriptors, the narrow
    ones in blocks of NARROW columns. `row_tiles` is the number of tiles over the rows, `width` the output's
    columns, `depth` the length of the sum; `num_tiles`, `first_narrow` and `num_narrow` are the `Tiling`.
    """
    ring = make_ring(x, weight, 2 * COLUMNS)
    results = gl.allocate_shared_memory(output.dtype, [2, ROWS, COLUMNS], output.layout)
    work = (row_tiles, depth, num_tiles, first_narrow, num_narrow)
    outputs = (output, narrow_output, results)
    gl.warp_specialize(
        [
            (_multiply, (ring, outputs, work, 0, COLUMNS, NARROW)),
            (_multiply, (ring, outputs, work, 1, COLUMNS, NARROW)),
            (_load, (ring, x, weight, narrow_weight, width, work, COLUMNS, NARROW)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load(ring, x, weight, narrow_weight, width, work, COLUMNS: gl.constexpr, NARROW: gl.constexpr):
    """Load the stages of all tiles of the program, large tiles first, as they are multiplied."""
    row_tiles, depth, num_tiles, first_narrow, num_narrow = work
    step = 0
    # Row tiles first: programs that run at the same time read the same weights.
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
        step = _load_tile(ring, x, weight, row, column, width + column, depth, step, COLUMNS)
    for tile in range(gl.program_id(0), num_narrow, gl.num_programs(0)):
        row, column = tile % row_tiles * ROWS, first_narrow + tile // row_tiles * NARROW
        step = _load_tile(ring, x, narrow_weight, row, column, width + column, depth, step, NARROW)


@gluon.jit
def _load_tile(ring, x, weight, row, gate_row, up_row, depth, step, COLUMNS: gl.constexpr):
    """Load one tile's stages, from `step` on: rows of `x`, columns of gate and up."""
    for k in range(0, depth, STEP):
        rows, both, copied = next_stage(ring, step, 2 * COLUMNS)
        load_tile(x, [row, k], copied, rows)
        load_tile(weight, [gate_row, k], copied, both.slice(0, COLUMNS))
        load_tile(weight, [up_row, k], copied, both.slice(COLUMNS, COLUMNS))
        step += 1
    return step


@gluon.jit
def _multiply(ring, outputs, work, GROUP: gl.constexpr, COLUMNS: gl.constexpr, NARROW: gl.constexpr):
    """Multiply and store every second tile of the program: those of warp group `GROUP`, 0 or 1."""
    output, narrow_output, results = outputs
    row_tiles, depth, num_tiles, first_narrow, num_narrow = work
    number = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        if number % 2 == GROUP:
            both = multiply_tile(ring, number, depth, GROUP, 2 * COLUMNS)
            row, column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
            _store_tile(output, results.index(GROUP), both, row, column, COLUMNS)
        number += 1
    for tile in range(gl.program_id(0), num_narrow, gl.num_programs(0)):
        if number % 2 == GROUP:
            both = multiply_tile(ring, number, depth, GROUP, 2 * NARROW)
            row, column = tile % row_tiles * ROWS, first_narrow + tile // row_tiles * NARROW
            _store_tile(narrow_output, results.index(GROUP), both, row, column, NARROW)
        number += 1
    tma.store_wait(0)


@gluon.jit
def _store_tile(output, result, both, row, column, COLUMNS: gl.constexpr):
    """Write silu(gate) * up of `both` [ROWS, 2 * COLUMNS] to `output`, through shared memory (`result`)."""
    dtype: gl.constexpr = output.dtype
    gate, up = both.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
    activated = silu(gate.to(dtype).to(gl.float32), dtype) * up.to(dtype).to(gl.float32)
    tma.store_wait(0)  # the last tile has left shared memory
    # A narrow tile takes the first bytes of the wide tile's place.
    folds: gl.constexpr = result.shape[1] // COLUMNS
    result = reinterpret(result, dtype, [ROWS * folds, COLUMNS], output.layout).slice(0, ROWS)
    result.store(activated.to(dtype))
    fence_async_shared()
    store_tile(output, [row, column], result)
