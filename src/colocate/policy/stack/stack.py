"""The decoder layers of a model as one stack: packed sequences in, states that predict completions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from colocate.kernels.checks import fallbacks
from colocate.kernels.train import operations
from colocate.memory.train_plan import ActivationPolicy
from colocate.policy.attention.cudnn_attention import why_not_cudnn
from colocate.policy.attention.pack import Pack
from colocate.policy.head.output_head import OutputHead
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.layer import DecoderLayer, LayerContext, LayerFunction
from colocate.policy.stack.weight_store import WeightStore
from colocate.reporting.work_counts import WorkCounts
from colocate.types import Sample
from colocate.weights.layouts import Layout, RotaryTables, causal_lm, has_layout, layout_for
from colocate.weights.shared_views import fuse_parameters


def runs_packed(model: nn.Module) -> bool:
    """Whether `DecoderStack` can compute this model: it has a layout, and no dropout inside attention."""
    # The modules' own rates: `disable_dropout` sets them to 0 and leaves the configuration as it is.
    return has_layout(model) and not any(
        layer.self_attn.attention_dropout for layer in causal_lm(model).model.layers
    )


def tell_fallbacks(model: nn.Module) -> None:
    """Log which operations of `DecoderStack` run on this GPU without their fast kernels, and why."""
    layout = layout_for(model)
    if layout.device.type == "cuda":
        shape, norm = (layout.dtype, layout.head_dim), layout.norm.weight
        assert isinstance(norm, Tensor), "the last norm has a weight"
        windows = [layer.sliding_window for layer in layout.layers if layer.sliding_window is not None]
        no_cudnn = why_not_cudnn(layout.device, *shape)
        activation = layout.layers[0].activation
        fallbacks.tell(fallbacks.of_training(*shape, activation, norm.dtype, bool(windows), no_cudnn))


class DecoderStack:
    """The decoder layers of a model with a layout, as its parameters and adapters are now.

    A stack is out of date (`is_current`) once an adapter is switched, a parameter is replaced or moved, or
    `model.training` changes. Making a stack takes some 10 ms, and finding that none is needed some 2 ms.

    Args:
        host_activations: where "offload" keeps the layers' inputs.
        share_prompts: compute the prompt of a group once.
        store: gathers the weights of a model that holds a part of them; all ranks of its group must then make
            the same calls, until one calls `release`.
    """

    def __init__(
        self,
        model: nn.Module,
        host_activations: HostActivations,
        *,
        share_prompts: bool = True,
        store: WeightStore | None = None,
    ) -> None:
        layout = layout_for(model)
        if (store is None) != (layout.part.count == 1):
            raise ValueError(
                f"the model holds one of {layout.part.count} parts of its weights, and there is "
                f"{'no store' if store is None else 'a store'} that gathers them"
            )
        fuse_parameters(layout)
        self._layout = layout
        self._store = store
        self._layers = [
            DecoderLayer(index, layout, is_training=model.training, store=store)
            for index in range(len(layout.layers))
        ]
        self._host_activations = host_activations
        self._share_prompts = share_prompts
        self._state = _state(layout, is_training=model.training)

    def is_current(self, model: nn.Module) -> bool:
        """Whether a stack of `model` made now would compute the same."""
        layout = layout_for(model)
        return layout is self._layout and _state(layout, is_training=model.training) == self._state

    def hidden_states(self, pack: Pack, policy: ActivationPolicy, counts: WorkCounts | None = None) -> Tensor:
        """The normed last hidden states that predict completion tokens, [N, hidden]; `counts` counts
        layers."""
        counts = counts or WorkCounts()
        x = self.embedded(pack)
        if not torch.is_grad_enabled():
            policy = "full"  # whose forward holds least
        num_passes = 2 if torch.is_grad_enabled() else 1
        counts.begin("layers", num_passes * len(self._layers), is_part=True)
        context = LayerContext(pack, self.rotary_tables(x, pack), policy, note=partial(counts.add, "layers"))
        for index in range(len(self._layers)):
            x = self.after_layer(index, x, context)
        return self.last_states(x, pack)

    def embedded(self, pack: Pack) -> Tensor:
        """The first layer's input, [T, hidden]."""
        embedding, factor = self._layout.embed_tokens, self._layout.embedding_multiplier
        weight = embedding.weight if self._store is None else self._store.whole(embedding.weight)
        x = F.embedding(pack.token_ids, weight, embedding.padding_idx)
        return x if factor == 1.0 else x * factor

    def whole(self, head: OutputHead) -> OutputHead:
        """The model's head with its whole weight [V, hidden], gathered if it is split."""
        return head if self._store is None else replace(head, weight=self._store.whole(head.weight))

    def settle(self) -> None:
        """Add gradients that are still on their way between ranks; needed after a backward pass."""
        if self._store is not None:
            self._store.settle()

    @property
    def has_parts(self) -> bool:
        """Whether other ranks hold parts of the weights, and wait for this one in every micro-batch."""
        return self._store is not None

    def begin(self) -> None:
        """Begin a micro-batch, forward or forward and backward."""
        if self._store is not None:
            self._store.begin()

    def finish(self, *, has_backward: bool) -> None:
        """Make the remaining calls of a micro-batch that this rank lacks or has failed in, since the other
        ranks wait for them."""
        if self._store is not None:
            self._store.finish(has_backward=has_backward)

    def release(self) -> None:
        """Free the gathered weights, at the end of a pass or after an exception in it."""
        if self._store is not None:
            self._store.release()

    @torch.no_grad()
    def rotary_tables(self, x: Tensor, pack: Pack) -> RotaryTables:
        """The tables of the pack's positions, each [T, D] in the type of `x` [T, hidden]."""
        return self._layout.rotary_tables_at(pack.position_ids, x.dtype)

    def after_layer(self, index: int, x: Tensor, context: LayerContext) -> Tensor:
        """The output of layer `index` for `x` [T, hidden], differentiable."""
        layer = self._layers[index]
        offload = (self._host_activations, index) if context.policy == "offload" else None
        seed = int(torch.randint(2**31, ())) if layer.has_dropout else 0
        context = replace(context, seed=seed, offload=offload)
        return LayerFunction.apply(x, layer, context, *layer.parameters())

    def last_states(self, x: Tensor, pack: Pack) -> Tensor:
        """The normed states [N, hidden] that predict completion tokens, of the last layer's [T, hidden]."""
        norm, layout = self._layout.norm.weight, self._layout
        assert isinstance(norm, Tensor), "the last norm has a weight"
        return _NormFunction.apply(x[pack.predicting], norm, layout.rms_norm_eps, layout.norm_offset)

    def pack(self, samples: Sequence[Sample]) -> Pack:
        """Lay out a micro-batch; prompts are shared unless a layer's window ends inside a sequence."""
        longest = max(sample.num_tokens for sample in samples)
        windows = [layer.window for layer in self._layers if layer.window is not None]
        return Pack.of(
            samples, share_prompts=self._share_prompts and longest <= min(windows, default=longest)
        )


def _state(layout: Layout, *, is_training: bool) -> tuple[object, ...]:
    """All that a stack depends on besides its modules: where parameters lie and which adapters are on."""
    addresses = [part.data_ptr() for part in layout.parts if isinstance(part, Tensor)]
    return is_training, addresses, layout.adapter_states()


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, *constants):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = constants
        return operations.rms_norm(x, weight, *constants)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = operations.rms_norm_backward(
            grad.contiguous(), x, weight, ctx.eps, offset=ctx.offset
        )
        return grad_x, grad_weight.to(weight.dtype), None, None
