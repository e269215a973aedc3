"""The frozen policy that the KL penalty measures the distance to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colocate.weights.fully_sharded import copy_sharded, is_fully_sharded


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


class AdapterOff:
    """The base model under a new adapter as the reference: the policy before the adapter learned anything."""

    def __init__(self, policy_model: nn.Module) -> None:
        self._model = policy_model

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self._model.disable_adapter():  # type: ignore[operator]
            yield self._model

    def weights(self) -> list[Tensor]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, "only a copy can have moved"


class FrozenAdapter:
    """A copy of all trained weights over a frozen base, as they were when the run began. Its values take the
    place of the trained ones while the reference computes, so that PEFT's methods need not be known.

    Args:
        is_new: the run itself has made the adapter, so that a resumed run cannot make the same again.
    """

    def __init__(self, policy_model: nn.Module, *, is_new: bool) -> None:
        self._model = policy_model
        self._is_new = is_new
        self._trained = {name: p for name, p in policy_model.named_parameters() if p.requires_grad}
        self._frozen = {name: p.detach().clone() for name, p in self._trained.items()}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        kept = {name: p.detach().clone() for name, p in self._trained.items()}
        try:
            self._write(self._frozen)
            yield self._model
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._trained.items():
            parameter.copy_(values[name])

    def weights(self) -> list[Tensor]:
        return list(self._frozen.values())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._frozen) if self._is_new else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the reference of the run that is resumed."""
        if not self._is_new:
            return
        if state.keys() != self._frozen.keys():
            raise ValueError(
                "beta > 0 penalises the distance to the reference, which is the adapter as it was made, and "
                "the checkpoint was written without it. Set beta=0, or start a new run with the checkpoint "
                "as model."
            )
        for name, values in state.items():
            self._frozen[name].copy_(values)


_STARTS_AT_ZERO = (True, "gaussian", "eva")
"""Values of `init_lora_weights` with which a new LoRA adds nothing, and leaves the base as it was."""
_OTHER_STARTS = (
    *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
"""Settings of PEFT's LoRA that change the base's weights, or of which it is not known."""


def starts_as_its_base(policy_model: nn.Module) -> bool:
    """Whether switching a new adapter off gives the model's start, now and later.

    PiSSA and OLoRA take a part out of the base's weights, other methods have starts of their own, and biases
    that PEFT trains in place stay when it switches the adapter off.
    """
    configs: dict[str, Any] = policy_model.peft_config  # type: ignore[assignment]
    return all(
        config.peft_type == "LORA"
        and config.init_lora_weights in _STARTS_AT_ZERO
        and config.bias == "none"
        and not any(getattr(config, option, None) for option in _OTHER_STARTS)
        for config in configs.values()
    )


def make_reference(
    policy_model: nn.Module, *, has_new_adapter: bool = False
) -> FrozenCopy | AdapterOff | FrozenAdapter:
    """The reference that costs least memory: no copy under a new LoRA (`has_new_adapter`: the run added it);
    a copy of an adapter that was trained before or changes the base from the start; or a copy of a model
    without adapters."""
    if not hasattr(policy_model, "peft_config"):
        return FrozenCopy(policy_model)
    if has_new_adapter and starts_as_its_base(policy_model):
        return AdapterOff(policy_model)
    return FrozenAdapter(policy_model, is_new=has_new_adapter)
