"""The parts of the training plan that a run may fix; the planner chooses the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from colocate.memory.train_plan import ACTIVATION_POLICIES
from colocate.options.requirements import AT_LEAST_ONE, OneOf

SHARD_CHOICES: tuple[Any, ...] = ("auto", "none", 1, 2, 4, 8)


@dataclass
class PlanOptions:
    """The options that the planner reads as fixed."""

    # ── Batches. All batch sizes count completions, not prompts ──────────────────────────────────────────

    max_tokens_per_microbatch: Annotated[int | None, AT_LEAST_ONE] = None
    """The most tokens in one packed micro-batch. It changes memory and speed, never the gradient. None: the
    planner chooses; on a CPU, and for models that are not supported natively (see `engine`), it is
    per_device_train_batch_size × the longest sequence of the step, as much as TRL's padded micro-batch
    holds."""
    activation_policy: Annotated[str, OneOf(("auto", *ACTIVATION_POLICIES))] = "auto"
    """Which activations the layers keep for the backward pass: "keep" (all), "selective" (all but the MLP's
    gate and up), "full" (each layer's input) or "offload" (each layer's input, in host memory). Each needs
    less memory and more work than the one before it; "auto" lets the planner choose. Read only for models
    that are supported natively (see `engine`); the others follow `gradient_checkpointing`."""
    logprob_chunk_size: Annotated[int | None, AT_LEAST_ONE] = None
    """How many tokens' logits exist at one time, as float32 of [tokens, vocabulary]. None: the planner
    chooses; where there is no plan, 1,024."""
    offload_optimizer: bool | None = None
    """Move the optimizer's master weights and moments to pinned host memory while completions are generated.
    With Adam that leaves the KV cache 12 more bytes per parameter trained in bf16. The copy back runs while
    rewards are computed and during forward and backward. None: only where the KV cache would be too small
    otherwise."""
    shard: Annotated[int | str, OneOf(SHARD_CHOICES)] = "auto"
    """How several processes split the training state. "none": each has all of it. 1: masters, moments and
    reduced gradients are split over all of them, the weights are whole. 2, 4 or 8: so many processes of one
    machine share one copy of the weights, too, and decode together. "auto": 1, as far as the optimizer steps
    on each value by itself."""
