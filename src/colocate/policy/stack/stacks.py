"""The packed stacks of a policy's models, kept from one use to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed import ProcessGroup

from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack, runs_packed
from colocate.policy.stack.weight_store import AddGradient, WeightStore
from colocate.weights.layouts import layout_for


class Stacks:
    """The last stack made for each use ("update", …); the uses differ in dropout and adapters.

    Args:
        trained: the model whose gradients are wanted.
        host_activations: where activations wait that are offloaded.
        share_prompts: compute the prompt of samples with an equal `prompt_key` once.
        weight_group: the ranks that share the weights of models that hold a part of them.
        add_gradient: takes a trained parameter and its gradient, where autograd does not bring it.
    """

    def __init__(
        self,
        trained: nn.Module,
        host_activations: HostActivations,
        *,
        share_prompts: bool,
        weight_group: ProcessGroup | None,
        add_gradient: AddGradient,
    ) -> None:
        self._trained = trained
        self._host_activations = host_activations
        self._share_prompts = share_prompts
        self._weight_group = weight_group
        self._add_gradient = add_gradient
        self._runs_packed = runs_packed(trained)
        self._stacks: dict[str, DecoderStack] = {}

    @contextmanager
    def open(self, model: nn.Module, use: str) -> Iterator[DecoderStack | None]:
        """The stack of `model` for one pass over samples, after which no weights stay gathered; None: the
        model runs padded, through transformers' modules."""
        if not self._runs_packed:
            yield None
            return
        stack = self._of(model, use)
        try:
            yield stack
        finally:
            stack.release()

    def _of(self, model: nn.Module, use: str) -> DecoderStack:
        """The stack of `model` for this use, made anew if the last one is out of date."""
        stack = self._stacks.get(use)
        if stack is None or not stack.is_current(model):
            stack = DecoderStack(
                model, self._host_activations, share_prompts=self._share_prompts, store=self._store(model)
            )
            self._stacks[use] = stack
        return stack

    def _store(self, model: nn.Module) -> WeightStore | None:
        """The store that gathers the weights of `model`; None: it has them whole."""
        layout, group = layout_for(model), self._weight_group
        if layout.part.count == 1:
            return None
        assert group is not None, "a part of the weights needs the ranks with the others"
        return WeightStore(layout, group, self._add_gradient if model is self._trained else None)
