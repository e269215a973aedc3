"""LoRA beside a product that reads the weights, as two small Triton kernels:

    shrink   t = x A^T, for all adapters of the projection at once
    expand   y += scaling * t B^T, in each adapter's columns of y, or y = that

Adapters are read where PEFT keeps them, as a rule in float32, and rounded to x's type on the way. Products of
that type are summed in float32; t is rounded to the type once, and so is y + scaling * (t B^T). That is what
PyTorch's matrix products do with adapters cast to the type, which the trainer runs.

A decode step's adapters are some megabytes a layer beside hundreds of the weights: they cost their launches
and their latency, not their bytes. Hence two launches for q, k and v together, and, because one row block
alone has too few products for a GPU, a shrink that cuts the inputs into parts. Whichever program is the last
to finish a part adds all of them up, in their order: the sum does not depend on who was last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from colocate.weights.adapters import Adapter

MAX_ROWS = 1024
"""From here on cuBLAS is as good: products of so many rows take so long that its launches, several for each
adapter, do not count beside them, and its larger tiles read an adapter less often."""
MAX_ROWS_BESIDE = 128
"""Up to here the kernels hide beside the product with the weights, which waits for memory. A product of more
rows computes on every multiprocessor, and what runs beside it costs more than what runs after it
(`benchmarks/decode_lora.py` measures both)."""
MAX_RANK = 256
MAX_ADAPTERS = 3
"""Of one projection: q, k and v."""
_TARGET_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""
_MAX_SPLITS = 64
_MIN_INPUTS_PER_SPLIT = 256
_MAX_RANK_BLOCK = 64


@dataclass(frozen=True)
class AdapterSlots:
    """The adapters of one projection, each in its own columns of the output."""

    adapters: tuple[Adapter, ...]
    first_columns: tuple[int, ...]

    @property
    def block_rank(self) -> int:
        """Ranks that one program of `shrink` computes."""
        return min(_MAX_RANK_BLOCK, self._largest)

    @property
    def padded_rank(self) -> int:
        """Columns of t for each adapter."""
        return triton.cdiv(self._largest, self.block_rank) * self.block_rank

    @property
    def num_columns(self) -> int:
        """Columns of the output that some adapter writes."""
        return sum(len(adapter.b) for adapter in self.adapters)

    @property
    def _largest(self) -> int:
        # A matrix product of Triton has at least 16 of everything.
        return max(16, *(triton.next_power_of_2(len(adapter.a)) for adapter in self.adapters))


def slots_for(adapters: Sequence[tuple[slice, Adapter]]) -> AdapterSlots | None:
    """The adapters as the kernels take them; None if they cannot.

    They take up to three, with at most one in a column, of ranks up to 256, without bias.
    """
    columns = [columns.start for columns, _ in adapters]
    fits = len(columns) == len(set(columns)) <= MAX_ADAPTERS and all(
        adapter.bias is None
        and len(adapter.a) <= MAX_RANK
        and adapter.a.is_contiguous()
        and adapter.b.is_contiguous()
        for _, adapter in adapters
    )
    return AdapterSlots(tuple(adapter for _, adapter in adapters), tuple(columns)) if fits else None


def num_counters(num_rows: int) -> int:
    """Counters that `shrink` needs for up to `num_rows` rows."""
    return triton.cdiv(num_rows, 16) * MAX_ADAPTERS * (MAX_RANK // _MAX_RANK_BLOCK)


class Shrink:
    """t = x A^T, apart from its launch, so that its memory can be taken on another stream than it runs on.

    Args:
        x: [T, in], rows contiguous.
        counters: [num_counters(T)] int32, zeros; zeros again after the launch.

    Attributes:
        output: [T, adapters * padded rank] in x's type; columns beyond an adapter's rank are undefined.
    """

    def __init__(self, x: Tensor, slots: AdapterSlots, counters: Tensor) -> None:
        assert x.stride(1) == 1, "a row of x must be contiguous"
        num_rows, num_inputs = x.shape
        self._x, self._slots, self._counters = x, slots, counters
        self.output = x.new_empty(num_rows, len(slots.adapters) * slots.padded_rank)
        self._block_rows = 16 if num_rows <= 16 else 32
        num_tiles = triton.cdiv(num_rows, self._block_rows) * (self.output.shape[1] // slots.block_rank)
        num_splits = min(
            triton.cdiv(_TARGET_PROGRAMS, num_tiles),
            triton.cdiv(num_inputs, _MIN_INPUTS_PER_SPLIT),
            _MAX_SPLITS,
        )
        # Parts are whole blocks of inputs.
        self._split_size = triton.cdiv(triton.cdiv(num_inputs, num_splits), _BLOCK_INPUTS) * _BLOCK_INPUTS
        self._num_splits = triton.cdiv(num_inputs, self._split_size)
        assert num_tiles <= len(counters), f"{num_tiles} tiles have only {len(counters)} counters"
        tile_size = self._block_rows * slots.block_rank
        self._partials = torch.empty(
            (num_tiles, self._num_splits, tile_size) if self._num_splits > 1 else (0,),
            dtype=torch.float32,
            device=x.device,
        )

    def launch(self) -> None:
        slots = self._slots
        num_rows, num_inputs = self._x.shape
        rank_blocks = slots.padded_rank // slots.block_rank
        a, ranks = _padded([adapter.a for adapter in slots.adapters]), _ranks(slots)
        _shrink_kernel[
            (triton.cdiv(num_rows, self._block_rows), self._num_splits, len(slots.adapters) * rank_blocks)
        ](
            self._x,
            *a,
            self.output,
            self._partials,
            self._counters,
            num_rows,
            self._x.stride(0),
            num_inputs,
            self._split_size,
            *ranks,
            PADDED_RANK=slots.padded_rank,
            NUM_ADAPTERS=len(slots.adapters),
            NUM_SPLITS=self._num_splits,
            BLOCK_ROWS=self._block_rows,
            BLOCK_RANK=slots.block_rank,
            BLOCK_INPUTS=_BLOCK_INPUTS,
            BLOCK_SPLITS=min(16, triton.next_power_of_2(self._num_splits)),
            num_warps=4,
            num_stages=3,
        )


_BLOCK_INPUTS = 64


@triton.jit
def _shrink_kernel(
    x,
    a0,
    a1,
    a2,
    output,
    partials,
    counters,
    num_rows,
    x_stride,
    num_inputs,
    split_size,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    RANK_BLOCKS: tl.constexpr = PADDED_RANK // BLOCK_RANK
    which = tl.program_id(2) // RANK_BLOCKS
    # One body for each adapter, so that the compiler knows its rank and its alignment; the outer conditions
    # leave out the bodies of those that are not there.
    if which == 0:
        _shrink_tile(
            x, a0, output, partials, counters, num_rows, x_stride, num_inputs, split_size, 0, RANK0,
            PADDED_RANK, NUM_ADAPTERS, NUM_SPLITS, BLOCK_ROWS, BLOCK_RANK, BLOCK_INPUTS, BLOCK_SPLITS,
        )  # fmt: skip
    if NUM_ADAPTERS > 1:  # noqa: SIM102
        if which == 1:
            _shrink_tile(
                x, a1, output, partials, counters, num_rows, x_stride, num_inputs, split_size, 1, RANK1,
                PADDED_RANK, NUM_ADAPTERS, NUM_SPLITS, BLOCK_ROWS, BLOCK_RANK, BLOCK_INPUTS, BLOCK_SPLITS,
            )  # fmt: skip
    if NUM_ADAPTERS > 2:  # noqa: SIM102
        if which == 2:
            _shrink_tile(
                x, a2, output, partials, counters, num_rows, x_stride, num_inputs, split_size, 2, RANK2,
                PADDED_RANK, NUM_ADAPTERS, NUM_SPLITS, BLOCK_ROWS, BLOCK_RANK, BLOCK_INPUTS, BLOCK_SPLITS,
            )  # fmt: skip


@triton.jit
def _shrink_tile(
    x,
    a,
    output,
    partials,
    counters,
    num_rows,
    x_stride,
    num_inputs,
    split_size,
    WHICH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Some rows and ranks of one adapter, over one part of the inputs."""
    TILE_SIZE: tl.constexpr = BLOCK_ROWS * BLOCK_RANK
    rank_block = tl.program_id(2) % (PADDED_RANK // BLOCK_RANK)
    split = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    ranks = rank_block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    start = split * split_size
    end = tl.minimum(start + split_size, num_inputs)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_RANK], dtype=tl.float32)
    for first in tl.range(start, end, BLOCK_INPUTS):
        inputs = first + tl.arange(0, BLOCK_INPUTS)[None, :]
        mask = inputs < end
        x_tile = tl.load(x + rows * x_stride + inputs, mask=mask & (rows < num_rows), other=0.0)
        a_tile = tl.load(
            a + ranks[:, None] * num_inputs + inputs, mask=mask & (ranks < RANK)[:, None], other=0.0
        )
        acc = tl.dot(x_tile, tl.trans(a_tile.to(x_tile.dtype)), acc, input_precision="ieee")

    dtype = output.dtype.element_ty
    first_column = WHICH * PADDED_RANK + rank_block * BLOCK_RANK
    output_stride = NUM_ADAPTERS * PADDED_RANK
    if NUM_SPLITS == 1:
        columns = first_column + tl.arange(0, BLOCK_RANK)[None, :]
        tl.store(output + rows * output_stride + columns, acc.to(dtype), mask=rows < num_rows)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        partial = partials + tile.to(tl.int64) * (NUM_SPLITS * TILE_SIZE)
        in_tile = tl.arange(0, BLOCK_ROWS)[:, None] * BLOCK_RANK + tl.arange(0, BLOCK_RANK)[None, :]
        tl.store(partial + split * TILE_SIZE + in_tile, acc)
        # All threads' parts are written before one of them says so.
        tl.debug_barrier()
        num_before = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if num_before == NUM_SPLITS - 1:
            places = tl.arange(0, TILE_SIZE)
            total = tl.zeros([TILE_SIZE], dtype=tl.float32)
            for first_split in tl.static_range(0, NUM_SPLITS, BLOCK_SPLITS):
                splits = first_split + tl.arange(0, BLOCK_SPLITS)[:, None]
                # Not from the L1 cache, which other multiprocessors do not write to.
                parts = tl.load(
                    partial + splits * TILE_SIZE + places[None, :],
                    mask=splits < NUM_SPLITS,
                    other=0.0,
                    cache_modifier=".cg",
                )
                total += tl.sum(parts, axis=0)
            tile_rows = tl.program_id(0) * BLOCK_ROWS + places // BLOCK_RANK
            columns = first_column + places % BLOCK_RANK
            tl.store(output + tile_rows * output_stride + columns, total.to(dtype), mask=tile_rows < num_rows)
            tl.store(counters + tile, 0)


def expand(y: Tensor, t: Tensor, slots: AdapterSlots, *, adds: bool = True) -> None:
    """y += scaling * t B^T in place, in each adapter's columns.

    Args:
        y: [T, out], rows contiguous.
        t: [T, adapters * padded rank], the output of `Shrink`.
        adds: whether to add to what y holds, or to overwrite it.
    """
    assert y.stride(1) == 1, "a row of y must be contiguous"
    num_rows = len(y)
    b = _padded([adapter.b for adapter in slots.adapters])
    widths = [len(adapter.b) for adapter in slots.adapters]
    block_rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    # A tile of B is read once for a block of rows; 4,096 values of it are 32 for each thread.
    block_columns = max(32, min(128, 4096 // slots.padded_rank))
    num_blocks = sum(triton.cdiv(width, block_columns) for width in widths)
    _expand_kernel[(num_blocks, triton.cdiv(num_rows, block_rows))](
        y,
        t,
        *b,
        *_padded([adapter.scaling for adapter in slots.adapters]),
        num_rows,
        y.stride(0),
        *_ranks(slots),
        *_padded(widths),
        *_padded(slots.first_columns),
        PADDED_RANK=slots.padded_rank,
        NUM_ADAPTERS=len(slots.adapters),
        ADDS=adds,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )


@triton.jit
def _expand_kernel(
    y,
    t,
    b0,
    b1,
    b2,
    scaling0,
    scaling1,
    scaling2,
    num_rows,
    y_stride,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    FIRST0: tl.constexpr,
    FIRST1: tl.constexpr,
    FIRST2: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    END0: tl.constexpr = (WIDTH0 + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    END1: tl.constexpr = END0 + (WIDTH1 + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    STRIDE: tl.constexpr = NUM_ADAPTERS * PADDED_RANK
    block = tl.program_id(0)
    if block < END0:
        _expand_tile(
            y + FIRST0, t, b0, scaling0, block, num_rows, y_stride, STRIDE, RANK0, WIDTH0,
            PADDED_RANK, ADDS, BLOCK_ROWS, BLOCK_COLUMNS,
        )  # fmt: skip
    if NUM_ADAPTERS > 1:  # noqa: SIM102
        if (block >= END0) & (block < END1):
            _expand_tile(
                y + FIRST1, t + PADDED_RANK, b1, scaling1, block - END0, num_rows, y_stride, STRIDE, RANK1,
                WIDTH1, PADDED_RANK, ADDS, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip
    if NUM_ADAPTERS > 2:  # noqa: SIM102
        if block >= END1:
            _expand_tile(
                y + FIRST2, t + 2 * PADDED_RANK, b2, scaling2, block - END1, num_rows, y_stride, STRIDE,
                RANK2, WIDTH2, PADDED_RANK, ADDS, BLOCK_ROWS, BLOCK_COLUMNS,
            )  # fmt: skip


@triton.jit
def _expand_tile(
    y,
    t,
    b,
    scaling,
    block,
    num_rows,
    y_stride,
    t_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Some rows and columns of one adapter's output."""
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
    if ADDS:
        update += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, update.to(y.dtype.element_ty), mask=mask)


def _ranks(slots: AdapterSlots) -> list[int]:
    return _padded([len(adapter.a) for adapter in slots.adapters])


def _padded(values: Sequence) -> list:
    """Three values, the last of them repeated: kernels take three adapters, whatever of them is there."""
    return [*values, *[values[-1]] * (MAX_ADAPTERS - len(values))]
