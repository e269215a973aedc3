"""The decoder layers, forward and backward, on the model's own parameters.

One autograd function per layer, whose backward is written out: so this file, and not a graph of small
operations, decides which tensors a layer keeps for its backward pass and which it computes again. That is the
*activation policy*. Per token and layer, with h the hidden size, i the MLP's width, H query and K key heads
of D values, the layer keeps

    keep        its input, q/k/v, attention's output, the MLP's input, gate and up     2h + 2HD + 2KD + 2i
    selective   what "keep" keeps without gate and up, which are made again            2h + 2HD + 2KD
    full        its input                                                              h
    offload     its input, in pinned host memory                                       0

values, and 4H bytes for the log-sum-exps in the first two. Norms, rotations and activation functions are made
again under all of them: they cost a few per cent of a step's time and more memory than all the rest. Where
the MLP is recomputed it runs over tiles of tokens, so that its memory does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from colocate.kernels.checks import fallbacks
from colocate.kernels.train import operations
from colocate.memory.train_plan import ActivationPolicy
from colocate.policy.attention.attention import attention, attention_backward
from colocate.policy.attention.cudnn_attention import why_not_cudnn
from colocate.policy.attention.pack import Pack
from colocate.policy.head.output_head import OutputHead
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.projections import Gradients, Projection
from colocate.policy.stack.weight_store import WeightStore, split_parameters
from colocate.reporting.work_counts import WorkCounts
from colocate.types import Sample
from colocate.weights.layouts import Layout, RotaryTables, causal_lm, has_layout, layout_for
from colocate.weights.shared_views import fuse_parameters

MLP_TILE_TOKENS = 8192
"""Tokens of the recomputed MLP at a time: enough for its products to run at full speed."""


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
        if self._store is None:
            x = embedding(pack.token_ids)  # the module itself: `padding_idx` has no gradient
        else:
            x = F.embedding(pack.token_ids, self._store.whole(embedding.weight), embedding.padding_idx)
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
        return _LayerFunction.apply(x, layer, context, *layer.parameters())

    def last_states(self, x: Tensor, pack: Pack) -> Tensor:
        """The normed states [N, hidden] that predict completion tokens, of the last layer's [T, hidden]."""
        norm = self._layout.norm.weight
        assert isinstance(norm, Tensor), "the last norm has a weight"
        return _NormFunction.apply(x[pack.predicting], norm, self._layout.rms_norm_eps)

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


@dataclass(frozen=True)
class LayerContext:
    """The inputs that a layer's forward and backward pass of one micro-batch share, besides the tensors it
    keeps."""

    pack: Pack
    rotary_tables: RotaryTables  # each [T, D]
    policy: ActivationPolicy
    seed: int = 0
    """Seed of the layer's dropout masks, from which `seed_of` makes one for each of its projections."""
    offload: tuple[HostActivations, int] | None = None
    """Where "offload" keeps the layer's input, and under which number."""
    note: Callable[[], object] = lambda: None
    """Called when a pass of the layer has been launched."""

    def seed_of(self, slot: int) -> int:
        """The seed of one projection's dropout masks, far from its neighbours' seeds.

        q/k/v have slot 0 and o slot 1; gate/up and down have two slots for every tile of tokens
        (`mlp_tiles`).
        """
        return (self.seed + slot * 1_000_003) % 2**32  # the CPU's generator reads no more bits

    def mlp_tiles(self) -> Iterator[tuple[slice, int]]:
        """The MLP's tiles of tokens, each with the slot of gate/up's dropout; down's is the next."""
        size = self.pack.num_tokens if self.policy == "keep" else MLP_TILE_TOKENS
        for number, start in enumerate(range(0, self.pack.num_tokens, size)):
            yield slice(start, start + size), 2 + 2 * number


class DecoderLayer:
    """One pre-norm decoder layer: x_mid = x + o(attention(qkv(norm(x)))), then y = x_mid + mlp(norm(x_mid)),
    where mlp(n) = down(activation(gate(n)) * up(n)). o and down multiply by Granite's residual multiplier.
    """

    def __init__(
        self, index: int, layout: Layout, *, is_training: bool, store: WeightStore | None = None
    ) -> None:
        layer = layout.layers[index]
        self._index, self._store = index, store
        self._split = [] if store is None else [p for p in split_parameters(layer) if p.requires_grad]
        m = layout.residual_multiplier
        gathered = [None] * 4 if store is None else store.projections(index)
        self._qkv, self._o, self._gate_up, self._down = (
            Projection(*modules, is_training=is_training, gathered=weights, factor=factor)
            for modules, weights, factor in zip(
                layer.projection_groups(), gathered, (1.0, m, 1.0, m), strict=True
            )
        )
        self._input_norm: Any = layer.input_norm.weight
        self._mlp_norm: Any = layer.post_attention_norm.weight
        self._q_norm: Any = None if layer.q_norm is None else layer.q_norm.weight
        self._k_norm: Any = None if layer.k_norm is None else layer.k_norm.weight
        self._activation = layer.activation
        self._num_heads, self._head_dim = layout.num_heads, layout.head_dim
        self.window, self._rotates = layer.sliding_window, layer.rotates
        self._scale, self._eps = layout.scaling, layout.rms_norm_eps

    @property
    def has_dropout(self) -> bool:
        return any(projection.has_dropout for projection in self._projections())

    def parameters(self) -> list[Tensor]:
        """The layer's trained tensors, for which `backward` makes gradients."""
        norms = (self._input_norm, self._mlp_norm, self._q_norm, self._k_norm)
        own = [norm for norm in norms if norm is not None and norm.requires_grad]
        return own + [p for projection in self._projections() for p in projection.parameters()]

    def load(self, *, is_forward: bool) -> None:
        """Gather the layer's weights if they are split, before its forward or backward pass."""
        if self._store is not None:
            self._store.load(self._index, is_forward=is_forward)

    def hand_over(self, gradients: Gradients, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of a backward pass for autograd: None for weights that are split, whose gradients go
        to the ranks that hold the parts. A missing one is sent as zeros, since the others wait for it."""
        if self._store is None:
            return gradients.of(parameters)
        self._store.settle()  # of the layer above, which had this layer's time to arrive
        for parameter in self._split:
            self._store.reduce(parameter, gradients.take(parameter))
        return gradients.of(parameters)

    def forward(self, x: Tensor, context: LayerContext) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output [T, h] for its input `x` [T, h], and the tensors that its policy keeps besides
        the input.

        "keep" and "selective" keep (qkv, out, lse, x_mid), and "keep" also the first product of the MLP;
        "full" and "offload" keep nothing. Tensors are dropped (`del`) as soon as nothing needs them any more:
        at its widest place, inside the MLP, the layer then holds only x_mid, y, one tile and the kept
        tensors.
        """
        qkv, out, lse = self._attend(x, context)
        x_mid = self._o(out.flatten(1), context.seed_of(1)).add_(x)
        kept: tuple[Tensor, ...] = ()
        if context.policy in ("keep", "selective"):
            kept = (qkv, out, lse, x_mid)
        del qkv, out, lse
        y = torch.empty_like(x)
        for tile, slot in context.mlp_tiles():
            normed = operations.rms_norm(x_mid[tile], self._mlp_norm, self._eps)
            gate_up, low_rank = self._gate_up.in_two_terms(normed, context.seed_of(slot))
            if context.policy == "keep":
                kept += (gate_up,)  # without what adapters add to it
            activated = operations.gate(self._activation, gate_up, low_rank)
            del gate_up, low_rank, normed  # before the next tile's are made
            torch.add(self._down(activated, context.seed_of(slot + 1)), x_mid[tile], out=y[tile])
            del activated
        return y, kept

    def backward(
        self, grad: Tensor, x: Tensor, kept: tuple[Tensor, ...], context: LayerContext, gradients: Gradients
    ) -> Tensor:
        """The gradient of `x` [T, h], given the output's; the parameters' gradients go into `gradients`.

        It goes through the layer from its end to its beginning, and at every operation it first recomputes
        tensors that are not in `kept` (from `forward`):

            x_mid = x + o(out)                 made again with q/k/v and attention unless kept
            y = x_mid + mlp(norm(x_mid))       `_mlp_backward`: grad becomes the gradient of x_mid
            o                                  gradients of W_o and of attention's output
            attention                          of q, k, v: from q, k, v, out and lse, no scores kept
            rotation, q and k norms            of q/k/v before them; q and k are rotated again, not kept
            q/k/v                              gradients of W_qkv and of norm(x), which is made again
            x                                  the norm's gradient, plus the residual's, which is grad itself

        A parameter's gradient is made before the tensors that it needs are dropped, and every tensor is
        dropped as soon as its last reader is done: `footprint` counts what is there at the widest place.
        """
        if kept:
            qkv, out, lse, x_mid = kept[:4]
        else:
            qkv, out, lse = self._attend(x, context)
            x_mid = self._o(out.flatten(1), context.seed_of(1)).add_(x)
        grad = self._mlp_backward(grad, x_mid, kept[4:], context, gradients)
        reduced = self._o.reduced_gradients(grad)
        self._o.add_gradients(gradients, grad, reduced, out.flatten(1), context.seed_of(1))
        grad_out = self._o.input_gradient(grad, reduced, context.seed_of(1)).view_as(out)
        q, k, v = self._rotated(qkv, context)
        grad_q, grad_k, grad_v = attention_backward(
            grad_out, q, k, v, out, lse, context.pack, scale=self._scale, window=self.window
        )
        del x_mid, q, k, out, grad_out
        tables = context.rotary_tables[self._rotates]
        grad_qkv, grad_q_norm, grad_k_norm = operations.rotate_backward(
            grad_q, grad_k, grad_v, qkv, *tables, self._q_norm, self._k_norm, self._eps
        )
        del grad_q, grad_k, grad_v, qkv, v
        for norm, value in ((self._q_norm, grad_q_norm), (self._k_norm, grad_k_norm)):
            if value is not None:
                gradients.add(norm, value)
        normed = operations.rms_norm(x, self._input_norm, self._eps)
        reduced = self._qkv.reduced_gradients(grad_qkv.flatten(1))
        self._qkv.add_gradients(gradients, grad_qkv.flatten(1), reduced, normed, context.seed_of(0))
        del normed
        grad_normed = self._qkv.input_gradient(grad_qkv.flatten(1), reduced, context.seed_of(0))
        del grad_qkv
        grad_x, grad_norm = operations.rms_norm_backward(grad_normed, x, self._input_norm, self._eps, grad)
        gradients.add(self._input_norm, grad_norm)
        return grad_x

    def _attend(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """q/k/v before rotation [T, H + 2K, D], attention's output [T, H, D], its log-sum-exps [H, T]."""
        normed = operations.rms_norm(x, self._input_norm, self._eps)
        qkv = self._qkv(normed, context.seed_of(0)).view(len(x), -1, self._head_dim)
        q, k, v = self._rotated(qkv, context)
        out, lse = attention(q, k, v, context.pack, scale=self._scale, window=self.window)
        return qkv, out, lse

    def _rotated(self, qkv: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        tables = context.rotary_tables[self._rotates]
        q, k = operations.rotate(qkv, *tables, self._num_heads, self._q_norm, self._k_norm, self._eps)
        return q, k, qkv[:, self._num_heads + k.shape[1] :]

    def _mlp_backward(
        self,
        grad: Tensor,
        x_mid: Tensor,
        kept: tuple[Tensor, ...],
        context: LayerContext,
        gradients: Gradients,
    ) -> Tensor:
        """The gradient of x_mid [T, h] in y = x_mid + mlp(norm(x_mid)), given `grad`, that of y.

        Tile by tile of tokens (one tile if gate and up were kept in `kept`), with g, u = gate and up:

        1. norm(x_mid), and g, u unless kept; what adapters add to them stays in factors (`low_rank`).
        2. d_a = grad W_down, the gradient of a = activation(g) * u.
        3. `gate_backward`: d_gu = (d_a * u * activation'(g), d_a * activation(g)), and a once more, from one
           pass over the widest tensors of the layer. Here g, u and d_a are dropped.
        4. dW_down from grad and a; dW_gate_up from d_gu and norm(x_mid); then d_gu W_gate_up, the gradient of
           norm(x_mid).
        5. The norm's backward pass, which adds grad, the gradient that reaches x_mid past the MLP.

        a comes out of step 3 because the gate's kernel has g and u in registers; made before step 2 it would
        lie in memory beside d_a. Sums over tiles are float32 (`Gradients`).
        """
        grad_x = torch.empty_like(x_mid)
        for tile, slot in context.mlp_tiles():
            normed = operations.rms_norm(x_mid[tile], self._mlp_norm, self._eps)
            if kept:
                gate_up, low_rank = kept[0], self._gate_up.low_rank(normed)
            else:
                gate_up, low_rank = self._gate_up.in_two_terms(normed, context.seed_of(slot))
            reduced = self._down.reduced_gradients(grad[tile])
            grad_activated, grad_low_rank = self._down.input_gradient_in_two_terms(
                grad[tile], reduced, context.seed_of(slot + 1)
            )
            grad_gate_up, activated = operations.gate_backward(
                grad_activated, self._activation, gate_up, low_rank, grad_low_rank
            )
            del gate_up, grad_activated
            self._down.add_gradients(gradients, grad[tile], reduced, activated, context.seed_of(slot + 1))
            del activated
            reduced = self._gate_up.reduced_gradients(grad_gate_up)
            self._gate_up.add_gradients(
                gradients, grad_gate_up, reduced, normed, context.seed_of(slot), low_rank
            )
            grad_normed = self._gate_up.input_gradient(grad_gate_up, reduced, context.seed_of(slot))
            del grad_gate_up, normed, low_rank
            _, grad_norm = operations.rms_norm_backward(
                grad_normed, x_mid[tile], self._mlp_norm, self._eps, grad[tile], out=grad_x[tile]
            )
            del grad_normed
            gradients.add(self._mlp_norm, grad_norm)
        return grad_x

    def _projections(self) -> tuple[Projection, ...]:
        return self._qkv, self._o, self._gate_up, self._down


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer, context, *parameters):
        layer.load(is_forward=True)
        y, kept = layer.forward(x, context)
        ctx.layer, ctx.context, ctx.parameters = layer, context, parameters
        if context.offload is None:
            ctx.save_for_backward(x, *kept)
        elif any(ctx.needs_input_grad):
            store, number = context.offload
            store.put(number, x)
        context.note()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.context.offload is None:
            x, *kept = ctx.saved_tensors
        else:
            store, number = ctx.context.offload
            x, kept = store.take(number), ()
        ctx.layer.load(is_forward=False)
        gradients = Gradients()
        # Autograd may pass on an expanded scalar; kernels read rows.
        grad_x = ctx.layer.backward(grad.contiguous(), x, tuple(kept), ctx.context, gradients)
        ctx.context.note()
        return grad_x, None, None, *ctx.layer.hand_over(gradients, ctx.parameters)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return operations.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = operations.rms_norm_backward(grad.contiguous(), x, weight, ctx.eps)
        return grad_x, grad_weight.to(weight.dtype), None
