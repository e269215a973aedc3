"""The memory that the engine takes on one device, as the planner's rows; b is the bytes of a parameter.

These formulas follow the tensors that prefill and decode allocate, and must be changed with them.
"""

from __future__ import annotations

from colocate.engines.native.capacity import COPY_BREAK_EVEN, FREE_MEMORY_FRACTION
from colocate.kernels.decode.prefixes import decode_scratch_bytes
from colocate.memory.arena import HANDLE_BYTES
from colocate.memory.rows import MemoryRow, total_bytes
from colocate.memory.workload import Workload
from colocate.weights.shapes import ModelShapes

_IN_HANDLES = f"in whole handles of {HANDLE_BYTES // 2**20} MiB"


def engine_rows(shapes: ModelShapes, workload: Workload) -> list[MemoryRow]:
    """The rows of the memory that the engine holds on a GPU all the time, during training as well.

    It holds a second copy of the adapters' A below weights that are not split; the rotary table and the block
    tables for the longest sequence, whose length is rounded up to a power of two; and the activations of
    captured graphs.
    """
    b, rows = workload.parameter_dtype.itemsize, []
    if shapes.has_adapters and shapes.four_bit is None and workload.sharding.num_weight_parts == 1:
        how = f"A once more, for rollouts: {shapes.num_stacked:,} × {b} B"
        rows.append(MemoryRow("adapters below weights", "resident", shapes.num_stacked * b, how))
    longest = 1 << (workload.max_sequence_length - 1).bit_length()
    rotary = shapes.num_rotary_tables * 2 * longest * shapes.head_size * b
    tables = 4 * workload.decode_rows * -(-longest // workload.page_size)
    graphs = workload.decode_rows * prefill_bytes_per_token(shapes, b)
    how = f"tables for {longest:,} positions, graphs of {workload.decode_rows} rows"
    return [*rows, MemoryRow("engine", "resident", rotary + tables + graphs, how)]


def decode_bytes(shapes: ModelShapes, num_rows: int) -> int:
    """Bytes of the arena's buffers for decode steps of `num_rows`: logits, and attention's partial sums."""
    partials = decode_scratch_bytes(num_rows, shapes.num_heads, shapes.num_kv_heads, shapes.head_size)
    return num_rows * shapes.vocab_size * 4 + sum(partials)


def useful_kv_tokens(workload: Workload) -> int:
    """Tokens of KV cache with which the rollout never waits (`engines.native.capacity.useful_pages`)."""
    page, prompt = workload.page_size, workload.prompt_tokens
    shared = prompt // page
    own = -(-(workload.max_sequence_length - 1) // page) - shared
    num_prompts = -(-workload.num_rollout_sequences // workload.num_generations)
    num_shared = min(num_prompts, workload.max_num_seqs)
    return page * (workload.num_running * (own + 1) + num_shared * (shared + 1))


def least_kv_tokens(workload: Workload) -> int:
    """Tokens of the smallest KV cache, which holds one sequence of the greatest length."""
    return -(-workload.max_sequence_length // workload.page_size) * workload.page_size


def rollout_rows(
    shapes: ModelShapes, workload: Workload, room_bytes: int | None = None
) -> tuple[list[MemoryRow], int]:
    """The rows of a rollout, and the tokens of its KV cache, as large as the rollout can use or `room_bytes`
    allow (None: without limit)."""
    per_token = shapes.kv_bytes_per_token(workload.kv_dtype)
    others, scratch = _prefill_rows(shapes, workload), workload.decode_scratch_bytes
    in_8bit, usable = _8bit_rows(shapes, workload), None
    if room_bytes is not None:
        room_bytes -= total_bytes(in_8bit)  # they are taken first
        share = int(FREE_MEMORY_FRACTION["cuda"] * room_bytes)
        usable = min(share, room_bytes - total_bytes(others)) - scratch
    others += in_8bit
    weights = _rollout_weights_row(shapes, workload, usable)
    if weights is not None:
        others.append(weights)
        if usable is not None:
            usable -= weights.size_bytes
    if usable is not None and workload.is_gpu:
        usable = (usable + scratch) // HANDLE_BYTES * HANDLE_BYTES - scratch
    tokens = _kv_tokens(workload, per_token, usable)
    kv_bytes = tokens * per_token
    how = f"{tokens:,} tokens × {per_token:,} B"
    if workload.is_gpu:
        kv_bytes, how = _in_handles(kv_bytes + scratch) - scratch, f"{how}, {_IN_HANDLES}"
    kv_cache = MemoryRow("KV cache", "rollout", kv_bytes, how)
    return [kv_cache, _decode_row(shapes, workload), *others], tokens


def _kv_tokens(workload: Workload, per_token: int, usable_bytes: int | None) -> int:
    page = workload.page_size
    if workload.kv_cache_tokens is not None:
        return -(-workload.kv_cache_tokens // page) * page
    wanted = useful_kv_tokens(workload)
    if usable_bytes is None:
        return wanted
    return max(least_kv_tokens(workload), min(wanted, usable_bytes // (per_token * page) * page))


def _decode_row(shapes: ModelShapes, workload: Workload) -> MemoryRow:
    if workload.is_gpu:
        # The sampler reads the logits where they are: it reduces them and keeps no distribution.
        size_bytes, rows, more = workload.decode_scratch_bytes, workload.decode_rows, "attention's results"
    else:
        rows, more = workload.max_num_seqs, "as much to sample from"
        size_bytes = 2 * 4 * rows * shapes.vocab_size
    how = f"{rows} rows × {shapes.vocab_size:,} logits × 4 B, and {more}"
    return MemoryRow("decode buffers", "rollout", size_bytes, how)


def prefill_bytes_per_token(shapes: ModelShapes, b: int) -> int:
    """Bytes of activations per token of a prefill: normed input and residual, and the larger of two sets.

    They are q, k, v and attention's output in an attention block; gate, up and their product in an MLP.
    """
    return b * (2 * shapes.hidden_size + max(shapes.qkv_size + shapes.q_size, 3 * shapes.mlp_size))


def _prefill_rows(shapes: ModelShapes, workload: Workload) -> list[MemoryRow]:
    b = workload.parameter_dtype.itemsize
    num_prompts = -(-workload.num_running // workload.num_generations)
    tokens = min(workload.max_prefill_tokens, num_prompts * workload.prompt_tokens)
    per_token = prefill_bytes_per_token(shapes, b)
    size_bytes, how = tokens * per_token, f"{tokens:,} tokens × {per_token:,} B"
    if workload.prompt_tokens > workload.max_prefill_tokens:
        # The last piece of a prompt gathers the keys and values of all earlier pieces, layer by layer.
        gathered = 2 * b * shapes.kv_size
        size_bytes += workload.prompt_tokens * gathered
        how += f" and {workload.prompt_tokens:,} × {gathered:,} B of keys and values"
    # The logits of each prompt are kept until its completions have drawn their first tokens; concatenating
    # the logits of several prefills needs their memory a second time.
    logits = 2 * 4 * num_prompts * shapes.vocab_size
    return [
        MemoryRow("prefill", "rollout", size_bytes, how),
        MemoryRow(
            "first logits", "rollout", logits, f"{num_prompts} prompts × {shapes.vocab_size:,} × 4 B, twice"
        ),
    ]


def _8bit_rows(shapes: ModelShapes, workload: Workload) -> list[MemoryRow]:
    """The row of the weights in 8 bits (`EightBitWeights`), if the rollout has any."""
    if workload.rollout_precision != "fp8":
        return []
    count = shapes.num_8bit_weights
    size_bytes, how = count, f"{count:,} × 1 B, all projections but o"
    if workload.is_gpu:
        size_bytes, how = _in_handles(count), f"{how}, {_IN_HANDLES}"
    return [MemoryRow("weights in 8 bits", "rollout", size_bytes, how)]


def _in_handles(num_bytes: int) -> int:
    return -(-num_bytes // HANDLE_BYTES) * HANDLE_BYTES


def _rollout_weights_row(
    shapes: ModelShapes, workload: Workload, usable_bytes: int | None
) -> MemoryRow | None:
    """The row of the dequantised weights, a copy or one matrix, chosen as `capacity.take_weights` does; or of
    the copies of the adapters' A, if weights are split; or of the weights that are gathered."""
    b = workload.parameter_dtype.itemsize
    if workload.sharding.gathers:
        how = f"{shapes.num_parameters:,} parameters × {b} B"
        return MemoryRow("gathered weights", "rollout", shapes.weight_bytes(workload.parameter_dtype), how)
    if shapes.four_bit is None:
        if not (workload.is_gpu and shapes.has_adapters and workload.sharding.num_weight_parts > 1):
            return None
        how = f"A once more, this rank's part: {shapes.num_stacked:,} × {b} B"
        return MemoryRow("adapters beside weights", "rollout", shapes.num_stacked * b, how)
    count = shapes.num_projection_weights + shapes.num_stacked
    how = f"a copy: {count:,} × {b} B"
    if usable_bytes is not None:
        per_token = shapes.kv_bytes_per_token(workload.kv_dtype)
        wanted = workload.kv_cache_tokens or useful_kv_tokens(workload)
        copy, left = count * b, usable_bytes - count * b
        is_copy_faster = left >= COPY_BREAK_EVEN * copy
        fits_one = left >= least_kv_tokens(workload) * per_token
        if left < wanted * per_token and not (is_copy_faster and fits_one):
            count = max(shapes.group_sizes)
            how = f"one at a time: {count:,} × {b} B"
    return MemoryRow("dequantised weights", "rollout", count * b, how)
