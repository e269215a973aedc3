"""How much memory a run will take, from shapes alone: nothing is loaded and nothing is allocated.

    resident                       weights, float32 masters, moments, reference
    ├── rollout (the engine's turn)    KV cache, logits of one decode step
    └── train   (the trainer's turn)   gradients, activations, logits of one chunk

The turns use the same memory one after the other, so a run peaks at resident + the larger of them.

Legend: L layers, H query heads, K key-value heads, D head size, h hidden size, i width of the MLP,
V vocabulary, T tokens of one packed micro-batch, b bytes of a parameter (2 in bfloat16, 4 in float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

Phase = Literal["resident", "rollout", "train"]

ALLOCATOR_SLACK = 0.05
"""Share of the device left to the CUDA context, libraries and fragmentation: an allowance, not measured."""

_FLOAT32_BYTES = 4
_DEFAULT_LORA_TARGETS = ("q_proj", "v_proj")
"""What PEFT adapts in Llama, Mistral and Qwen models when no target is named."""


@dataclass(frozen=True)
class Workload:
    """What a run asks of memory, beside the model's shape."""

    parameter_dtype: torch.dtype
    max_sequence_length: int
    """Longest prompt + completion, tokens."""
    tokens_per_microbatch: int
    max_num_seqs: int = 64
    page_size: int = 16
    kv_cache_tokens: int | None = None
    """None: what `max_num_seqs` sequences of full length need, or as much of that as fits."""
    decode_rows: int | None = None
    """Rows of the one buffer that decode steps on a GPU write their logits to. None: as on a CPU, where every
    step makes its logits anew, and as much again to sample from."""
    decode_partials_bytes: int = 0
    """Partial results of attention, which the KV arena holds beside that buffer."""
    logprob_chunk_size: int = 1024
    gradient_checkpointing: bool = True
    optim: str = "adamw_torch_fused"
    has_reference: bool = False
    lora_rank: int | None = None
    """None: full fine-tuning."""
    lora_target_modules: Sequence[str] | Literal["all-linear"] | None = None
    """Names of the adapted matrices, or "all-linear". None: PEFT's choice for Llama, Mistral and Qwen."""


@dataclass(frozen=True)
class Row:
    name: str
    phase: Phase
    size_bytes: int
    how: str
    """The arithmetic, in words."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of one device goes."""

    rows: tuple[Row, ...]
    num_parameters: int
    num_trained_parameters: int
    kv_bytes_per_token: int
    kv_cache_tokens: int
    device_memory_bytes: int | None
    remedies: tuple[str, ...]
    """What to set, best first, when the run does not fit. Empty when it does or the device is unknown."""

    def phase_bytes(self, phase: Phase) -> int:
        return sum(row.size_bytes for row in self.rows if row.phase == phase)

    @property
    def peak_bytes(self) -> int:
        return self.phase_bytes("resident") + max(self.phase_bytes("rollout"), self.phase_bytes("train"))

    @property
    def fits(self) -> bool | None:
        """None when the device is not known."""
        return None if self.device_memory_bytes is None else self.peak_bytes <= self.device_memory_bytes

    def to_dict(self) -> dict[str, Any]:
        totals = {f"{phase}_bytes": self.phase_bytes(phase) for phase in ("resident", "rollout", "train")}
        return {**asdict(self), **totals, "peak_bytes": self.peak_bytes, "fits": self.fits}


@dataclass(frozen=True)
class _Shapes:
    """The numbers of a model that memory depends on."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    mlp_size: int
    vocab_size: int
    has_qk_norm: bool
    num_parameters: int
    num_adapter_parameters: int
    trained_sizes: tuple[int, ...]
    """Elements of each trained tensor."""

    @classmethod
    def of(cls, model_config: PretrainedConfig, workload: Workload) -> _Shapes:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
        text = model_config.get_text_config()
        heads = text.num_attention_heads
        # `parameters` yields a tied head once, as memory does.
        sizes = tuple(p.numel() for p in model.parameters())
        adapter_sizes = _adapter_sizes(model, workload)
        return cls(
            num_layers=text.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            hidden_size=text.hidden_size,
            mlp_size=text.intermediate_size,
            vocab_size=text.vocab_size,
            has_qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
            num_parameters=sum(sizes),
            num_adapter_parameters=sum(adapter_sizes),
            trained_sizes=adapter_sizes or sizes,
        )


def _adapter_sizes(model: PreTrainedModel, workload: Workload) -> tuple[int, ...]:
    """LoRA adds A [r, in] and B [out, r] to each targeted matrix (arXiv:2106.09685, eq. 3)."""
    if workload.lora_rank is None:
        return ()
    targets = workload.lora_target_modules or _DEFAULT_LORA_TARGETS
    head = model.get_output_embeddings()
    matrices = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (module is not head if targets == "all-linear" else name.split(".")[-1] in targets)
    ]
    if not matrices:
        raise ValueError(
            f"lora_target_modules={targets!r} names no matrix of {type(model).__name__}; its matrices are "
            f"{sorted({n.split('.')[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})}."
        )
    return tuple(workload.lora_rank * size for m in matrices for size in (m.in_features, m.out_features))


def _adam_bytes(num_elements: int) -> int:
    return 2 * _FLOAT32_BYTES * num_elements


def _adam_8bit_bytes(num_elements: int) -> int:
    """A byte per element, and for each block of 256 its largest value in float32 (arXiv:2110.02861, §2).

    bitsandbytes leaves tensors of fewer than 4,096 elements in float32.
    """
    if num_elements < 4096:
        return _adam_bytes(num_elements)
    return 2 * (num_elements + _FLOAT32_BYTES * -(-num_elements // 256))


_MOMENTS_BYTES: dict[str, Callable[[int], int]] = {
    "adamw_torch": _adam_bytes,
    "adamw_torch_fused": _adam_bytes,
    "adamw_bnb_8bit": _adam_8bit_bytes,
    "adamw_8bit": _adam_8bit_bytes,
    "sgd": lambda num_elements: 0,
}
"""Optimizer state of one trained tensor, by its number of elements."""


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers: 2 · L · K · D · b."""
    return 2 * num_layers * num_kv_heads * head_size * dtype.itemsize


def layer_activation_bytes(shapes: _Shapes, dtype: torch.dtype) -> int:
    """Bytes per token that one decoder layer keeps for its backward pass.

    The accounting of Korthikanti et al. (arXiv:2205.05198, section 4.1) redone for the Llama layer as
    transformers writes it, with fused attention (no [T, T] matrix is kept):

    - two RMS norms: input in float32 and its inverse scale, 2 · (4h + 4), and the normalised input, 2bh;
    - attention: its input, queries, keys and values after rotation, the output and each head's log-sum:
      b · (h + 2HD + 2KD) + 4H;
    - MLP: its input, gate, SiLU(gate), up and their product: b · (h + 4i);
    - with q/k norms (Qwen3), likewise for each head: (4 + b) · (H + K) · D + 4 · (H + K).
    """
    b, hidden = dtype.itemsize, shapes.hidden_size
    q_size, kv_size = shapes.num_heads * shapes.head_size, shapes.num_kv_heads * shapes.head_size
    norms = 2 * (4 * hidden + 4 + b * hidden)
    attention = b * (hidden + 2 * q_size + 2 * kv_size) + 4 * shapes.num_heads
    mlp = b * (hidden + 4 * shapes.mlp_size)
    qk_norm = (4 + b) * (q_size + kv_size) + 4 * (shapes.num_heads + shapes.num_kv_heads)
    return norms + attention + mlp + (qk_norm if shapes.has_qk_norm else 0)


def plan(
    model_config: PretrainedConfig, workload: Workload, *, device_memory_bytes: int | None = None
) -> MemoryPlan:
    """The memory of one device, all in one place.

    Raises:
        ValueError: the optimizer's state is not known, or LoRA's targets name no matrix of the model.
    """
    if workload.optim not in _MOMENTS_BYTES:
        raise ValueError(f"optim={workload.optim!r}: state size unknown; one of {', '.join(_MOMENTS_BYTES)}.")
    shapes = _Shapes.of(model_config, workload)
    resident = _resident_rows(shapes, workload, device_memory_bytes)
    train = _train_rows(shapes, workload)
    resident_bytes = sum(row.size_bytes for row in resident)
    room_bytes = None if device_memory_bytes is None else device_memory_bytes - resident_bytes
    per_token = kv_bytes_per_token(
        shapes.num_layers, shapes.num_kv_heads, shapes.head_size, workload.parameter_dtype
    )
    logits = _decode_row(shapes, workload)
    kv_tokens = _kv_capacity(
        workload, per_token, None if room_bytes is None else room_bytes - logits.size_bytes
    )
    kv_cache = Row("KV cache", "rollout", kv_tokens * per_token, f"{kv_tokens:,} tokens × {per_token:,} B")
    rows = (*resident, kv_cache, logits, *train)
    return MemoryPlan(
        rows=rows,
        num_parameters=shapes.num_parameters,
        num_trained_parameters=shapes.num_adapter_parameters or shapes.num_parameters,
        kv_bytes_per_token=per_token,
        kv_cache_tokens=kv_tokens,
        device_memory_bytes=device_memory_bytes,
        remedies=()
        if room_bytes is None
        else tuple(_remedies(rows, shapes, workload, room_bytes, per_token)),
    )


def _resident_rows(shapes: _Shapes, workload: Workload, device_memory_bytes: int | None) -> list[Row]:
    b, count = workload.parameter_dtype.itemsize, shapes.num_parameters
    rows = [Row("weights", "resident", count * b, f"{count:,} parameters × {b} B")]
    trained = shapes.num_adapter_parameters
    if trained:
        # PEFT keeps adapters in float32 whatever the base model's type is, so they need no masters.
        rows.append(Row("LoRA adapters", "resident", trained * 4, f"{trained:,} parameters × 4 B"))
    else:
        trained = count
        if b < _FLOAT32_BYTES:
            rows.append(Row("float32 masters", "resident", count * 4, f"{count:,} parameters × 4 B"))
    moments = sum(map(_MOMENTS_BYTES[workload.optim], shapes.trained_sizes))
    rows.append(Row("moments", "resident", moments, f"{trained:,} trained × {moments / trained:.3g} B"))
    if workload.has_reference and not shapes.num_adapter_parameters:
        # With LoRA the reference is the base model with its adapters off.
        rows.append(Row("reference", "resident", count * b, f"{count:,} parameters × {b} B"))
    if device_memory_bytes is not None:
        slack = int(ALLOCATOR_SLACK * device_memory_bytes)
        rows.append(Row("context and slack", "resident", slack, f"{ALLOCATOR_SLACK:.0%} of the device"))
    return rows


def _decode_row(shapes: _Shapes, workload: Workload) -> Row:
    vocab = shapes.vocab_size
    if workload.decode_rows is None:
        size_bytes = 2 * _FLOAT32_BYTES * workload.max_num_seqs * vocab
        how = f"{workload.max_num_seqs} sequences × {vocab:,} tokens × 4 B, and as much to sample from"
    else:
        # The sampler reads the logits where they are: it reduces them and keeps no distribution.
        size_bytes = _FLOAT32_BYTES * workload.decode_rows * vocab + workload.decode_partials_bytes
        how = (
            f"{workload.decode_rows} rows × {vocab:,} tokens × 4 B, and {workload.decode_partials_bytes:,} B "
            "of attention's partial results"
        )
    return Row("decode logits", "rollout", size_bytes, how)


def _train_rows(shapes: _Shapes, workload: Workload) -> list[Row]:
    b, tokens = workload.parameter_dtype.itemsize, workload.tokens_per_microbatch
    trained = shapes.num_adapter_parameters or shapes.num_parameters
    per_layer = layer_activation_bytes(shapes, workload.parameter_dtype)
    boundary = b * shapes.hidden_size
    # Token ids, rotation angles and the last norm, which belong to no layer.
    outside = 8 + 2 * b * shapes.head_size + (4 + b) * shapes.hidden_size + 4
    if workload.gradient_checkpointing:
        # Each layer keeps its input; one layer at a time is computed again in full (arXiv:1604.06174).
        per_token = shapes.num_layers * boundary + per_layer + outside
        how = (
            f"{tokens:,} tokens × ({shapes.num_layers} layers × {boundary:,} B + one layer of "
            f"{per_layer:,} B + {outside:,} B)"
        )
    else:
        per_token = shapes.num_layers * per_layer + outside
        how = f"{tokens:,} tokens × ({shapes.num_layers} layers × {per_layer:,} B + {outside:,} B)"
    # In flight at the widest point of the backward pass, the MLP: gradients of gate, up and product.
    in_flight = 3 * b * shapes.mlp_size
    chunk, vocab = min(workload.logprob_chunk_size, tokens), shapes.vocab_size
    return [
        Row("gradients", "train", trained * _FLOAT32_BYTES, f"{trained:,} trained × 4 B"),
        Row("activations", "train", tokens * per_token, how),
        Row("activation gradients", "train", tokens * in_flight, f"{tokens:,} tokens × {in_flight:,} B"),
        # The logits as the head computes them, in float32 for the softmax, and their gradient.
        Row(
            "log-prob chunk",
            "train",
            chunk * vocab * (b + 2 * _FLOAT32_BYTES),
            f"{chunk:,} tokens × {vocab:,} logits × {b + 2 * _FLOAT32_BYTES} B",
        ),
    ]


def _kv_capacity(workload: Workload, per_token: int, room_bytes: int | None) -> int:
    """Tokens, in whole pages; never below one full sequence, without which nothing can be generated."""
    if workload.kv_cache_tokens is not None:
        return -(-workload.kv_cache_tokens // workload.page_size) * workload.page_size
    one_sequence = -(-workload.max_sequence_length // workload.page_size) * workload.page_size
    wanted = workload.max_num_seqs * one_sequence
    if room_bytes is None:
        return wanted
    affordable = room_bytes // (per_token * workload.page_size) * workload.page_size
    return max(one_sequence, min(wanted, affordable))


def _remedies(
    rows: Iterable[Row], shapes: _Shapes, workload: Workload, room_bytes: int, kv_bytes: int
) -> Iterable[str]:
    """What to set when a phase needs more than the `room_bytes` that the resident rows leave."""
    size = {row.name: row.size_bytes for row in rows}
    rollout = size["KV cache"] + size["decode logits"]
    scales_with_tokens = size["activations"] + size["activation gradients"]
    train = size["gradients"] + scales_with_tokens + size["log-prob chunk"]
    if max(rollout, train) <= room_bytes:
        return
    tokens = workload.tokens_per_microbatch
    affordable = (room_bytes - train + scales_with_tokens) * tokens // scales_with_tokens
    if train > room_bytes and not workload.gradient_checkpointing:
        yield "gradient_checkpointing=True: keeps one layer's activations instead of all"
    if train > room_bytes and affordable >= workload.max_sequence_length:
        yield f"max_tokens_per_microbatch={affordable}: the same gradient in smaller pieces"
    if rollout > room_bytes:
        pages = (room_bytes - size["decode logits"]) // (kv_bytes * workload.page_size)
        if pages * workload.page_size >= workload.max_sequence_length:
            yield f"kv_cache_tokens={pages * workload.page_size}: fewer completions side by side"
    if "reference" in size:
        yield f"beta=0.0: no reference model, {size['reference'] / 2**30:.2f} GiB less"
    if workload.lora_rank is None:
        saved = size.get("float32 masters", 0) + size["moments"] + size["gradients"]
        yield f"use_peft=True: LoRA spares most of {saved / 2**30:.2f} GiB of masters, moments and gradients"
    if workload.parameter_dtype.itemsize == _FLOAT32_BYTES and workload.lora_rank is not None:
        yield "dtype=bfloat16: halves the weights"
    yield f"max_completion_length below the {workload.max_sequence_length} tokens a sequence may have now"
