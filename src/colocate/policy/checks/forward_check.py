"""Whether the log-probabilities of a model can be computed here, tried on a few tokens before a run."""

from __future__ import annotations

from functools import partial

import torch
import transformers
from torch import nn

from colocate.parallel.verdict import first_line
from colocate.policy.checks.head_check import check_output_head
from colocate.policy.checks.kernel_compilation import compile_ahead
from colocate.policy.checks.self_check import check_stack
from colocate.policy.model.forward import check_causal
from colocate.policy.stack.stack import runs_packed
from colocate.weights.fully_sharded import run_gathered
from colocate.weights.layouts import causal_lm


def check_forward_pass(model: nn.Module) -> None:
    """Refuse a model whose log-probabilities cannot be computed here."""
    if runs_packed(model):
        compile_ahead(model)  # or the check would wait for one kernel after the other
        # Fuses the parameters, now and not in the first step: an engine may capture graphs before it.
        check_stack(model)
        return
    try:
        with torch.no_grad():
            run_gathered(model, partial(check_output_head, model))
            run_gathered(model, partial(check_causal, model))
    except (AttributeError, TypeError, NotImplementedError) as error:
        raise ValueError(_cannot_compute(model, error)) from error


def _cannot_compute(model: nn.Module, error: Exception) -> str:
    words = (
        f"transformers {transformers.__version__} cannot compute {type(causal_lm(model)).__name__} on text "
        f"alone ({first_line(error)})."
    )
    if hasattr(model, "peft_config"):
        return (
            f"{words} If it can without the adapter, this is around a module that returns more than a "
            "product: leave that out of target_modules."
        )
    return (
        f"{words} It may need images, or another version of transformers. Where its text model is a class of "
        "its own, load that class from the same checkpoint and pass the model itself: it is then saved "
        "without what is not text."
    )
