"""The options that a model is loaded and prepared by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ModelOptions:
    """The options that `prepare_model` reads."""

    # ── Model ────────────────────────────────────────────────────────────────────────────────────────────

    model_init_kwargs: dict[str, Any] | None = None
    """Arguments of `from_pretrained` when the model is given by name."""
    trust_remote_code: bool = False
    """Allow the Python code that a model or tokenizer on the Hub brings to run."""
    disable_dropout: bool = False
    """Set every dropout probability of the model to 0."""
    gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass: a third more compute, far less memory. Read
    only for models that are not supported natively (see `engine`); the others follow `activation_policy`."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """Arguments of `torch.utils.checkpoint`; `use_reentrant` is False unless set. Read where
    `gradient_checkpointing` is."""
    bf16: bool | None = None
    """Keep the parameters in bfloat16, with float32 master weights in the optimizer. None: True on a GPU that
    has bfloat16, else False."""
