"""The memory that the engine takes of one device, as rows: it changes with what prefill and decode allocate.

Legend: L layers, H query heads, K key-value heads, D head size, h hidden size, i width of the MLP,
V vocabulary, b bytes of a parameter.
"""

from __future__ import annotations

from colocate.engines.native.capacity import COPY_BREAK_EVEN, FREE_MEMORY_FRACTION
from colocate.kernels.prefixes import decode_scratch_bytes
from colocate.memory.arena import HANDLE_BYTES
from colocate.memory.rows import Row, total_bytes
from colocate.memory.workload import Workload
from colocate.weights.shapes import ModelShapes


def engine_rows(shapes: ModelShapes, workload: Workload) -> list[Row]:
    """What the engine holds on a GPU all the time, in training as well.

    Those are the adapters' A once more below the weights; the rotary table and the block tables for the
    longest sequence, whose length is rounded up to a power of two; the activations of captured graphs.
    """
    b, rows = workload.parameter_dtype.itemsize, []
    if shapes.has_adapters and shapes.four_bit is None:
        how = f"A once more, for rollouts: {shapes.num_stacked:,} × {b} B"
        rows.append(Row("adapters below weights", "resident", shapes.num_stacked * b, how))
    longest = 1 << (workload.max_sequence_length - 1).bit_length()
    rotary = 2 * longest * shapes.head_size * b
    tables = 4 * workload.decode_rows * -(-longest // workload.page_size)
    graphs = workload.decode_rows * prefill_bytes_per_token(shapes, b)
    how = f"tables for {longest:,} positions, graphs of {workload.decode_rows} rows"
    return [*rows, Row("engine", "resident", rotary + tables + graphs, how)]


def decode_bytes(shapes: ModelShapes, num_rows: int) -> int:
    """The engine's buffers in the arena for decode steps of so many rows: logits, and attention's results."""
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
    """Tokens of KV cache that one sequence takes, without which nothing can be generated."""
    return -(-workload.max_sequence_length // workload.page_size) * workload.page_size


def rollout_rows(
    shapes: ModelShapes, workload: Workload, room_bytes: int | None = None
) -> tuple[list[Row], int]:
    """The rows of a rollout, and the tokens of the KV cache, which takes what it can use of the room.

    Args:
        room_bytes: what the rest of the run leaves of the device; None: as much as is of use.
    """
    per_token = shapes.kv_bytes_per_token(workload.parameter_dtype)
    others, scratch = _prefill_rows(shapes, workload), workload.decode_scratch_bytes
    usable = None
    if room_bytes is not None:
        share = int(FREE_MEMORY_FRACTION["cuda"] * room_bytes)
        usable = min(share, room_bytes - total_bytes(others)) - scratch
    if shapes.four_bit is not None:
        weights = _rollout_weights_row(shapes, workload, usable)
        others.append(weights)
        if usable is not None:
            usable -= weights.size_bytes
    if usable is not None and workload.is_gpu:
        usable = (usable + scratch) // HANDLE_BYTES * HANDLE_BYTES - scratch
    tokens = _kv_tokens(workload, per_token, usable)
    kv_bytes = tokens * per_token
    how = f"{tokens:,} tokens × {per_token:,} B"
    if workload.is_gpu:
        in_handles = -(-(kv_bytes + scratch) // HANDLE_BYTES) * HANDLE_BYTES
        kv_bytes, how = in_handles - scratch, f"{how}, in whole handles of {HANDLE_BYTES // 2**20} MiB"
    kv_cache = Row("KV cache", "rollout", kv_bytes, how)
    return [kv_cache, _decode_row(shapes, workload), *others], tokens


def _kv_tokens(workload: Workload, per_token: int, usable_bytes: int | None) -> int:
    page = workload.page_size
    if workload.kv_cache_tokens is not None:
        return -(-workload.kv_cache_tokens // page) * page
    wanted = useful_kv_tokens(workload)
    if usable_bytes is None:
        return wanted
    return max(least_kv_tokens(workload), min(wanted, usable_bytes // (per_token * page) * page))


def _decode_row(shapes: ModelShapes, workload: Workload) -> Row:
    if workload.is_gpu:
        # The sampler reads the logits where they are: it reduces them and keeps no distribution.
        size_bytes, rows, more = workload.decode_scratch_bytes, workload.decode_rows, "attention's results"
    else:
        rows, more = workload.max_num_seqs, "as much to sample from"
        size_bytes = 2 * 4 * rows * shapes.vocab_size
    how = f"{rows} rows × {shapes.vocab_size:,} logits × 4 B, and {more}"
    return Row("decode buffers", "rollout", size_bytes, how)


def prefill_bytes_per_token(shapes: ModelShapes, b: int) -> int:
    """Normed input and residual, and the wider of: q/k/v and attention's output; gate, up and product."""
    return b * (2 * shapes.hidden_size + max(shapes.qkv_size + shapes.q_size, 3 * shapes.mlp_size))


def _prefill_rows(shapes: ModelShapes, workload: Workload) -> list[Row]:
    b = workload.parameter_dtype.itemsize
    num_prompts = -(-workload.num_running // workload.num_generations)
    tokens = min(workload.max_prefill_tokens, num_prompts * workload.prompt_tokens)
    per_token = prefill_bytes_per_token(shapes, b)
    size_bytes, how = tokens * per_token, f"{tokens:,} tokens × {per_token:,} B"
    if workload.prompt_tokens > workload.max_prefill_tokens:
        # The last piece of a prompt gathers one layer's keys and values of all the pieces before it.
        gathered = 2 * b * shapes.kv_size
        size_bytes += workload.prompt_tokens * gathered
        how += f" and {workload.prompt_tokens:,} × {gathered:,} B of keys and values"
    # Each prompt's wait until its completions have drawn their first tokens; joining takes as much again.
    logits = 2 * 4 * num_prompts * shapes.vocab_size
    return [
        Row("prefill", "rollout", size_bytes, how),
        Row("first logits", "rollout", logits, f"{num_prompts} prompts × {shapes.vocab_size:,} × 4 B, twice"),
    ]


def _rollout_weights_row(shapes: ModelShapes, workload: Workload, usable_bytes: int | None) -> Row:
    """The copy that the engine decodes from, or one matrix; its rule is `capacity.take_weights`'s."""
    b, count = workload.parameter_dtype.itemsize, shapes.num_projection_weights + shapes.num_stacked
    how = f"a copy: {count:,} × {b} B"
    if usable_bytes is not None:
        per_token = shapes.kv_bytes_per_token(workload.parameter_dtype)
        wanted = workload.kv_cache_tokens or useful_kv_tokens(workload)
        copy, left = count * b, usable_bytes - count * b
        pays = left >= COPY_BREAK_EVEN * copy and left >= least_kv_tokens(workload) * per_token
        if left < wanted * per_token and not pays:
            count = max(shapes.group_sizes)
            how = f"one at a time: {count:,} × {b} B"
    return Row("dequantised weights", "rollout", count * b, how)
