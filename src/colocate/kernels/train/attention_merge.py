"""Attention over two disjoint sets of keys, merged by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Output values that one program merges. With 4 warps a thread has 16 of them: two 16-byte loads of bfloat16
from either output."""
_NUM_WARPS = 4


def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Overwrite `out` and `lse` as `train.operations.merge_attention`; a token's part is contiguous."""
    num_tokens, num_heads, head_dim = out.shape
    assert other_out.shape == out.shape, f"{tuple(other_out.shape)} beside out of {tuple(out.shape)}"
    for values in (out, other_out):
        assert values.stride()[1:] == (head_dim, 1), "a token's heads must be contiguous"
    for sums in (lse, other_lse):
        assert sums.shape == (num_heads, num_tokens), f"lse is {tuple(sums.shape)}, not [H, T] of out"
    block_dim = triton.next_power_of_2(head_dim)
    block_tokens = max(_TILE // block_dim, 1)
    _merge_attention_kernel[(triton.cdiv(num_tokens, block_tokens) * num_heads,)](
        out, lse, other_out, other_lse, out.stride(0), other_out.stride(0), *lse.stride(),
        *other_lse.stride(), num_tokens,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_TOKENS=block_tokens, BLOCK_DIM=block_dim,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


# Strides of log-sum-exps are numbers of tokens, and would have a kernel each where 16 divides them.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["lse_head_stride", "other_lse_head_stride"],
)
def _merge_attention_kernel(
    out, lse, other_out, other_lse, out_stride, other_out_stride, lse_head_stride, lse_token_stride,
    other_lse_head_stride, other_lse_token_stride, num_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Merge some tokens' outputs and log-sum-exps of one head (see `merge_attention`)."""
    # A program's tokens lie side by side in lse; the heads of the same tokens, side by side in out, belong to
    # programs that run at the same time.
    head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    tokens = (tl.program_id(0) // NUM_HEADS).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    in_sequence = tokens < num_tokens
    lse_pointers = lse + head * lse_head_stride + tokens * lse_token_stride
    one = tl.load(lse_pointers, mask=in_sequence, other=float("-inf"))
    two = tl.load(
        other_lse + head * other_lse_head_stride + tokens * other_lse_token_stride,
        mask=in_sequence,
        other=float("-inf"),
    )
    largest = tl.maximum(one, two)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # without keys exp(-inf - 0), not NaN
    one, two = tl.exp(one - largest), tl.exp(two - largest)
    total = one + two
    # A few log-sum-exps are loaded by many threads each: none may be overwritten before all have read it.
    tl.debug_barrier()
    tl.store(lse_pointers, largest + tl.log(total), mask=in_sequence)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)

    columns = tl.arange(0, BLOCK_DIM)[None, :]
    mask = in_sequence[:, None] & (columns < HEAD_DIM)
    pointers = out + tokens[:, None] * out_stride + head * HEAD_DIM + columns
    other_pointers = other_out + tokens[:, None] * other_out_stride + head * HEAD_DIM + columns
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_pointers, mask=mask, other=0.0).to(tl.float32)
    merged = (one * scale)[:, None] * value + (two * scale)[:, None] * other
    tl.store(pointers, merged.to(out.dtype.element_ty), mask=mask)
