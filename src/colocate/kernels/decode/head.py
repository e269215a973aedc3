"""The logits of a decode step, reduced for the sampler while they are still in registers.

A sampler's pass over 512 rows of 151,936 float32 logits reads 311 MB, a fiftieth of a 1.5B model's decode
step, for two numbers per 128 tokens. Here the matrix product itself writes these two numbers beside the
logits. The kernel is for compute capability 9.0 and 16-bit types; `ping_pong.py` says how tiles are
multiplied.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from colocate.kernels.decode.sampling import LOG2_E, PART_SIZE, Parts
from colocate.kernels.matmul.ping_pong import (
    COLUMN_TILE,
    COLUMNS,
    DEPTH,
    LOADER_REGISTERS,
    REGISTERS,
    ROW_TILE,
    ROWS,
    STEP,
    can_multiply,
    descriptor,
    fills_tiles,
    load_tile,
    make_ring,
    multiply_tile,
    next_stage,
    num_multiprocessors,
)

assert PART_SIZE == COLUMN_TILE, "a tile leaves one maximum and one sum for each of its rows"


def is_faster(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `logits_and_parts` can run these tensors, and was faster on an H200 than a matrix product and
    the sampler's own pass over its logits."""
    return can_multiply(hidden, weight) and fills_tiles(len(hidden))


def logits_and_parts(hidden: Tensor, weight: Tensor, temperature: float, out: Tensor) -> Parts:
    """Write hidden @ weight^T to `out`, and return what `sampling.sample` would otherwise reduce from it.

    Args:
        hidden: [B, in] bfloat16 or float16, contiguous, `in` a multiple of 8.
        weight: [V, in] of the same type, contiguous.
        temperature: the temperature that `sampling.sample` will be given.
        out: [B, V] float32, contiguous.
    """
    assert hidden.is_contiguous() and weight.is_contiguous() and out.is_contiguous(), "a tensor has gaps"
    (num_rows, depth), vocab_size = hidden.shape, len(weight)
    parts = Parts.empty(num_rows, vocab_size, out.device)
    num_tiles = triton.cdiv(num_rows, ROW_TILE) * triton.cdiv(vocab_size, COLUMN_TILE)
    head_kernel[(min(num_multiprocessors(hidden.device.index), num_tiles),)](
        descriptor(hidden, ROW_TILE, DEPTH), descriptor(weight, COLUMN_TILE, DEPTH), out, parts.maxima,
        parts.sums, num_rows, vocab_size, depth, LOG2_E / (temperature or 1.0),
        IS_WHOLE=vocab_size % COLUMN_TILE == 0, num_warps=4,
    )  # fmt: skip
    return parts


@gluon.jit(do_not_specialize=["num_rows", "depth"])
def head_kernel(
    hidden, weight, logits, maxima, sums, num_rows, vocab_size, depth, scale,
    IS_WHOLE: gl.constexpr,
):  # fmt: skip
    """Start a program's warps: one loads tiles of `hidden` and `weight`, two groups multiply them in turns.

    `hidden` and `weight` are the copy engine's descriptors; `logits` [num_rows, vocab_size], `maxima` and
    `sums` [num_rows, parts] are written. `depth` is the length of the sum, `scale` is log2(e) / temperature,
    and IS_WHOLE says that the vocabulary is whole tiles.
    """
    ring = make_ring(hidden, weight, COLUMNS)
    outputs = (logits, maxima, sums)
    row_tiles, num_parts = gl.cdiv(num_rows, ROWS), gl.cdiv(vocab_size, COLUMNS)
    work = (row_tiles, row_tiles * num_parts, depth)
    shape = (num_rows, vocab_size, num_parts)
    gl.warp_specialize(
        [
            (_multiply, (ring, outputs, work, shape, scale, 0, IS_WHOLE)),
            (_multiply, (ring, outputs, work, shape, scale, 1, IS_WHOLE)),
            (_load, (ring, hidden, weight, work)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load(ring, hidden, weight, work):
    """Load the stages of all tiles of the program, in the order in which they are multiplied."""
    row_tiles, num_tiles, depth = work
    step = 0
    # Row tiles first: programs that run at the same time read the same weights.
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = tile % row_tiles * ROWS, tile // row_tiles * COLUMNS
        for k in range(0, depth, STEP):
            rows, columns, copied = next_stage(ring, step, COLUMNS)
            load_tile(hidden, [row, k], copied, rows)
            load_tile(weight, [column, k], copied, columns)
            step += 1


@gluon.jit
def _multiply(ring, outputs, work, shape, scale, GROUP: gl.constexpr, IS_WHOLE: gl.constexpr):
    """Multiply and store every second tile of the program: those of warp group `GROUP`, 0 or 1."""
    row_tiles, num_tiles, depth = work
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        number = tile // gl.num_programs(0)
        if number % 2 == GROUP:
            values = multiply_tile(ring, number, depth, GROUP, COLUMNS)
            _store_and_reduce(outputs, shape, values, tile % row_tiles, tile // row_tiles, scale, IS_WHOLE)


@gluon.jit
def _store_and_reduce(outputs, shape, values, row_tile, part, scale, IS_WHOLE: gl.constexpr):
    """Store a tile of logits and each row's maximum m in it and sum of exp2(scale * (logit - m))."""
    logits, maxima, sums = outputs
    num_rows, vocab_size, num_parts = shape
    layout: gl.constexpr = values.type.layout
    rows = row_tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = part * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    is_row = rows < num_rows
    mask = is_row[:, None]
    pointers = logits + (rows.to(gl.int64) * vocab_size)[:, None] + columns[None, :]
    if IS_WHOLE:
        gl.store(pointers, values, mask=mask)
    else:
        in_vocab = (columns < vocab_size)[None, :]
        gl.store(pointers, values, mask=mask & in_vocab)
        values = gl.where(in_vocab, values, -float("inf"))
    highest = gl.max(values, axis=1)
    # In a part of nothing but -inf the sum is 0, where -inf - -inf would make it NaN.
    shift = gl.where(highest == -float("inf"), 0.0, highest * scale)
    total = gl.sum(gl.exp2(values * scale - shift[:, None]), axis=1)
    gl.store(maxima + rows * num_parts + part, highest, mask=is_row)
    gl.store(sums + rows * num_parts + part, total, mask=is_row)
