"""One decoder layer, forward and backward, on the model's own parameters.

One autograd function per layer, whose backward is written out: so this file, and not a graph of small
operations, decides which tensors a layer keeps for its backward pass and which it computes again. That is the
*activation policy*. Per token and layer, with h the hidden size, i the MLP's width, H query and K key heads
of D values, the layer keeps

    keep        its input, q/k/v, attention's output, the MLP's input, gate and up     2h + 2HD + 2KD + 2i
    selective   what "keep" keeps without gate and up, which are made again            2h + 2HD + 2KD
    full        its input                                                              h
    offload     its input, in pinned host memory                                       0

values, and in the first two 4H bytes for the log-sum-exps and, where the outputs of attention and the MLP are
normed, 2h values for these. Norms, rotations and activation functions are made again under all of them: they
cost a few per cent of a step's time and more memory than all the rest. Where the MLP is recomputed it runs
over tiles of tokens, so that its memory does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colocate.kernels.train import operations
from colocate.memory.train_plan import ActivationPolicy
from colocate.policy.attention.attention import attention, attention_backward
from colocate.policy.attention.pack import Pack
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.projections import Gradients, Projection
from colocate.policy.stack.weight_store import WeightStore, split_parameters
from colocate.weights.layouts import Layout, RotaryTables
from colocate.weights.low_rank import LowRank

MLP_TILE_TOKENS = 8192
"""Tokens of the recomputed MLP at a time: enough for its products to run at full speed."""


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
    """One decoder layer: x_mid = x + o(attention(qkv(norm(x)))), then y = x_mid + mlp(norm(x_mid)), where
    mlp(n) = down(activation(gate(n)) * up(n)). o and down multiply by Granite's residual multiplier. Some
    families norm what o and down return, too, or instead.
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
        self._norms: list[Any] = [norm.weight for norm in layer.norms()]
        self._input_norm, self._o_norm = _weight(layer.input_norm), _weight(layer.attention_output_norm)
        self._mlp_norm, self._down_norm = _weight(layer.mlp_norm), _weight(layer.mlp_output_norm)
        self._q_norm, self._k_norm = _weight(layer.q_norm), _weight(layer.k_norm)
        self._norms_whole_qk = layout.norms_whole_qk
        self._activation = layer.activation
        self._num_heads, self._head_dim = layout.num_heads, layout.head_dim
        self.window, self._rotary = layer.sliding_window, layer.rotary
        self._scale, self._eps, self._offset = layout.scaling, layout.rms_norm_eps, layout.norm_offset
        self._constants: tuple[Any, ...] = (
            self._eps,
            self._offset,
            layout.pair_distance,
            layout.norms_last,
        )

    @property
    def has_dropout(self) -> bool:
        return any(projection.has_dropout for projection in self._projections())

    def parameters(self) -> list[Tensor]:
        """The layer's trained tensors, for which `backward` makes gradients."""
        own = [norm for norm in self._norms if norm.requires_grad]
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

        "keep" and "selective" keep (qkv, out, lse, x_mid), and the outputs of o and down if these have norms;
        "keep" also the first product of the MLP; "full" and "offload" keep nothing. Tensors are dropped
        (`del`) as soon as nothing needs them any more: at its widest place, inside the MLP, the layer then
        holds only x_mid, y, one tile and the kept tensors.
        """
        kept: tuple[Tensor, ...] = self._until_mlp(x, context)
        x_mid, down_outputs = kept[3], None
        if context.policy not in ("keep", "selective"):
            kept = ()
        elif self._down_norm is not None:
            down_outputs = torch.empty_like(x)
            kept += (down_outputs,)
        y = torch.empty_like(x)
        for tile, slot in context.mlp_tiles():
            normed = self._normed(x_mid[tile], self._mlp_norm)
            gate_up, low_rank = self._gate_up.in_two_terms(normed, context.seed_of(slot))
            if context.policy == "keep":
                kept += (gate_up,)  # without what adapters add to it
            activated = operations.gate(self._activation, gate_up, low_rank)
            del gate_up, low_rank, normed  # before the next tile's are made
            added = self._down(activated, context.seed_of(slot + 1))
            del activated
            if down_outputs is not None:
                down_outputs[tile] = added
            torch.add(self._normed(added, self._down_norm), x_mid[tile], out=y[tile])
            del added
        return y, kept

    def backward(
        self, grad: Tensor, x: Tensor, kept: tuple[Tensor, ...], context: LayerContext, gradients: Gradients
    ) -> Tensor:
        """The gradient of `x` [T, h], given the output's; the parameters' gradients go into `gradients`.

        It goes through the layer from its end to its beginning, and at every operation it first recomputes
        tensors that are not in `kept` (from `forward`):

            x_mid = x + o(out)                 made again with q/k/v and attention unless kept
            y = x_mid + mlp(norm(x_mid))       `_mlp_backward`: grad becomes the gradient of x_mid
            o, and its output's norm           gradients of W_o and of attention's output
            attention                          of q, k, v: from q, k, v, out and lse, no scores kept
            rotation, q and k norms            of q/k/v before them; q and k are rotated again, not kept
            q/k/v                              gradients of W_qkv and of norm(x), which is made again
            x                                  the norm's gradient, plus the residual's, which is grad itself

        A parameter's gradient is made before the tensors that it needs are dropped, and every tensor is
        dropped as soon as its last reader is done: `footprint` counts what is there at the widest place.
        """
        num_attention = 4 if self._o_norm is None else 5
        qkv, out, lse, x_mid, *o_outputs = kept[:num_attention] or self._until_mlp(x, context)
        grad = self._mlp_backward(grad, x_mid, kept[num_attention:], context, gradients)
        grad_o = self._norm_backward(grad, o_outputs[0], self._o_norm, gradients) if o_outputs else grad
        reduced = self._o.reduced_gradients(grad_o)
        self._o.add_gradients(gradients, grad_o, reduced, out.flatten(1), context.seed_of(1))
        grad_out = self._o.input_gradient(grad_o, reduced, context.seed_of(1)).view_as(out)
        del grad_o, o_outputs
        q, k, v = self._rotated(qkv, context)
        grad_q, grad_k, grad_v = attention_backward(
            grad_out, q, k, v, out, lse, context.pack, scale=self._scale, window=self.window
        )
        del x_mid, q, k, out, grad_out
        grad_qkv = self._rotated_backward(grad_q, grad_k, grad_v, qkv, context, gradients)
        del grad_q, grad_k, grad_v, qkv, v
        normed = self._normed(x, self._input_norm)
        reduced = self._qkv.reduced_gradients(grad_qkv.flatten(1))
        self._qkv.add_gradients(gradients, grad_qkv.flatten(1), reduced, normed, context.seed_of(0))
        del normed
        grad_normed = self._qkv.input_gradient(grad_qkv.flatten(1), reduced, context.seed_of(0))
        del grad_qkv
        return self._norm_backward(grad_normed, x, self._input_norm, gradients, grad)

    def _until_mlp(self, x: Tensor, context: LayerContext) -> tuple[Tensor, ...]:
        """The results of `_attend`, x_mid [T, h] and, if it is normed, the output of o [T, h]."""
        qkv, out, lse = self._attend(x, context)
        added = self._o(out.flatten(1), context.seed_of(1))
        if self._o_norm is None:
            return qkv, out, lse, added.add_(x)
        return qkv, out, lse, self._normed(added, self._o_norm).add_(x), added

    def _normed(self, x: Tensor, weight: Any) -> Tensor:
        return x if weight is None else operations.rms_norm(x, weight, self._eps, self._offset)

    def _norm_backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Any,
        gradients: Gradients,
        grad_residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The gradient of x [T, h], given that of its norm, plus `grad_residual`; the norm's weight's goes
        into `gradients`. Without a weight there is no norm."""
        if weight is None:
            assert grad_residual is not None, "what is not normed is a layer's input"
            return torch.add(grad, grad_residual, out=out)
        grad_x, grad_weight = operations.rms_norm_backward(
            grad, x, weight, self._eps, grad_residual, self._offset, out
        )
        gradients.add(weight, grad_weight)
        return grad_x

    def _attend(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """q/k/v before rotation [T, H + 2K, D], attention's output [T, H, D], its log-sum-exps [H, T]."""
        normed = self._normed(x, self._input_norm)
        qkv = self._qkv(normed, context.seed_of(0)).view(len(x), -1, self._head_dim)
        q, k, v = self._rotated(qkv, context)
        out, lse = attention(q, k, v, context.pack, scale=self._scale, window=self.window)
        return qkv, out, lse

    def _rotated(self, qkv: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        tables, (q_norm, k_norm) = context.rotary_tables[self._rotary], (self._q_norm, self._k_norm)
        heads = qkv
        if self._norms_whole_qk:
            heads, q_norm, k_norm = torch.empty_like(qkv), None, None
            for part, norm in self._whole_parts(qkv):
                columns = heads.flatten(1)[:, part]
                columns.copy_(self._normed(qkv.flatten(1)[:, part], norm))
        q, k = operations.rotate(heads, *tables, self._num_heads, q_norm, k_norm, *self._constants)
        return q, k, qkv[:, self._num_heads + k.shape[1] :]

    def _rotated_backward(
        self,
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        qkv: Tensor,
        context: LayerContext,
        gradients: Gradients,
    ) -> Tensor:
        """The gradient of q/k/v [T, H + 2K, D], given those of `_rotated`'s results."""
        tables, (q_norm, k_norm) = context.rotary_tables[self._rotary], (self._q_norm, self._k_norm)
        if self._norms_whole_qk:
            q_norm = k_norm = None
        grad_qkv, *grad_norms = operations.rotate_backward(
            grad_q, grad_k, grad_v, qkv, *tables, q_norm, k_norm, *self._constants
        )
        for norm, value in zip((q_norm, k_norm), grad_norms, strict=True):
            if value is not None:
                gradients.add(norm, value)
        if self._norms_whole_qk:
            for part, norm in self._whole_parts(qkv):
                grad_part, x = grad_qkv.flatten(1)[:, part], qkv.flatten(1)[:, part]
                grad_part.copy_(self._norm_backward(grad_part, x, norm, gradients))
        return grad_qkv

    def _whole_parts(self, qkv: Tensor) -> Iterator[tuple[slice, Any]]:
        """The columns of queries, and of keys, in q/k/v [T, (H + 2K) D], with the weight of their norm."""
        num_queries = self._num_heads * self._head_dim
        yield slice(num_queries), self._q_norm
        yield slice(num_queries, num_queries + len(self._k_norm)), self._k_norm

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

        Where down's output is normed, grad is taken back through that norm before (`_down_gradient`).

        a comes out of step 3 because the gate's kernel has g and u in registers; made before step 2 it would
        lie in memory beside d_a. Sums over tiles are float32 (`Gradients`).
        """
        grad_x, down_outputs = torch.empty_like(x_mid), None
        if self._down_norm is not None and kept:
            down_outputs, kept = kept[0], kept[1:]
        for tile, slot in context.mlp_tiles():
            normed = self._normed(x_mid[tile], self._mlp_norm)
            if kept:
                gate_up, low_rank = kept[0], self._gate_up.low_rank(normed)
            else:
                gate_up, low_rank = self._gate_up.in_two_terms(normed, context.seed_of(slot))
            output = None if down_outputs is None else down_outputs[tile]
            grad_down = self._down_gradient(
                grad[tile], output, gate_up, low_rank, context.seed_of(slot + 1), gradients
            )
            reduced = self._down.reduced_gradients(grad_down)
            grad_activated, grad_low_rank = self._down.input_gradient_in_two_terms(
                grad_down, reduced, context.seed_of(slot + 1)
            )
            grad_gate_up, activated = operations.gate_backward(
                grad_activated, self._activation, gate_up, low_rank, grad_low_rank
            )
            del gate_up, grad_activated
            self._down.add_gradients(gradients, grad_down, reduced, activated, context.seed_of(slot + 1))
            del activated, grad_down
            reduced = self._gate_up.reduced_gradients(grad_gate_up)
            self._gate_up.add_gradients(
                gradients, grad_gate_up, reduced, normed, context.seed_of(slot), low_rank
            )
            grad_normed = self._gate_up.input_gradient(grad_gate_up, reduced, context.seed_of(slot))
            del grad_gate_up, normed, low_rank
            self._norm_backward(
                grad_normed, x_mid[tile], self._mlp_norm, gradients, grad[tile], out=grad_x[tile]
            )
            del grad_normed
        return grad_x

    def _down_gradient(
        self,
        grad: Tensor,
        output: Tensor | None,
        gate_up: Tensor,
        low_rank: LowRank | None,
        seed: int,
        gradients: Gradients,
    ) -> Tensor:
        """The gradient of down's output [T, h], which is made again if it is normed and was not kept."""
        if self._down_norm is None:
            return grad
        if output is None:
            output = self._down(operations.gate(self._activation, gate_up, low_rank), seed)
        return self._norm_backward(grad, output, self._down_norm, gradients)

    def _projections(self) -> tuple[Projection, ...]:
        return self._qkv, self._o, self._gate_up, self._down


class LayerFunction(torch.autograd.Function):
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


def _weight(norm: nn.Module | None) -> Any:
    return None if norm is None else norm.weight
