"""Differences of training mode from rollouts, and from PEFT's own wrapper on a few tokens; and dropout, which
no rollout engine applies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colocate.weights.fully_sharded import run_gathered
from colocate.weights.layouts import WHOLE, body, causal_lm, weight_part_of

NUM_TOKENS = 12
_PERTURBATION = 0.05
"""Standard deviation of what is added to an adapter, of which a new one has no effect that could differ."""


@torch.no_grad()
def training_only(model: nn.Module) -> list[str]:
    """The classes of modules that compute something else in training mode, dropout aside, than in rollouts,
    with their rates of noise; for a model that runs through transformers' modules."""
    with _kept(model):
        disable_dropout(model)
        model.eval()
        rollout = _states(model)

        def differs(modules: list[nn.Module]) -> bool:
            model.eval()
            for module in modules:
                module.training = True
            return not _agree(_states(model), rollout)

        kinds: dict[str, list[nn.Module]] = {}
        for module in model.modules():
            kinds.setdefault(type(module).__name__, []).append(module)
        if not differs(list(model.modules())):
            return []
        alone = [_described(kind, modules) for kind, modules in kinds.items() if differs(modules)]
        return alone or [type(causal_lm(model)).__name__]


def _described(kind: str, modules: list[nn.Module]) -> str:
    """A class of modules with its rates of noise, such as `router_jitter_noise`."""
    rates = [
        f"{name}={value:g}"
        for name, value in vars(modules[0]).items()
        if isinstance(value, float) and ("noise" in name or "jitter" in name)
    ]
    return f"{kind} ({', '.join(rates)})" if rates else kind


@torch.no_grad()
def check_wrapper(model: nn.Module) -> None:
    """Refuse an adapter that PEFT's wrapper computes in another way than the model inside."""
    if not hasattr(model, "peft_config") or weight_part_of(model) != WHOLE:
        return
    with _kept(model):
        model.eval()
        inside, seen = _states(model), []
        handle = body(model).register_forward_hook(
            lambda module, args, output: seen.append(output.last_hidden_state)
        )
        try:
            run_gathered(model, partial(model, input_ids=_tokens(model), use_cache=False))
        finally:
            handle.remove()
    if not _agree(seen[-1], inside):
        configs = ", ".join(type(config).__name__ for config in model.peft_config.values())  # type: ignore
        raise ValueError(
            f"The adapter ({configs}) computes something else in PEFT's forward than in the model inside, "
            "which engines and trainer run: they would make another adapter of it. Use one on weights alone, "
            "such as LoraConfig."
        )


def _tokens(model: nn.Module) -> Tensor:
    embedding = causal_lm(model).get_input_embeddings().weight
    return torch.arange(1, NUM_TOKENS + 1, device=embedding.device)[None] % len(embedding)


def _states(model: nn.Module) -> Tensor:
    """The last hidden states [1, T, hidden] of a few tokens."""
    compute = partial(body(model), input_ids=_tokens(model), use_cache=False)
    states: Tensor = run_gathered(model, compute).last_hidden_state
    return states


def _agree(states: Tensor, others: Tensor) -> bool:
    # The same modules compute the same: what differs is noise, or an order of sums.
    tolerance = 1e-4 if states.dtype == torch.float32 else 0.02
    difference = (states.float() - others.float()).norm()
    return bool(difference <= tolerance * others.float().norm())


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Change an adapter's weights for a block; then put them, modes, dropout and random states back."""
    training = [(module, module.training) for module in model.modules()]
    rates = list(dropout_rates(model))
    is_adapted = hasattr(model, "peft_config")
    trained = [p for p in model.parameters() if is_adapted and p.requires_grad]
    values = [p.detach().clone() for p in trained]
    generator = torch.Generator().manual_seed(0)
    device = causal_lm(model).get_input_embeddings().weight.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for parameter in trained:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter), alpha=_PERTURBATION)
            yield
    finally:
        for parameter, value in zip(trained, values, strict=True):
            parameter.copy_(value)
        for _, holder, key, rate in rates:
            if isinstance(holder, dict):
                holder[key] = rate
            else:
                setattr(holder, key, rate)
        for module, was_training in training:
            module.training = was_training


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
    """Every rate of a model: the path of its module, the object or dict that holds it, its name there, and
    the rate."""
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
