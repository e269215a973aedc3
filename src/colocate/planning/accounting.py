"""What a run asks of one device's memory, as rows: what stays, and what a rollout takes.

The formulas follow the lines of the engine's prefill and decode: this file has to know what those allocate,
and changes with them. `train_accounting` has the other turn at the same memory.

Legend: L layers, H query heads, K key-value heads, D head size, h hidden size, i width of the MLP,
V vocabulary, b bytes of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from colocate.engines.native.capacity import COPY_BREAK_EVEN, FREE_MEMORY_FRACTION
from colocate.memory.arena import HANDLE_BYTES
from colocate.planning.shapes import ModelShapes

Phase = Literal["resident", "rollout", "train"]
Moment = Literal["head", "layer", "embedding", "step"]

CONTEXT_BYTES = int(0.55 * 2**30)
"""The CUDA context and the code of the libraries' kernels."""
CUBLAS_BYTES = 64 * 2**20
"""cuBLAS's workspaces: 32 MiB for each stream that multiplies, on compute capability 9.0."""

_FLOAT32_BYTES = 4


def _adam_bytes(num_elements: int) -> int:
    return 2 * _FLOAT32_BYTES * num_elements


def _adam_8bit_bytes(num_elements: int) -> int:
    """A byte per element, and for each block of 256 its largest value in float32 (arXiv:2110.02861, §2).

    bitsandbytes leaves tensors of fewer than 4,096 elements in float32.
    """
    return 2 * _one_moment_8bit_bytes(num_elements)


def _one_moment_8bit_bytes(num_elements: int) -> int:
    if num_elements < 4096:
        return _FLOAT32_BYTES * num_elements
    return num_elements + _FLOAT32_BYTES * -(-num_elements // 256)


def _one_moment_bytes(num_elements: int) -> int:
    return _FLOAT32_BYTES * num_elements


MOMENTS_BYTES: dict[str, Callable[[int], int]] = {
    "adamw_torch": _adam_bytes,
    "adamw_torch_fused": _adam_bytes,
    "adamw_bnb_8bit": _adam_8bit_bytes,
    "adamw_8bit": _adam_8bit_bytes,
    "sgd": lambda num_elements: 0,
    "lion_32bit": _one_moment_bytes,
    "lion_8bit": _one_moment_8bit_bytes,
    "rmsprop_bnb": _one_moment_bytes,
    "rmsprop_bnb_32bit": _one_moment_bytes,
    "rmsprop_bnb_8bit": _one_moment_8bit_bytes,
    "ademamix": lambda num_elements: 3 * _one_moment_bytes(num_elements),
    "ademamix_8bit": lambda num_elements: 3 * _one_moment_8bit_bytes(num_elements),
}
"""Optimizer state of one trained tensor, by its number of elements."""


@dataclass(frozen=True)
class Workload:
    """What a run asks of one device, beside the model's shape."""

    parameter_dtype: torch.dtype
    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: int
    """Of the longest completion."""
    num_generations: int = 8
    """G, completions per prompt."""
    num_step_sequences: int = 8
    """Samples of one optimizer step on this rank."""
    num_rollout_sequences: int = 8
    """Completions of one rollout on this rank."""
    share_prompts: bool = True
    is_gpu: bool = True
    max_num_seqs: int = 512
    """Sequences decoded side by side at most."""
    page_size: int = 64
    kv_cache_tokens: int | None = None
    """None: what the rollout can use, or as much of that as fits."""
    decode_rows: int = 512
    """Rows that decode steps have room for."""
    decode_scratch_bytes: int = 0
    """The engine's own buffers in the arena: logits of these rows, partial results of attention."""
    max_prefill_tokens: int = 8192
    optim: str = "adamw_torch_fused"
    has_reference: bool = False
    entropy_gradient: bool = False
    """Whether the loss has an entropy bonus."""
    has_cudnn: bool = False
    """Whether attention runs through cuDNN (`policy.cudnn_attention`)."""

    @property
    def max_sequence_length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def num_running(self) -> int:
        return min(self.max_num_seqs, self.num_rollout_sequences)

    @property
    def step_tokens(self) -> int:
        """Of one optimizer step, a shared prompt counted once."""
        return self._tokens(self.num_step_sequences)

    def _tokens(self, num_sequences: int) -> int:
        group = self.num_generations if self.share_prompts else 1
        return -(-num_sequences // group) * self.prompt_tokens + num_sequences * self.completion_tokens


@dataclass(frozen=True)
class Row:
    name: str
    phase: Phase
    size_bytes: int
    how: str
    """The arithmetic, in words."""
    moment: Moment | None = None
    """Of training; None: all of the phase."""
    is_transient: bool = False
    """Grows with the micro-batch's tokens: what a measured step corrects."""


# ── Resident ─────────────────────────────────────────────────────────────────────────────────────────────


def resident_rows(shapes: ModelShapes, workload: Workload) -> list[Row]:
    """What is there in rollout and in training; masters and moments are `optimizer_rows`."""
    b, dtype = workload.parameter_dtype.itemsize, workload.parameter_dtype
    count = shapes.num_parameters
    weights = shapes.weight_bytes(dtype)
    how = f"{count:,} parameters × {b} B"
    if shapes.four_bit is not None:
        scales = "double quantised" if shapes.four_bit.double_quantized else "float32"
        how = (
            f"{shapes.num_projection_weights:,} × 0.5 B and {scales} scales, "
            f"{count - shapes.num_projection_weights:,} × {b} B"
        )
    rows = [Row("weights", "resident", weights, how)]
    if shapes.has_adapters:
        # PEFT keeps adapters in float32 whatever the base model's type is, so they need no masters.
        adapters = sum(shapes.adapter_sizes)
        rows.append(Row("LoRA adapters", "resident", adapters * 4, f"{adapters:,} parameters × 4 B"))
        if workload.is_gpu and shapes.four_bit is None:
            how = f"A once more, for rollouts: {shapes.num_stacked:,} × {b} B"
            rows.append(Row("adapters below weights", "resident", shapes.num_stacked * b, how))
    elif workload.has_reference:
        # With LoRA the reference is the base model with its adapters off.
        rows.append(Row("reference", "resident", weights, how))
    if workload.is_gpu:
        rows.append(_engine_row(shapes, workload))
        context = CONTEXT_BYTES + CUBLAS_BYTES
        rows.append(
            Row(
                "CUDA",
                "resident",
                context,
                f"{CONTEXT_BYTES / 2**30:.2f} GiB of context, cuBLAS's workspaces",
            )
        )
    return rows


def optimizer_rows(shapes: ModelShapes, workload: Workload, phase: Phase) -> list[Row]:
    """Masters and moments: resident, or there in training only if they are on the host in rollout."""
    trained, rows = shapes.num_trained, []
    if workload.parameter_dtype.itemsize < _FLOAT32_BYTES and not shapes.has_adapters:
        rows.append(Row("float32 masters", phase, trained * 4, f"{trained:,} trained × 4 B"))
    moments = sum(map(MOMENTS_BYTES[workload.optim], shapes.trained_sizes))
    rows.append(Row("moments", phase, moments, f"{trained:,} trained × {moments / trained:.3g} B"))
    return rows


def _engine_row(shapes: ModelShapes, workload: Workload) -> Row:
    """Rotary table and block tables for the longest sequence, rounded up to a power of two as the engine
    does, and the activations that captured graphs hold."""
    b = workload.parameter_dtype.itemsize
    longest = 1 << (workload.max_sequence_length - 1).bit_length()
    rotary = 2 * longest * shapes.head_size * b
    tables = 4 * workload.decode_rows * -(-longest // workload.page_size)
    graphs = workload.decode_rows * _prefill_bytes_per_token(shapes, b)
    how = f"tables for {longest:,} positions, graphs of {workload.decode_rows} rows"
    return Row("engine", "resident", rotary + tables + graphs, how)


# ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────────


def useful_kv_tokens(workload: Workload) -> int:
    """Tokens of KV cache with which the rollout never waits (`engines.native.capacity.useful_pages`)."""
    page, prompt = workload.page_size, workload.prompt_tokens
    shared = prompt // page
    own = -(-(workload.max_sequence_length - 1) // page) - shared
    num_prompts = -(-workload.num_rollout_sequences // workload.num_generations)
    num_shared = min(num_prompts, workload.max_num_seqs)
    return page * (workload.num_running * (own + 1) + num_shared * (shared + 1))


def least_kv_tokens(workload: Workload) -> int:
    """Those of one sequence, without which nothing can be generated."""
    return -(-workload.max_sequence_length // workload.page_size) * workload.page_size


def rollout_rows(
    shapes: ModelShapes, workload: Workload, room_bytes: int | None = None
) -> tuple[list[Row], int]:
    """The rows, and the tokens of the KV cache, which takes what it can use of the room.

    Args:
        room_bytes: what the rest of the run leaves of the device; None: as much as is of use.
    """
    per_token = shapes.kv_bytes_per_token(workload.parameter_dtype)
    others = [*_prefill_rows(shapes, workload)]
    scratch = workload.decode_scratch_bytes
    others_bytes = scratch + sum(row.size_bytes for row in others)
    usable = None
    if room_bytes is not None:
        usable = min(int(FREE_MEMORY_FRACTION["cuda"] * room_bytes) - scratch, room_bytes - others_bytes)
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
    decode = Row("decode buffers", "rollout", *_decode_bytes(shapes, workload))
    return [kv_cache, decode, *others], tokens


def _kv_tokens(workload: Workload, per_token: int, usable_bytes: int | None) -> int:
    page = workload.page_size
    if workload.kv_cache_tokens is not None:
        return -(-workload.kv_cache_tokens // page) * page
    wanted = useful_kv_tokens(workload)
    if usable_bytes is None:
        return wanted
    return max(least_kv_tokens(workload), min(wanted, usable_bytes // (per_token * page) * page))


def _decode_bytes(shapes: ModelShapes, workload: Workload) -> tuple[int, str]:
    vocab = shapes.vocab_size
    if workload.is_gpu:
        # The sampler reads the logits where they are: it reduces them and keeps no distribution.
        how = f"{workload.decode_rows} rows × {vocab:,} logits × 4 B, and attention's partial results"
        return workload.decode_scratch_bytes, how
    size_bytes = 2 * _FLOAT32_BYTES * workload.max_num_seqs * vocab
    return (
        size_bytes,
        f"{workload.max_num_seqs} sequences × {vocab:,} tokens × 4 B, and as much to sample from",
    )


def _prefill_bytes_per_token(shapes: ModelShapes, b: int) -> int:
    """Normed input and residual, and the wider of: q/k/v and attention's output; gate, up and product."""
    return b * (2 * shapes.hidden_size + max(shapes.qkv_size + shapes.q_size, 3 * shapes.mlp_size))


def _prefill_rows(shapes: ModelShapes, workload: Workload) -> list[Row]:
    b = workload.parameter_dtype.itemsize
    num_prompts = -(-workload.num_running // workload.num_generations)
    tokens = min(workload.max_prefill_tokens, num_prompts * workload.prompt_tokens)
    per_token = _prefill_bytes_per_token(shapes, b)
    size_bytes, how = tokens * per_token, f"{tokens:,} tokens × {per_token:,} B"
    if workload.prompt_tokens > workload.max_prefill_tokens:
        # The last piece of a prompt gathers one layer's keys and values of all the pieces before it.
        gathered = 2 * b * shapes.kv_size
        size_bytes += workload.prompt_tokens * gathered
        how += f" and {workload.prompt_tokens:,} × {gathered:,} B of keys and values"
    # Of every prompt, until its completions have drawn their first tokens; once more while they are joined.
    logits = 2 * _FLOAT32_BYTES * num_prompts * shapes.vocab_size
    return [
        Row("prefill", "rollout", size_bytes, how),
        Row("first logits", "rollout", logits, f"{num_prompts} prompts × {shapes.vocab_size:,} × 4 B, twice"),
    ]


def _rollout_weights_row(shapes: ModelShapes, workload: Workload, usable_bytes: int | None) -> Row:
    """The copy that the engine decodes from, or one matrix; its rule is `capacity.take_weights`'s."""
    b = workload.parameter_dtype.itemsize
    count = shapes.num_projection_weights + shapes.num_stacked
    copy, per_token = count * b, shapes.kv_bytes_per_token(workload.parameter_dtype)
    one = max(shapes.group_sizes) * b
    is_copy = True
    if usable_bytes is not None:
        wanted = workload.kv_cache_tokens or useful_kv_tokens(workload)
        left = usable_bytes - copy
        pays = left >= COPY_BREAK_EVEN * copy and left >= least_kv_tokens(workload) * per_token
        is_copy = left >= wanted * per_token or pays
    if is_copy:
        return Row("dequantised weights", "rollout", copy, f"a copy: {count:,} × {b} B")
    return Row("dequantised weights", "rollout", one, f"one at a time: {max(shapes.group_sizes):,} × {b} B")
