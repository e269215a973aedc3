"""The frozen policy that the KL penalty measures the distance to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colocate.weights.fully_sharded import copy_sharded, is_fully_sharded

ADAPTER_NAME = "ref"
"""TRL's name for the frozen copy of an adapter."""


def is_of_reference(name: str) -> bool:
    """Whether the parameter `name` of the policy's model belongs to the reference."""
    return f".{ADAPTER_NAME}." in name


class Reference(Protocol):
    def model(self) -> AbstractContextManager[nn.Module]:
        """The reference model, valid while the context lasts."""
        ...

    def weights(self) -> list[Tensor]:
        """The reference's weights that are not the policy model's own."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Weights that a resumed run could not make again from the model it starts with."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FrozenCopy:
    """A second set of weights, for full fine-tuning. Make it before the optimizer hooks into the policy."""

    def __init__(self, policy_model: nn.Module) -> None:
        make = copy_sharded if is_fully_sharded(policy_model) else copy.deepcopy
        self._model = make(policy_model).requires_grad_(False).eval()
        self._has_moved = False

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        yield self._model

    def weights(self) -> list[Tensor]:
        return list(self._model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._model.state_dict()) if self._has_moved else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._model.load_state_dict(state)
            self._has_moved = True

    @torch.no_grad()
    def sync(self, policy_model: nn.Module, mixup_alpha: float) -> None:
        """Move the reference towards the policy: reference = alpha * policy + (1 - alpha) * reference
        (TR-DPO, arXiv 2404.09656)."""
        for mine, theirs in zip(self._model.parameters(), policy_model.parameters(), strict=True):
            mine.copy_(torch.lerp(mine.float(), theirs.float(), mixup_alpha))
        self._has_moved = True


class _InPolicyModel:
    """A reference made of the policy model's own frozen weights: nothing of its own to keep."""

    def weights(self) -> list[Tensor]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, "only a copy can have moved"


class AdapterOff(_InPolicyModel):
    """The base model under a new adapter as the reference: the policy before the adapter learned anything."""

    def __init__(self, policy_model: nn.Module) -> None:
        self._model = policy_model

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self._model.disable_adapter():  # type: ignore[operator]
            yield self._model


class FrozenAdapter(_InPolicyModel):
    """A frozen copy of an adapter that was trained before as the reference: the policy at this run's
    start."""

    def __init__(self, policy_model: nn.Module) -> None:
        self._model = policy_model
        self._trained = policy_model.active_adapter
        requires_grad = {name: p.requires_grad for name, p in policy_model.named_parameters()}
        policy_model.add_adapter(ADAPTER_NAME, policy_model.peft_config[self._trained])  # type: ignore
        with torch.no_grad():
            for name, parameter in policy_model.named_parameters():
                if is_of_reference(name):
                    source = name.replace(f".{ADAPTER_NAME}.", f".{self._trained}.")
                    parameter.copy_(policy_model.get_parameter(source))
                parameter.requires_grad_(requires_grad.get(name, False))

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        # PEFT makes the adapter that it switches to trainable; that is undone here.
        requires_grad = [(p, p.requires_grad) for p in self._model.parameters()]
        self._model.set_adapter(ADAPTER_NAME)  # type: ignore[operator]
        try:
            yield self._model
        finally:
            self._model.set_adapter(self._trained)  # type: ignore[operator]
            for parameter, flag in requires_grad:
                parameter.requires_grad_(flag)


def make_reference(
    policy_model: nn.Module, *, has_new_adapter: bool = False
) -> FrozenCopy | AdapterOff | FrozenAdapter:
    """The reference that costs least memory: no copy under a new adapter, a copy of the adapter if it was
    trained before, and a copy of the model without adapters.

    Args:
        has_new_adapter: the run itself added the adapter (`peft_config`), so the base model is the starting
            policy.
    """
    if not hasattr(policy_model, "peft_config"):
        return FrozenCopy(policy_model)
    return AdapterOff(policy_model) if has_new_adapter else FrozenAdapter(policy_model)
