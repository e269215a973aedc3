"""The term that LoRA adds to a product once every A x is known (`AdapterStack`): y += scaling * (A x) B^T.

B is read where PEFT keeps it, as a rule in float32, and rounded to x's type on the way. A x was rounded to
the type once, by the product; so is y + scaling * (A x) B^T, which is summed in float32. That is what
PyTorch's matrix products do with adapters cast to the type, which the trainer runs.

A decode step's adapters are some megabytes a layer beside hundreds of the weights: they cost their launches
and their latency, not their bytes. Hence one launch for q, k and v together.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from colocate.weights.adapters import MAX_STACKED, AdapterStack

MAX_ROWS = 1024
"""From 1,024 rows on cuBLAS multiplies by B as fast as `expand` does: its tiles read an adapter less often,
and its few extra launches do not count beside the base weights' product of 1,024 rows."""


def expand(y: Tensor, t: Tensor, stack: AdapterStack) -> None:
    """Add scaling * t B^T to `y` in place, for each adapter in its own columns of `y`.

    Args:
        y: [T, out], rows contiguous.
        t: [T, adapters * padded rank], rows contiguous: A x of each adapter, and anything in the columns
            beyond its rank.
    """
    assert y.stride(1) == t.stride(1) == 1, "rows of y and t must be contiguous"
    num_rows = len(y)
    b = _padded([adapter.b for adapter in stack.adapters])
    widths = [len(adapter.b) for adapter in stack.adapters]
    ranks = [len(adapter.a) for adapter in stack.adapters]
    block_rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    # A tile of B is read once per block of rows; its 4,096 values are 32 for each thread.
    block_columns = max(32, min(128, 4096 // stack.padded_rank))
    num_blocks = sum(triton.cdiv(width, block_columns) for width in widths)
    _expand_kernel[(num_blocks, triton.cdiv(num_rows, block_rows))](
        y, t, *b, *_padded([adapter.scaling for adapter in stack.adapters]), num_rows, y.stride(0),
        t.stride(0), *_padded(ranks), *_padded(widths),
        *_padded([columns.start for columns in stack.columns]),
        PADDED_RANK=stack.padded_rank, NUM_ADAPTERS=len(stack.adapters), BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns, num_warps=4,
    )  # fmt: skip


@triton.jit
def _expand_kernel(
    y, t, b0, b1, b2, scaling0, scaling1, scaling2, num_rows, y_stride, t_stride,
    RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr, FIRST0: tl.constexpr, FIRST1: tl.constexpr, FIRST2: tl.constexpr,
    PADDED_RANK: tl.constexpr, NUM_ADAPTERS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find the adapter and the tile of columns of this program's number, and expand it."""
    END0: tl.constexpr = (WIDTH0 + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    END1: tl.constexpr = END0 + (WIDTH1 + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    block = tl.program_id(0)
    if block < END0:
        _expand_tile(
            y + FIRST0, t, b0, scaling0, block, num_rows, y_stride, t_stride, RANK0, WIDTH0,
            PADDED_RANK, BLOCK_ROWS, BLOCK_COLUMNS,
        )  # fmt: skip
    if NUM_ADAPTERS > 1:  # noqa: SIM102
        if (block >= END0) & (block < END1):
            _expand_tile(
                y + FIRST1, t + PADDED_RANK, b1, scaling1, block - END0, num_rows, y_stride, t_stride, RANK1,
                WIDTH1, PADDED_RANK, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip
    if NUM_ADAPTERS > 2:  # noqa: SIM102
        if block >= END1:
            _expand_tile(
                y + FIRST2, t + 2 * PADDED_RANK, b2, scaling2, block - END1, num_rows, y_stride, t_stride,
                RANK2, WIDTH2, PADDED_RANK, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip


@triton.jit
def _expand_tile(
    y, t, b, scaling, block, num_rows, y_stride, t_stride,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PADDED_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add one adapter's term to one tile of rows and columns of `y`."""
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    ranks = tl.arange(0, PADDED_RANK)[None, :]
    t_tile = tl.load(t + rows * t_stride + ranks, mask=(rows < num_rows) & (ranks < RANK), other=0.0)
    b_tile = tl.load(
        b + columns[:, None] * RANK + ranks, mask=(columns < WIDTH)[:, None] & (ranks < RANK), other=0.0
    )
    update = scaling * tl.dot(t_tile, tl.trans(b_tile.to(t_tile.dtype)), input_precision="ieee")
    pointers = y + rows * y_stride + columns[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)[None, :]
    update += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, update.to(y.dtype.element_ty), mask=mask)


def _padded(values: Sequence) -> list:
    """`values`, filled up to three by repeating the last: the kernel has arguments for three adapters."""
    return [*values, *[values[-1]] * (MAX_STACKED - len(values))]
