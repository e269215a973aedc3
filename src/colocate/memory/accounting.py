"""Where the memory of one device goes, row by row, from shapes alone.

A run has two turns at the same memory, rollout and training, beside what stays: weights, masters, moments.
Training is at its peak at one of a few moments, which are all counted:

    head        log-probs forward and backward; what all layers keep is there
    layer       the backward pass of one layer at its widest
    embedding   the gradient of the token embedding, after the layers have let go of all they kept
    step        gradients, and nothing else, beside masters and moments

The formulas follow the lines of `colocate.policy.stack`, `attention` and `logprobs`, and of the engine's
prefill: this file has to know what those allocate, and changes with them.

Legend: L layers, H query heads, K key-value heads, D head size, h hidden size, i width of the MLP,
V vocabulary, T tokens of one micro-batch, N of them predicted, b bytes of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from colocate.memory.arena import HANDLE_BYTES
from colocate.memory.shapes import ModelShapes
from colocate.memory.train_plan import ActivationPolicy, TrainPlan
from colocate.policy.logprobs import logprob_bytes
from colocate.policy.stack import MLP_TILE_TOKENS

Phase = Literal["resident", "rollout", "train"]
Moment = Literal["head", "layer", "embedding", "step"]

CONTEXT_BYTES = int(0.55 * 2**30)
"""The CUDA context and the code of the libraries' kernels."""
CUBLAS_BYTES = 64 * 2**20
"""cuBLAS's workspaces: 32 MiB for each stream that multiplies, on compute capability 9.0."""
HOLES = 0.02
"""What PyTorch's allocator holds beyond what tensors ask for, as a share of that: blocks of 2 MiB, and holes
between tensors that come and go."""
FREE_MEMORY_FRACTION = 0.9
"""Share of the free memory of a GPU that the engine takes for its KV cache
(`colocate.engines.native.capacity`)."""
COPY_BREAK_EVEN = 0.8
"""KV cache from which on the engine prefers a copy of 4-bit weights, as a share of the copy (there, too)."""

_FLOAT32_BYTES = 4
_INPUTS_IN_FLIGHT = 3
"""Layers whose inputs are on the device under "offload": one in use and one on its way, and while both are,
one that the allocator has not got back yet."""
_SAMPLE_BYTES = 32
"""Of a token of a step's samples: its id, mask, and log-probs of rollout, old policy, reference and new."""
_PACK_BYTES = 32
"""Of a token of a micro-batch: id and position, the index of what it predicts, and the loss's numbers."""


def _adam_bytes(num_elements: int) -> int:
    return 2 * _FLOAT32_BYTES * num_elements


def _adam_8bit_bytes(num_elements: int) -> int:
    """A byte per element, and for each block of 256 its largest value in float32 (arXiv:2110.02861, §2).

    bitsandbytes leaves tensors of fewer than 4,096 elements in float32.
    """
    if num_elements < 4096:
        return _adam_bytes(num_elements)
    return 2 * (num_elements + _FLOAT32_BYTES * -(-num_elements // 256))


MOMENTS_BYTES: dict[str, Callable[[int], int]] = {
    "adamw_torch": _adam_bytes,
    "adamw_torch_fused": _adam_bytes,
    "adamw_bnb_8bit": _adam_8bit_bytes,
    "adamw_8bit": _adam_8bit_bytes,
    "sgd": lambda num_elements: 0,
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


@dataclass(frozen=True)
class Microbatch:
    """What a micro-batch of some budget holds."""

    num_tokens: int  # T
    num_predicted: int  # N
    num_shared: int
    """Tokens of prompts that several completions share."""

    @classmethod
    def of(cls, workload: Workload, budget: int) -> Microbatch:
        """The fullest that the budget allows, of the workload's longest sequences."""
        prompt, completion = workload.prompt_tokens, workload.completion_tokens
        num_tokens = min(max(budget, workload.max_sequence_length), workload.step_tokens)
        members = 1
        if workload.share_prompts:
            most = min(workload.num_generations, workload.num_step_sequences)
            members = max(1, min(most, (num_tokens - prompt) // completion))
        of_group = prompt + members * completion
        return cls(
            num_tokens=num_tokens,
            num_predicted=-(-num_tokens * members * completion // of_group),
            num_shared=num_tokens * prompt // of_group if members > 1 else 0,
        )


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
    return page * (workload.num_running * (own + 2) + num_shared * shared)


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
        usable = min(int(FREE_MEMORY_FRACTION * room_bytes) - scratch, room_bytes - others_bytes)
    if shapes.four_bit is not None:
        weights = _rollout_weights_row(shapes, workload, usable)
        others.append(weights)
        if usable is not None:
            usable -= weights.size_bytes
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
    copy, per_token = shapes.num_projection_weights * b, shapes.kv_bytes_per_token(workload.parameter_dtype)
    one = max(shapes.group_sizes) * b
    is_copy = True
    if usable_bytes is not None:
        wanted = workload.kv_cache_tokens or useful_kv_tokens(workload)
        left = usable_bytes - copy
        pays = left >= COPY_BREAK_EVEN * copy and left >= least_kv_tokens(workload) * per_token
        is_copy = left >= wanted * per_token or pays
    if is_copy:
        count = shapes.num_projection_weights
        return Row("dequantised weights", "rollout", copy, f"a copy: {count:,} × {b} B")
    return Row("dequantised weights", "rollout", one, f"one at a time: {max(shapes.group_sizes):,} × {b} B")


# ── Training ─────────────────────────────────────────────────────────────────────────────────────────────


def kept_bytes_per_token(shapes: ModelShapes, dtype: torch.dtype, policy: ActivationPolicy) -> int:
    """What one layer keeps for its backward pass on the device (`colocate.policy.stack`)."""
    b, h = dtype.itemsize, shapes.hidden_size
    if policy == "offload":
        return 0
    if policy == "full":
        return b * h
    lse = max(_FLOAT32_BYTES, b) * shapes.num_heads
    kept = b * (2 * h + shapes.qkv_size + shapes.q_size) + lse
    return kept + (2 * b * shapes.mlp_size if policy == "keep" else 0)


def train_rows(shapes: ModelShapes, workload: Workload, plan: TrainPlan) -> list[Row]:
    """All of training: rows of the whole phase, and those of each moment."""
    microbatch = Microbatch.of(workload, plan.budget(workload.max_sequence_length))
    is_only = microbatch.num_tokens >= workload.step_tokens
    rows = optimizer_rows(shapes, workload, "train") if plan.offload_optimizer else []
    tokens = workload.num_step_sequences * workload.max_sequence_length
    rows += [
        Row("samples", "train", tokens * _SAMPLE_BYTES, f"{tokens:,} tokens × {_SAMPLE_BYTES} B"),
        _pack_row(shapes, workload, microbatch),
        *_head_rows(shapes, workload, plan, microbatch, is_only),
        *_layer_rows(shapes, workload, plan, microbatch, is_only),
        *_embedding_rows(shapes, workload, microbatch),
        _gradients_row("step", shapes.num_trained),
    ]
    return rows


def _pack_row(shapes: ModelShapes, workload: Workload, microbatch: Microbatch) -> Row:
    per_token = _PACK_BYTES + 2 * workload.parameter_dtype.itemsize * shapes.head_size
    how = f"{microbatch.num_tokens:,} tokens × {per_token} B: ids, positions, rotary angles"
    return Row("pack", "train", microbatch.num_tokens * per_token, how, is_transient=True)


def _gradients_row(moment: Moment, num_gradients: int) -> Row:
    return Row("gradients", "train", num_gradients * 4, f"{num_gradients:,} trained × 4 B", moment)


def _kept_row(
    moment: Moment, shapes: ModelShapes, workload: Workload, plan: TrainPlan, tokens: int, num_layers: int
) -> Row:
    policy, b = plan.activation_policy, workload.parameter_dtype.itemsize
    per_layer = kept_bytes_per_token(shapes, workload.parameter_dtype, policy)
    if policy == "offload":
        num_layers, per_layer = min(num_layers, _INPUTS_IN_FLIGHT), b * shapes.hidden_size
    how = f"{policy!r}: {tokens:,} tokens × {num_layers} layers × {per_layer:,} B"
    return Row("kept by layers", "train", tokens * num_layers * per_layer, how, moment, is_transient=True)


def _trains_head(shapes: ModelShapes) -> bool:
    return not shapes.has_adapters


def _head_rows(
    shapes: ModelShapes, workload: Workload, plan: TrainPlan, microbatch: Microbatch, is_only: bool
) -> list[Row]:
    dtype, b = workload.parameter_dtype, workload.parameter_dtype.itemsize
    hidden, predicted, trains_head = shapes.hidden_size, microbatch.num_predicted, _trains_head(shapes)
    logprobs = logprob_bytes(
        predicted, hidden, shapes.vocab_size, dtype, chunk_size=plan.logprob_chunk_size,
        trains_head=trains_head, entropy_gradient=workload.entropy_gradient,
    )  # fmt: skip
    rows = [
        _gradients_row("head", 0 if is_only else shapes.num_trained),
        _kept_row("head", shapes, workload, plan, microbatch.num_tokens, shapes.num_layers),
        # The last layer's output where something is predicted, its norm, and the gradient of that.
        Row(
            "hidden states", "train", 3 * predicted * hidden * b,
            f"3 × {predicted:,} tokens × {hidden * b:,} B", "head", is_transient=True,
        ),
        Row(
            "log-probs", "train", logprobs,
            f"{min(plan.logprob_chunk_size, predicted):,} tokens × {shapes.vocab_size:,} logits at a time",
            "head",
        ),
    ]  # fmt: skip
    if trains_head:
        rows.append(_head_gradient_row("head", shapes, b))
    return rows


def _head_gradient_row(moment: Moment, shapes: ModelShapes, b: int) -> Row:
    count = shapes.num_head_weights
    return Row("head's gradient", "train", count * b, f"{count:,} weights × {b} B", moment)


def _layer_rows(
    shapes: ModelShapes, workload: Workload, plan: TrainPlan, microbatch: Microbatch, is_only: bool
) -> list[Row]:
    """One layer's backward pass. With one micro-batch gradients appear as kept activations go, so that the
    peak is at one of the two ends; later micro-batches find all gradients there."""
    b, tokens = workload.parameter_dtype.itemsize, microbatch.num_tokens
    trained, head = shapes.num_trained, shapes.num_head_weights if _trains_head(shapes) else 0

    def kept(num_layers: int) -> Row:
        return _kept_row("layer", shapes, workload, plan, tokens, num_layers)

    if is_only:
        # The embedding's gradient comes last; a tied head's waits for it.
        ends = [
            (0 if shapes.has_tied_head else head, shapes.num_layers),
            (trained - head, 1),
        ]
        sizes = [kept(num_layers).size_bytes + 4 * gradients for gradients, num_layers in ends]
        gradients, num_layers = ends[sizes.index(max(sizes))]
    else:
        gradients, num_layers = trained, shapes.num_layers
    rows = [_gradients_row("layer", gradients), kept(num_layers)]
    if head and shapes.has_tied_head:
        rows.append(_head_gradient_row("layer", shapes, b))
    widest, how = _widest_of_layer(shapes, workload, plan.activation_policy, microbatch)
    return [*rows, Row("one layer's backward", "train", widest, how, "layer", is_transient=True)]


def _widest_of_layer(
    shapes: ModelShapes, workload: Workload, policy: ActivationPolicy, microbatch: Microbatch
) -> tuple[int, str]:
    """`DecoderLayer.backward`, stage by stage: the most bytes beside what the layer keeps."""
    b, h, tokens = workload.parameter_dtype.itemsize, shapes.hidden_size, microbatch.num_tokens
    # Gradients of the layer's output and of the MLP's input.
    base = 2 * tokens * h * b
    if policy in ("full", "offload"):
        # q/k/v, attention's output, its log-sum-exps and the MLP's input are made again.
        base += tokens * (b * (shapes.qkv_size + shapes.q_size + h) + 4 * shapes.num_heads)
    stages = _mlp_stages(shapes, b, policy, tokens) | _attention_stages(shapes, b, policy, microbatch)
    name = max(stages, key=stages.__getitem__)
    return base + stages[name], f"{tokens:,} tokens, widest in {name}"


def _mlp_stages(shapes: ModelShapes, b: int, policy: ActivationPolicy, tokens: int) -> dict[str, int]:
    """`DecoderLayer._mlp_backward`, at the last tile."""
    h, i = shapes.hidden_size, shapes.mlp_size
    tile = tokens if policy == "keep" else min(tokens, MLP_TILE_TOKENS)
    gate_up = 0 if policy == "keep" else 2 * i
    _, _, gate_up_weights, down_weights = shapes.group_sizes
    # A frozen 4-bit weight is dequantised for its product.
    unpacked = b if shapes.four_bit is not None else 0
    in_tile = earlier = 0
    if not shapes.has_adapters:
        in_tile = b
        # A second tile's gradients are added to the first one's in float32.
        earlier = 4 * (gate_up_weights + down_weights) if tile < tokens else 0
    return {
        "the MLP's first product": tile * b * (h + gate_up) + unpacked * gate_up_weights + earlier,
        "down_proj": tile * b * (h + gate_up + i) + unpacked * down_weights + earlier,
        "the activation function": tile * b * (h + gate_up + 4 * i) + earlier,
        "gate and up's gradient": tile * b * (h + 2 * i)
        + earlier
        # The first tile's are still there in their own type when the second's come.
        + in_tile * (gate_up_weights * (2 if earlier else 1) + (0 if earlier else down_weights)),
        "gate and up": tile * b * (2 * h + 2 * i)
        + unpacked * gate_up_weights
        + (earlier or in_tile * (gate_up_weights + down_weights)),
    }


def _attention_stages(
    shapes: ModelShapes, b: int, policy: ActivationPolicy, microbatch: Microbatch
) -> dict[str, int]:
    """Attention's backward pass, with what `_flash_attention_backward` takes for itself: the gradient of q in
    float32, a float32 per head and token, and with grouped queries the gradients of k and v per query head."""
    h, q, kv, heads = shapes.hidden_size, shapes.q_size, shapes.kv_size, shapes.num_heads
    tokens, shared = microbatch.num_tokens, microbatch.num_shared
    weights_qkv, weights_o, *weights_mlp = shapes.group_sizes
    gradients = all_gradients = 0
    if not shapes.has_adapters:
        is_tiled = policy != "keep" and tokens > MLP_TILE_TOKENS
        gradients = sum(weights_mlp) * (4 if is_tiled else b) + weights_o * b
        # In the end the sums of tiles are rounded to the parameters' type, all at once.
        all_gradients = gradients + weights_qkv * b + (sum(weights_mlp) * b if is_tiled else 0)
    # q and k after rotation, the output's gradient, and the gradients of q, k and v.
    inputs = b * (3 * q + 3 * kv)
    accumulator = 4 * shapes.num_heads * (-(-shapes.head_size // 32) * 32) + 4 * heads
    expanded = 2 * b * q if shapes.num_kv_heads < heads else 0
    stages = {"attention": gradients + tokens * (inputs + accumulator + expanded)}
    if shared:
        of_completions = (tokens - shared) * (b * q + accumulator + 4 * heads)
        of_prompts = shared * (2 * b * kv + expanded)
        stages["attention to prompts"] = gradients + tokens * inputs + of_completions + of_prompts
    unpacked = b * max(weights_qkv, weights_o) if shapes.four_bit is not None else 0
    stages["q, k and v"] = tokens * b * (shapes.qkv_size + 2 * h) + all_gradients + unpacked
    return stages


def _embedding_rows(shapes: ModelShapes, workload: Workload, microbatch: Microbatch) -> list[Row]:
    rows = [_gradients_row("embedding", shapes.num_trained)]
    if shapes.has_adapters:
        return rows
    b, h, tokens = workload.parameter_dtype.itemsize, shapes.hidden_size, microbatch.num_tokens
    count = shapes.num_head_weights * (2 if shapes.has_tied_head else 1)
    # PyTorch sums over equal tokens in float32, in pieces of ten.
    pieces = tokens // 10 + min(tokens, shapes.vocab_size)
    size_bytes = count * b + tokens * h * b + pieces * h * 4
    how = f"{count:,} weights × {b} B, {pieces:,} partial sums × {h * 4:,} B"
    return [*rows, Row("embedding's gradient", "train", size_bytes, how, "embedding")]
