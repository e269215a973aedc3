"""Bookkeeping of a decode step on the GPU, so that several steps run between two looks of the host.

Row state is int32, [B]. A row with `finished` other than 0 is dead: it stays in the batch until the host
compacts it, reads and writes no page, and records nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS = 128


def begin_step(
    positions: Tensor,
    finished: Tensor,
    block_tables: Tensor,
    page_size: int,
    slots: Tensor,
    context_lens: Tensor,
    step: Tensor,
) -> None:
    """Write where each row's last token goes in the cache, and how much of the cache its attention reads.

    Args:
        positions: [B] int32, position of the token that this step runs.
        finished: [B] int32.
        block_tables: [B, pages] int32, rows contiguous.
        page_size: tokens per page.
        slots: [B] int32, written: page * page_size + offset in the page; dead: -1.
        context_lens: [B] int32, written: position + 1; dead: 0.
        step: [1] int32, grows by 1.
    """
    assert block_tables.stride(1) == 1, "a row of the block tables must be contiguous"
    num_rows = len(positions)
    _begin_step_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        positions, finished, block_tables, slots, context_lens, step, block_tables.stride(0), num_rows,
        PAGE_SIZE=page_size, BLOCK_ROWS=_BLOCK_ROWS,
    )  # fmt: skip


@triton.jit
def _begin_step_kernel(
    positions, finished, block_tables, slots, context_lens, step, stride, num_rows,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """`begin_step` of some rows; program 0 also advances `step`."""
    if tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_batch = rows < num_rows
    live = in_batch & (tl.load(finished + rows, mask=in_batch, other=1) == 0)
    position = tl.load(positions + rows, mask=live, other=0)
    # A dead row may stand past the end of its table.
    page = tl.load(block_tables + rows.to(tl.int64) * stride + position // PAGE_SIZE, mask=live, other=0)
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    tl.store(slots + rows, tl.where(live, slot, -1), mask=in_batch)
    tl.store(context_lens + rows, tl.where(live, position + 1, 0), mask=in_batch)


def end_step(
    tokens: Tensor,
    logprobs: Tensor,
    stop_token_ids: Tensor,
    limits: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    num_generated: Tensor,
    finished: Tensor,
    step: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
) -> None:
    """Record each live row's token, advance the row, and decide whether it goes on.

    Args:
        tokens: [B] integers, just drawn.
        logprobs: [B] float32, the tokens' log-probs.
        stop_token_ids: [S] int32; S may be 0.
        limits: [B] int32, tokens that the row may generate.
        last_tokens: [B] int32, becomes the token.
        positions: [B] int32, grows by 1.
        num_generated: [B] int32, grows by 1.
        finished: [B] int32, becomes 1 after a stop token, which is part of the completion, or at the limit.
        step: [1] int32, the row of `out_tokens` and `out_logprobs` to write.
        out_tokens: [steps, B] int32, what the host will read: the token; dead: -1.
        out_logprobs: [steps, B] float32: its log-prob; dead: left as it is.
    """
    assert out_tokens.stride() == out_logprobs.stride(), "tokens and log-probs lie alike"
    num_rows = len(tokens)
    _end_step_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        tokens, logprobs, stop_token_ids, limits, last_tokens, positions, num_generated, finished, step,
        out_tokens, out_logprobs, out_tokens.stride(0), num_rows,
        NUM_STOP_TOKENS=len(stop_token_ids), BLOCK_ROWS=_BLOCK_ROWS,
    )  # fmt: skip


@triton.jit
def _end_step_kernel(
    tokens, logprobs, stop_token_ids, limits, last_tokens, positions, num_generated, finished, step,
    out_tokens, out_logprobs, out_stride, num_rows,
    NUM_STOP_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """`end_step` of some rows."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_batch = rows < num_rows
    live = in_batch & (tl.load(finished + rows, mask=in_batch, other=1) == 0)
    token = tl.load(tokens + rows, mask=live, other=-1).to(tl.int32)
    count = tl.load(num_generated + rows, mask=live, other=0) + 1
    done = count >= tl.load(limits + rows, mask=live, other=0)
    for index in range(NUM_STOP_TOKENS):
        done |= token == tl.load(stop_token_ids + index)
    out = tl.load(step) * out_stride + rows
    tl.store(out_tokens + out, token, mask=in_batch)
    tl.store(out_logprobs + out, tl.load(logprobs + rows, mask=live, other=0.0), mask=live)
    tl.store(last_tokens + rows, token, mask=live)
    tl.store(positions + rows, tl.load(positions + rows, mask=live, other=0) + 1, mask=live)
    tl.store(num_generated + rows, count, mask=live)
    tl.store(finished + rows, done.to(tl.int32), mask=live)
