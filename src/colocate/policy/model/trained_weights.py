"""Whether a model's weights can be trained: quantised ones and some of PEFT's adapters cannot."""

from __future__ import annotations

from typing import Any

from torch import nn

from colocate.policy.model.training_mode import check_wrapper
from colocate.weights.adapters import unreproducible_adapter, why_not_trained
from colocate.weights.layouts import causal_lm
from colocate.weights.quantized import is_4bit, is_repacked, keep_packing


def check_trained_weights(model: nn.Module) -> None:
    """Refuse a model with trained weights that no step would change."""
    if not hasattr(model, "peft_config"):
        _check_quantization(model)
    elif (reason := unreproducible_adapter(model)) is not None:
        raise ValueError(reason)
    else:
        _check_adapters(model)
    for name, module in model.named_modules():
        if is_4bit(module):
            if is_repacked(module):
                raise ValueError(
                    f"bitsandbytes has re-packed the 4-bit weight {name} for inference on this CPU, in a "
                    "forward pass in evaluation mode, and no gradient passes through it. Load the model "
                    "anew, and call model.train() before it runs."
                )
            keep_packing(module)
    check_wrapper(model)


def _check_quantization(model: nn.Module) -> None:
    lm: Any = causal_lm(model)
    quantizer = getattr(lm, "hf_quantizer", None)
    if getattr(quantizer, "is_qat_trainable", False):
        return
    fixed = [name for name, p in model.named_parameters() if not (p.is_floating_point() or p.requires_grad)]
    if getattr(lm, "is_quantized", False) or fixed:
        example = f" ({len(fixed)}, such as {fixed[0]})" if fixed else ""
        raise ValueError(
            f"The weights of {type(lm).__name__} are quantised{example} and cannot be trained: only "
            "embeddings, norms and head would move. Train an adapter on them (peft_config; use_peft in a run "
            "file), or load the model unquantised."
        )


def _check_adapters(model: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, config in model.peft_config.items():
        if (reason := why_not_trained(config)) is not None:
            raise ValueError(f"PEFT adapter {name!r}: {reason}")
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise ValueError(
                f"The adapter is merged into the weights (merge_adapter; {name}), where it cannot be "
                "trained. Call model.unmerge_adapter() to go on with it, or model.merge_and_unload() to "
                "train without it."
            )
