"""The memory and the work of a training step: both change with what the optimizer, the stack, attention and
log-probs allocate and compute.

A step is at its peak at one of a few moments, which are all counted:

    head        log-probs forward and backward; what all layers keep is there
    layer       the backward pass of one layer at its widest
    embedding   the gradient of the token embedding, after the layers have let go of all they kept
    reduce      several ranks add up their gradients, and each keeps its share of the sums
    step        gradients, and nothing else, besides masters and moments

Sizes that vary inside a moment are bounded from above; the first measured step corrects the excess
(`planning.planner.Planner.refine`).

Legend: L layers, H query heads, K key-value heads, D head size, h hidden size, i width of the MLP,
V vocabulary, T tokens of one micro-batch, N of them predicted, b bytes of a parameter.

Where ranks share the weights, each holds a part of every matrix and of its gradient, and the whole of a
matrix only while it is in use; the sizes of such a part are `ModelShapes.part`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from colocate.memory.rows import MemoryRow, Moment, Phase, total_bytes
from colocate.memory.train_plan import ActivationPolicy, TrainPlan
from colocate.memory.workload import Sharding, Workload
from colocate.policy.attention.cudnn_attention import workspace_bytes
from colocate.policy.head.logprobs import logprob_bytes
from colocate.policy.stack.layer import MLP_TILE_TOKENS
from colocate.weights.shapes import ModelShapes

OFFLOAD_SLOWDOWN = 1.02
"""A step's time with "offload" over that with "full": copies take some memory bandwidth from other work."""

_INPUTS_IN_FLIGHT = 2
"""The number of layers whose inputs are on the device under "offload": one in use and one on its way."""
_SAMPLE_BYTES = 32
"""Bytes of one token of a step's samples: its id, its mask, and its log-probs under rollout engine, old
policy, reference and new policy."""
_PACK_BYTES = 32
"""Bytes of one token of a micro-batch: id, position, the index of what it predicts, the loss's numbers."""


# ── The optimizer ────────────────────────────────────────────────────────────────────────────────────────


def _moments(count: int, *, is_8bit: bool = False) -> Callable[[int], int]:
    """A function that gives the bytes of `count` moments for a tensor of n elements: float32, or with
    `is_8bit` a byte per element and, for each block of 256, its largest value in float32 (arXiv:2110.02861,
    section 2).

    bitsandbytes leaves tensors of fewer than 4,096 elements in float32.
    """
    return lambda n: count * (n + 4 * -(-n // 256) if is_8bit and n >= 4096 else 4 * n)


MOMENTS_BYTES: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), _moments(2)),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), _moments(2, is_8bit=True)),
    "sgd": _moments(0),
    **dict.fromkeys(("lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), _moments(1)),
    **dict.fromkeys(("lion_8bit", "rmsprop_bnb_8bit"), _moments(1, is_8bit=True)),
    "ademamix": _moments(3),
    "ademamix_8bit": _moments(3, is_8bit=True),
}
"""Functions by `optim` from a trained tensor's number of elements to the bytes of its optimizer state."""


def optimizer_rows(
    shapes: ModelShapes, workload: Workload, phase: Phase, moment: Moment | None = None
) -> list[MemoryRow]:
    """Masters and moments: resident, or in phase "train" only if they are on the host during rollouts."""
    sizes, rows = optimizer_sizes(shapes, workload.sharding), []
    trained, how = sum(sizes), _share(workload.sharding)
    if workload.parameter_dtype.itemsize < 4 and not shapes.has_adapters:
        rows.append(
            MemoryRow("float32 masters", phase, trained * 4, f"{trained:,} trained × 4 B{how}", moment)
        )
    moments = _moments_bytes(shapes, workload.sharding, workload.optim)
    how = f"{trained:,} trained × {moments / trained:.3g} B{how}"
    rows.append(MemoryRow("moments", phase, moments, how, moment))
    return rows


@cache
def optimizer_sizes(shapes: ModelShapes, sharding: Sharding) -> tuple[int, ...]:
    """Elements of the masters that a rank steps, one number for each trained tensor."""
    parts = sharding.num_optimizer_parts
    return tuple(-(-size // parts) for size in shapes.part(sharding.num_weight_parts).trained_sizes)


@cache
def _moments_bytes(shapes: ModelShapes, sharding: Sharding, optim: str) -> int:
    return sum(map(MOMENTS_BYTES[optim], optimizer_sizes(shapes, sharding)))


def _share(sharding: Sharding) -> str:
    """The words for a rank's share of the optimizer's tensors."""
    parts = sharding.num_optimizer_parts * sharding.num_weight_parts
    return f", one of {parts} parts" if parts > 1 else ""


# ── A step ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Microbatch:
    """The numbers of tokens in a micro-batch."""

    num_tokens: int  # T
    num_predicted: int  # N
    num_shared: int
    """The number of tokens in prompts that several completions share."""

    @classmethod
    def of(cls, workload: Workload, budget: int) -> Microbatch:
        """The fullest micro-batch of at most `budget` tokens, made of the workload's longest sequences."""
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


def kept_bytes_per_token(shapes: ModelShapes, dtype: torch.dtype, policy: ActivationPolicy) -> int:
    """Bytes per token that one layer keeps on the device for its backward pass (`policy.stack.layer`)."""
    b, h = dtype.itemsize, shapes.hidden_size
    if policy == "offload":
        return 0
    if policy == "full":
        return b * h
    lse = max(4, b) * shapes.num_heads
    num_outputs = 2 if shapes.has_output_norms else 0  # those of o and down before their norms
    kept = b * ((2 + num_outputs) * h + shapes.qkv_size + shapes.q_size) + lse
    return kept + (2 * b * shapes.mlp_size if policy == "keep" else 0)


def train_flops_per_token(shapes: ModelShapes, workload: Workload, policy: ActivationPolicy) -> float:
    """Operations of a training step per token, recomputation included.

    In a sequence of c tokens, the forward pass has 2 operations per weight and 2 · L · H · D · c for causal
    attention; the backward pass has twice as many as the forward pass for the weights (once as many, if they
    are frozen) and 2.5 times as many for attention (FlashAttention-2, arXiv:2307.08691, section 4.1).
    """
    weights = shapes.num_projection_weights + shapes.num_head_weights
    attention = 2 * shapes.num_layers * shapes.q_size * workload.max_sequence_length
    step = (4 if shapes.has_adapters else 6) * weights + 3.5 * attention
    qkv, o, gate_up, _ = shapes.group_sizes
    if policy != "keep":
        step += 2 * shapes.num_layers * gate_up
    if policy in ("full", "offload"):
        step += 2 * shapes.num_layers * (qkv + o) + attention
    return step * (OFFLOAD_SLOWDOWN if policy == "offload" else 1.0)


def train_rows(shapes: ModelShapes, workload: Workload, plan: TrainPlan) -> list[MemoryRow]:
    """Every row of training: rows that last for the whole phase, and the rows of each moment."""
    microbatch = Microbatch.of(workload, plan.budget(workload.max_sequence_length))
    num_packed, b = microbatch.num_tokens, workload.parameter_dtype.itemsize
    tokens = workload.num_step_sequences * workload.max_sequence_length
    per_token = _PACK_BYTES + shapes.num_rotary_tables * 2 * b * shapes.head_size
    how = f"{num_packed:,} tokens × {per_token} B: ids, positions, rotary angles"
    # A split optimizer's state comes back when activations and whole gradients are gone.
    back: Moment | None = "step" if workload.sharding.is_split else None
    return [
        *(optimizer_rows(shapes, workload, "train", back) if plan.offload_optimizer else []),
        MemoryRow("samples", "train", tokens * _SAMPLE_BYTES, f"{tokens:,} tokens × {_SAMPLE_BYTES} B"),
        MemoryRow("pack", "train", num_packed * per_token, how, is_transient=True),
        *_head_rows(shapes, workload, plan, microbatch),
        *_layer_rows(shapes, workload, plan, microbatch),
        *_embedding_rows(shapes, workload, num_packed),
        *_exchange_rows(shapes, workload),
        _gradients_row("step", sum(optimizer_sizes(shapes, workload.sharding))),
    ]


def _exchange_rows(shapes: ModelShapes, workload: Workload) -> list[MemoryRow]:
    """Memory that ranks which split the optimizer or the weights hold for each other; nothing for one
    rank."""
    sharding, rows = workload.sharding, []
    if not sharding.is_split:
        return []
    if sharding.num_weight_parts > 1:
        rows += _gathered_rows(shapes, workload.parameter_dtype.itemsize)
    if sharding.num_optimizer_parts > 1:
        # One tensor after the other is reduced and let go of, so that the first share is beside all of them.
        share = max(optimizer_sizes(shapes, sharding))
        how = f"the largest tensor's share: {share:,} × 4 B"
        rows.append(MemoryRow("reduced gradients", "train", 4 * share, how, "reduce"))
    return [*rows, _gradients_row("reduce", shapes.part(sharding.num_weight_parts).num_trained)]


def _gathered_rows(shapes: ModelShapes, b: int) -> list[MemoryRow]:
    """Whole weights in use, and gradients on their way to the ranks that hold the parts (`weight_store`)."""
    layer, head = sum(shapes.group_sizes), shapes.num_head_weights
    of_layer, of_head = f"{layer:,} weights × {b} B", f"{head:,} weights × {b} B"
    users: tuple[Moment, ...] = ("head", "layer", "embedding")
    rows = [
        MemoryRow(
            "gathered layers", "train", 2 * layer * b, f"one in use, one on its way: 2 × {of_layer}", moment
        )
        for moment in users
    ]
    rows.append(MemoryRow("gathered head", "train", head * b, of_head, "head"))
    if head_is_trained(shapes):
        # What is sent stays until it has left, beside what has come from the other ranks.
        sent = f"sent and received: 2 × {of_layer}"
        rows += [
            MemoryRow("gradients on their way", "train", head * b, f"received: {of_head}", "head"),
            MemoryRow("gradients on their way", "train", 2 * layer * b, sent, "layer"),
            MemoryRow("gradients on their way", "train", head * b, f"received: {of_head}", "embedding"),
        ]
    return rows


def _gradients_row(moment: Moment, num_gradients: int) -> MemoryRow:
    return MemoryRow("gradients", "train", num_gradients * 4, f"{num_gradients:,} trained × 4 B", moment)


def _kept_row(
    moment: Moment, shapes: ModelShapes, workload: Workload, plan: TrainPlan, tokens: int, num_layers: int
) -> MemoryRow:
    policy, dtype = plan.activation_policy, workload.parameter_dtype
    per_layer = kept_bytes_per_token(shapes, dtype, policy)
    if policy == "offload":
        num_layers, per_layer = min(num_layers, _INPUTS_IN_FLIGHT), dtype.itemsize * shapes.hidden_size
    how = f"{policy!r}: {tokens:,} tokens × {num_layers} layers × {per_layer:,} B"
    return MemoryRow(
        "kept by layers", "train", tokens * num_layers * per_layer, how, moment, is_transient=True
    )


def head_is_trained(shapes: ModelShapes) -> bool:
    return not shapes.has_adapters


def _head_rows(
    shapes: ModelShapes, workload: Workload, plan: TrainPlan, microbatch: Microbatch
) -> list[MemoryRow]:
    b, predicted = workload.parameter_dtype.itemsize, microbatch.num_predicted
    is_only = microbatch.num_tokens >= workload.step_tokens
    held = shapes.part(workload.sharding.num_weight_parts)
    logprobs = logprob_bytes(
        predicted, shapes.hidden_size, shapes.vocab_size, workload.parameter_dtype,
        chunk_size=plan.logprob_chunk_size, trains_head=head_is_trained(shapes),
        entropy_gradient=workload.entropy_gradient, keep_softmax=plan.keep_softmax,
    )  # fmt: skip
    how = f"{min(plan.logprob_chunk_size, predicted):,} tokens × {shapes.vocab_size:,} logits at a time"
    if plan.keep_softmax:
        how += f", and {predicted:,} × {shapes.vocab_size:,} × {b} B kept of the softmax"
    return [
        _gradients_row("head", 0 if is_only else held.num_trained),
        _kept_row("head", shapes, workload, plan, microbatch.num_tokens, shapes.num_layers),
        # The last layer's output where something is predicted, its norm, and the norm's gradient.
        MemoryRow(
            "hidden states", "train", 3 * predicted * shapes.hidden_size * b,
            f"3 × {predicted:,} tokens × {shapes.hidden_size * b:,} B", "head", is_transient=True,
        ),
        MemoryRow("log-probs", "train", logprobs, how, "head"),
        *([_head_gradient_row("head", shapes, b)] if head_is_trained(shapes) else []),
    ]  # fmt: skip


def _head_gradient_row(moment: Moment, shapes: ModelShapes, b: int) -> MemoryRow:
    count = shapes.num_head_weights
    return MemoryRow("head's gradient", "train", count * b, f"{count:,} weights × {b} B", moment)


def _layer_rows(
    shapes: ModelShapes, workload: Workload, plan: TrainPlan, microbatch: Microbatch
) -> list[MemoryRow]:
    """Rows of the moment "layer": one layer's backward pass, the gradients made so far, and the activations
    that layers still keep.

    In a step of one micro-batch gradients appear as kept activations go, so that the sum of the two is
    largest at one of the two ends: at the last layer, whose backward pass comes first, or at the first layer.
    From the second micro-batch on all gradients are there from the beginning.
    """
    held = shapes.part(workload.sharding.num_weight_parts)
    tokens, trained = microbatch.num_tokens, held.num_trained
    head = held.num_head_weights if head_is_trained(shapes) else 0
    ends = [(trained, shapes.num_layers)]
    if tokens >= workload.step_tokens:
        # The embedding's gradient is made last; a tied head's gradient waits for it. The last layer's own
        # gradients become a part of the sums when its backward pass has ended.
        of_layer = 0 if shapes.has_adapters else sum(held.group_sizes)
        ends = [(0 if shapes.has_tied_head else head, shapes.num_layers), (trained - head - of_layer, 1)]
    pairs = [
        [_gradients_row("layer", gradients), _kept_row("layer", shapes, workload, plan, tokens, num_layers)]
        for gradients, num_layers in ends
    ]
    rows = max(pairs, key=total_bytes)
    if head and shapes.has_tied_head:
        rows.append(_head_gradient_row("layer", shapes, workload.parameter_dtype.itemsize))
    widest = _layer_backward_bytes(shapes, workload, plan.activation_policy, microbatch)
    how = f"{tokens:,} tokens, at the widest of MLP and attention"
    return [*rows, MemoryRow("one layer's backward", "train", widest, how, "layer", is_transient=True)]


def _layer_backward_bytes(
    shapes: ModelShapes, workload: Workload, policy: ActivationPolicy, microbatch: Microbatch
) -> int:
    """An upper bound of the bytes that `DecoderLayer.backward` allocates besides what the layer keeps.

    It is `base`, which is there throughout, and the widest of three places that the backward pass goes
    through one after the other: the MLP (its activation function or the products beside it), attention, and
    the products of q, k and v. The terms of the sums below are tensors of `DecoderLayer.backward`.
    """
    b, h, i, q, kv = (
        workload.parameter_dtype.itemsize, shapes.hidden_size, shapes.mlp_size, shapes.q_size, shapes.kv_size
    )  # fmt: skip
    qkv_weights, o_weights, gate_up_weights, down_weights = shapes.group_sizes
    mlp_weights, tokens, shared = gate_up_weights + down_weights, microbatch.num_tokens, microbatch.num_shared
    # Gradients of the layer's output and of the MLP's input.
    base = 2 * tokens * h * b
    if policy in ("full", "offload"):
        # q/k/v, attention's output, its log-sum-exps and the MLP's input are made again.
        num_hidden = 2 if shapes.has_output_norms else 1  # o's output before its norm, too
        base += tokens * (b * (shapes.qkv_size + q + num_hidden * h) + 4 * shapes.num_heads)
    # A recomputed MLP runs tile by tile: the first tile is the fullest, the second finds the first one's
    # gradients.
    tile = tokens if policy == "keep" else min(tokens, MLP_TILE_TOKENS)
    later = min(tokens - tile, tile)
    gradients = earlier = in_products = unpacked = 0
    if not shapes.has_adapters:
        # Gradients of tiles are summed in float32, and rounded to the parameters' type in the end.
        gradients = mlp_weights * (4 if later else b) + o_weights * b
        earlier = mlp_weights * 4 if later else 0
        in_products = 2 * gate_up_weights * b
    elif shapes.four_bit is not None:
        # A frozen weight is dequantised for its product; weights that read one input one by one, then joined.
        in_products, unpacked = 2 * gate_up_weights * b, max(2 * qkv_weights, o_weights) * b
    activations = h + (0 if policy == "keep" else 2 * i) + 4 * i
    if shapes.has_output_norms:
        activations += h  # the gradient of down's output before its norm
    mlp = max(
        found + max(t * b * activations, t * b * 2 * (h + i) + in_products)
        for t, found in ((tile, 0), (later, earlier))
    )
    workspace = _attention_workspace_bytes(shapes, workload, tokens, tokens)
    if shared:  # attention to shared prompts: its output and log-sum-exps, and its gradients of k and v
        apart = (tokens - shared) * (b * q + 4 * shapes.num_heads) + shared * b * 2 * kv
        apart += _attention_workspace_bytes(shapes, workload, tokens - shared, shared)
        workspace = max(workspace, apart)
    # q and k after rotation, the output's gradient, and the gradients of q, k and v.
    attention = gradients + tokens * b * 3 * (q + kv) + workspace
    if shapes.norms_whole_qk:  # all of their gradients before and after the norms
        attention = max(attention, gradients + tokens * b * (3 * q + 4 * kv))
    products = gradients + tokens * b * (shapes.qkv_size + 2 * h) + unpacked
    if not shapes.has_adapters:
        products += qkv_weights * b + (mlp_weights * b if later else 0)
    return base + max(mlp, attention, products)


def _attention_workspace_bytes(
    shapes: ModelShapes, workload: Workload, num_queries: int, num_keys: int
) -> int:
    """Bytes of workspace that attention's backward pass allocates besides its results."""
    b, heads, kv_heads, size = (
        workload.parameter_dtype.itemsize, shapes.num_heads, shapes.num_kv_heads, shapes.head_size
    )  # fmt: skip
    if workload.has_cudnn:
        # cuDNN wants v contiguous: a copy, since v lies beside q and k.
        return num_keys * b * shapes.kv_size + workspace_bytes(heads, kv_heads, size, num_queries, num_keys)
    # FlashAttention: the gradient of q in float32, a float32 per head and token, and with grouped queries the
    # gradients of k and v per query head.
    accumulator = 4 * heads * (-(-size // 32) * 32) + 4 * heads
    expanded = 2 * b * shapes.q_size if kv_heads < heads else 0
    return num_queries * accumulator + num_keys * expanded


def _embedding_rows(shapes: ModelShapes, workload: Workload, tokens: int) -> list[MemoryRow]:
    held = shapes.part(workload.sharding.num_weight_parts)
    rows = [_gradients_row("embedding", held.num_trained)]
    if shapes.has_adapters:
        return rows
    b, h = workload.parameter_dtype.itemsize, shapes.hidden_size
    count = shapes.num_head_weights * (2 if shapes.has_tied_head else 1)
    # PyTorch sums over equal tokens in float32, in pieces of ten.
    pieces = tokens // 10 + min(tokens, shapes.vocab_size)
    size_bytes = count * b + tokens * h * b + pieces * h * 4
    how = f"{count:,} weights × {b} B, {pieces:,} partial sums × {h * 4:,} B"
    return [*rows, MemoryRow("embedding's gradient", "train", size_bytes, how, "embedding")]
