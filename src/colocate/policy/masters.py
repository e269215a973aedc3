"""fp32 master weights over parameters that may be bf16.

bf16 has 8 bits of mantissa: next to a weight of 0.02 the neighbouring values are 1.2e-4 apart, and an Adam
step at learning rate 1e-6 moves it by 1e-6. Added to the bf16 weight it rounds to nothing, every time. So
steps are summed in an fp32 copy and the bf16 parameters are that copy, rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colocate.policy.master_shards import MasterShards, rows_in_memory
from colocate.weights.weight_parts import UNSPLIT, Split


class Masters:
    """The tensors that an optimizer steps on. A float32 parameter is its own master.

    Args:
        parameters: the trained ones, by name.
        shards: how the ranks split the masters by rows; None: every rank has all of them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: MasterShards | None) -> None:
        self._parameters = dict(parameters)
        self._shards = shards
        self.of_low: dict[str, nn.Parameter] = {}
        """The masters of bf16 parameters, by name."""
        self._views: dict[str, nn.Parameter] = {}
        """With shards, this rank's rows of float32 parameters, which are their own masters."""

    def make(self, originals: Mapping[str, Tensor], splits: Mapping[str, Split]) -> None:
        """Make the masters of bf16 parameters, and with shards this rank's rows of float32 parameters.

        Args:
            originals: by name, what the weights were before a cast to bf16; they become the masters.
            splits: by name, how the weights are split; parameters without an entry are whole.
        """
        for name, parameter in self._parameters.items():
            is_low = parameter.dtype in (torch.bfloat16, torch.float16)
            weights = parameter.detach()
            if is_low and name in originals:
                weights = splits.get(name, UNSPLIT).of_full(originals[name])
            if self._shards is not None:
                weights = self._shards.own_rows(rows_in_memory(weights, parameter))
            if is_low:
                # A copy even where there is nothing to convert: rows must not keep a whole original alive.
                keeps = self._shards is not None
                self.of_low[name] = nn.Parameter(weights.to(parameter.device, torch.float32, copy=keeps))
            elif self._shards is not None:
                self._views[name] = nn.Parameter(weights)

    @property
    def names(self) -> list[str]:
        """The parameters that are not themselves what the optimizer steps on."""
        return [*self.of_low, *self._views]

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps on, by parameter name."""
        for name, view in self._views.items():
            rows = self._own_rows(name)
            if view.data_ptr() != rows.data_ptr():  # the parameter was moved, into a fused one for example
                view.data = rows.detach()
        return self._parameters | self._views | self.of_low

    def _own_rows(self, name: str) -> Tensor:
        """This rank's rows of a parameter, or all of them."""
        if self._shards is None:
            return self._parameters[name].detach()
        return self._shards.own_rows(rows_in_memory(self._parameters[name]))

    def are_current(self) -> bool:
        """Whether the parameters are the masters rounded; not if somebody else has changed the parameters."""
        return all(
            torch.equal(master.detach().to(rows.dtype), rows)
            for rows, master in ((self._own_rows(name), master) for name, master in self.of_low.items())
        )

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Make the masters what the parameters are now."""
        for name, master in self.of_low.items():
            master.copy_(self._own_rows(name))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters' own storage, where the engine reads them, on every rank."""
        if self.of_low:
            torch._foreach_copy_([self._own_rows(name) for name in self.of_low], list(self.of_low.values()))
        if self._shards is not None:
            self._shards.gather([rows_in_memory(parameter) for parameter in self._parameters.values()])
