"""Dropout: rates that a model applies in training mode, and no rollout engine does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """Turn off all dropout, attention's included, so that policy and rollout log-probabilities agree."""
    for _, holder, key, _ in dropout_rates(model):
        if isinstance(holder, dict):
            holder[key] = 0.0
        else:
            setattr(holder, key, 0.0)


def active_dropout(model: nn.Module) -> dict[str, float]:
    """The largest rate above 0 under each name, such as {"lora_dropout": 0.05}; empty without dropout."""
    active: dict[str, float] = {}
    for path, _, key, rate in dropout_rates(model):
        if rate > 0:
            name = _name_of(path) if key == "p" else key
            active[name] = max(rate, active.get(name, 0.0))
    return active


def dropout_rates(model: nn.Module) -> Iterator[tuple[str, Any, str, float]]:
    """Every rate of a model: the path of its module, the object or dict that holds it, by which name, and the
    rate."""
    for path, module in model.named_modules():
        is_layer = "dropout" in type(module).__name__.lower()
        for key, value in list(vars(module).items()):
            if is_layer and key == "p" and isinstance(value, int | float):
                yield path, module, key, float(value)
            elif "drop" in key and isinstance(value, float):
                # A rate that a module passes to a function: `attention_dropout`, `layerdrop`.
                yield path, module, key, value
            elif "drop" in key and isinstance(value, dict):  # PEFT's `rank_dropout`, by adapter
                for adapter, rate in value.items():
                    if isinstance(rate, float):
                        yield f"{path}.{key}", value, adapter, rate


def _name_of(path: str) -> str:
    """The part of a module's path that names the dropout: `lora_dropout` in `q_proj.lora_dropout.default`."""
    parts = path.split(".")
    return next((part for part in reversed(parts) if "drop" in part), parts[-1])
