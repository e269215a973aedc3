"""The model's forward pass for rollouts: without padding and modules, on the trainer's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from colocate.engines.native.batch import DecodeBatch
from colocate.engines.native.context import ContextPiece, DecodeContext, PrefillContext
from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.kv_cache import KVCache
from colocate.engines.native.projections import PartialProjection, Projection
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.scheduler import Prefill
from colocate.engines.native.torch_backend import TorchBackend
from colocate.kernels.definitions import Rotation
from colocate.weights.adapters import ScaledRows
from colocate.weights.layouts import LayerLayout, Layout, RotaryTables, WeightPart

CONTEXT_PER_QUERY = 4
"""Tokens that a prefill's queries see at most for each of `max_prefill_tokens`, unless it reads one sequence.
The keys and values of 4 x 8,192 tokens take 128 MiB a layer at 8 heads of 128 in bfloat16."""


class LayerWeights:
    """One decoder layer's parameters, looked up when this object is made."""

    def __init__(
        self, weights: RolloutWeights, in_8bit: EightBitWeights, layer: LayerLayout, part: WeightPart
    ) -> None:
        qkv, o, gate_up, down = layer.projection_groups()
        self.qkv, self.gate_up = (
            Projection(weights, modules, part, in_8bit.of(modules)) for modules in (qkv, gate_up)
        )
        self.o, self.down = (
            PartialProjection(weights, modules, part, in_8bit.of(modules)) for modules in (o, down)
        )
        self.input_norm, self.attention_output_norm = map(
            _weight, (layer.input_norm, layer.attention_output_norm)
        )
        self.mlp_norm, self.mlp_output_norm = map(_weight, (layer.mlp_norm, layer.mlp_output_norm))
        self.q_norm, self.k_norm = map(_weight, (layer.q_norm, layer.k_norm))
        self.activation = layer.activation
        self.sliding_window = layer.sliding_window
        self.rotary = layer.rotary
        self._norms = [_weight(norm) for norm in layer.norms()]

    def identity(self) -> Iterator[object]:
        """The addresses and shapes that a captured graph of this layer depends on."""
        for projection in (self.qkv, self.o, self.gate_up, self.down):
            yield from projection.identity()
        for norm in self._norms:
            yield None if norm is None else norm.data_ptr()


class ModelRunner:
    """Runs prefill and decode steps against a KV cache, with the weights and adapters that it was made with.

    A runner sees updates in place. When a parameter is re-assigned or an adapter is switched, a new runner is
    needed, whose `identity` differs from the old one's.

    Args:
        rotary_tables: cos and sin of the rotary angles, each [positions, D].
        in_8bit: the weights for products in 8 bits; it may have none.
    """

    def __init__(
        self,
        layout: Layout,
        weights: RolloutWeights,
        cache: KVCache,
        backend: TorchBackend,
        rotary_tables: RotaryTables,
        in_8bit: EightBitWeights,
    ) -> None:
        self.layout = layout
        self.cache = cache
        self.backend = backend
        self._layers = [LayerWeights(weights, in_8bit, layer, layout.part) for layer in layout.layers]
        norm = _weight(layout.norm)
        assert norm is not None, "the last norm has a weight"
        self._norm = norm
        self._offset = layout.norm_offset
        self.rotary_tables = rotary_tables

    def identity(self) -> tuple[object, ...]:
        """Equal for two runners if a graph captured with one serves the other."""
        shared = (
            self.layout.embed_tokens.weight,
            self.layout.lm_head.weight,
            self._norm,
            *(cos for cos, _ in self.rotary_tables.values()),
            self.cache.scratch,
        )
        layers = (part for layer in self._layers for part in layer.identity())
        return (*(tensor.data_ptr() for tensor in shared), *layers)

    def with_few_layers(self) -> ModelRunner:
        """This runner with one layer for each width of window: it launches the kernels that all layers
        launch."""
        few = copy.copy(self)
        few._layers = list({layer.sliding_window: layer for layer in self._layers}.values())
        return few

    @property
    def head(self) -> Tensor:
        """The weight of the output head, [V, hidden]; this rank's rows, where ranks split the weights."""
        return self.layout.lm_head.weight

    def prefill(self, items: Sequence[Prefill]) -> Tensor:
        """Compute keys and values of every item's tokens, and store them in its pages.

        Items are packed in order, so an item may read pages that an earlier item fills.

        Returns:
            The logits after the last token of each item, [items, V] float32; this rank's columns.

        Raises:
            torch.OutOfMemoryError: memory ran out, here or on a rank that decodes together with this one.
        """
        logits = [self._prefill(pieces) for pieces in packs(items, self.backend.max_prefill_tokens)]
        return torch.cat(logits)

    def decode(self, batch: DecodeBatch, num_rows: int, *, max_context_len: int) -> Tensor:
        """Feed the last tokens of rows 0 .. num_rows - 1 to the model, the longest with `max_context_len`
        tokens, and return the normed hidden states that the head reads, [num_rows, hidden]."""
        rows = slice(0, num_rows)
        self.backend.begin_step(batch, rows, self.cache.page_size)
        context = DecodeContext(batch, num_rows, max_context_len)

        def attend(
            qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, window: int | None
        ) -> Tensor:
            scale = self.layout.scaling
            return self.backend.decode_attention(qkv, rotation, k_cache, v_cache, context, scale, window)

        return self._normed(*self._forward(batch.last_tokens[rows], attend, in_parts=True))

    def _prefill(self, pieces: Sequence[ContextPiece]) -> Tensor:
        context = PrefillContext(pieces, self.cache.page_size, self.layout.device)

        def attend(
            qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, window: int | None
        ) -> Tensor:
            scale = self.layout.scaling
            return self.backend.prefill_attention(qkv, rotation, k_cache, v_cache, context, scale, window)

        parallel = self.backend.parallel
        x, residual = self._forward(context.tokens[0], attend, in_parts=False)
        assert isinstance(x, Tensor), "its rows were to be whole"
        logits = parallel.attempt(partial(self._last_logits, context.last_tokens, x, residual), x)
        parallel.least(0)  # raises if memory ran out on a rank
        return logits

    def _forward(
        self, token_ids: Tensor, attend: Callable[..., Tensor], *, in_parts: bool
    ) -> tuple[Tensor | ScaledRows, Tensor]:
        """Run all decoder layers over token ids [T].

        A layer's output is normed, if the layer says so, and added to the residual by the norm that follows,
        so that one kernel does all: the last sum is left to the caller.

        Args:
            attend: rotates q and k of a layer's packed q, k, v [T, H + 2 K, D], stores keys and values in the
                cache, and returns the attended values [T, H, D].
            in_parts: products whose reader can finish them may leave it to the reader, `attend` included
                (`TorchBackend.linear_in_parts`, `linear_for_norm`).

        Returns:
            The last layer's output, [T, hidden] or unfinished, and the residual to add it to, [T, hidden].
        """
        parallel = self.backend.parallel
        embedded = parallel.embed(token_ids, self.layout.embed_tokens.weight)
        x: Tensor | ScaledRows = multiplied(embedded, self.layout.embedding_multiplier)
        residual: Tensor | None = None
        for index in range(len(self._layers)):
            for block in (
                partial(self._attention, index, attend, in_parts),
                partial(self._mlp, index, in_parts),
            ):
                like = x if isinstance(x, Tensor) else x.values
                instead: tuple[Tensor | ScaledRows, Tensor] = like, like
                x, residual = parallel.attempt(partial(block, x, residual), instead)
                if isinstance(x, Tensor):  # the rows that are not are whole
                    x = parallel.sum(x)
        assert residual is not None, "the model has no layers"
        return x, residual

    def _attention(
        self,
        index: int,
        attend: Callable[..., Tensor],
        in_parts: bool,
        x: Tensor | ScaledRows,
        residual: Tensor | None,
    ) -> tuple[Tensor | ScaledRows, Tensor]:
        """The attention block of a layer without its sum over ranks: its output and the residual."""
        layer, backend, eps = self._layers[index], self.backend, self.layout.rms_norm_eps
        x, residual = backend.add_rms_norm(
            x,
            residual,
            layer.input_norm,
            eps,
            self._offset,
            layer.qkv.input_factor,
            self._layers[index - 1].mlp_output_norm if index > 0 else None,
        )
        norms_whole = self.layout.norms_whole_qk
        qkv = layer.qkv(backend, x, in_parts=in_parts and not norms_whole)
        if norms_whole:
            self._norm_queries_and_keys(qkv, layer)
        qkv = qkv.unflatten(-1, (-1, self.layout.head_dim))
        norms = (None, None) if norms_whole else (layer.q_norm, layer.k_norm)
        rotation = Rotation(
            *self.rotary_tables[layer.rotary],
            *norms,
            eps,
            self._offset,
            self.layout.pair_distance,
            self.layout.norms_last,
        )
        attended = attend(qkv, rotation, *self.cache.layer(index), layer.sliding_window)
        output = layer.o.for_norm(backend, attended.flatten(1), in_parts=in_parts)
        return multiplied(output, self.layout.residual_multiplier), residual

    def _norm_queries_and_keys(self, qkv: Tensor, layer: LayerWeights) -> None:
        """Norm the queries and keys of qkv [T, (H + 2 K) D] in place, all heads of a token together."""
        start = 0
        for norm in (layer.q_norm, layer.k_norm):
            assert norm is not None, "a model that norms all heads has weights for it"
            heads = qkv[:, start : start + len(norm)]
            self.backend.norm_in_place(heads, norm, self.layout.rms_norm_eps, self._offset)
            start += len(norm)

    def _mlp(
        self, index: int, in_parts: bool, x: Tensor | ScaledRows, residual: Tensor | None
    ) -> tuple[Tensor | ScaledRows, Tensor]:
        """The MLP of a layer without its sum over ranks: its output and the residual."""
        layer, backend, eps = self._layers[index], self.backend, self.layout.rms_norm_eps
        x, residual = backend.add_rms_norm(
            x,
            residual,
            layer.mlp_norm,
            eps,
            self._offset,
            layer.gate_up.input_factor,
            layer.attention_output_norm,
        )
        in_8bit = layer.down.takes_8bit
        gated = layer.gate_up.gated(backend, layer.activation, x, in_8bit=in_8bit)
        output = layer.down.for_norm(backend, gated, in_parts=in_parts)
        return multiplied(output, self.layout.residual_multiplier), residual

    def _last_logits(self, last: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """The logits [items, V] at the tokens `last` [items] of T."""
        return self.backend.logits(self._normed(x[last], residual[last]), self.head)

    def _normed(self, x: Tensor | ScaledRows, residual: Tensor) -> Tensor:
        # The logits' factor is taken here, so that products and draws of every kind have it.
        eps, of_output = self.layout.rms_norm_eps, self._layers[-1].mlp_output_norm
        normed, _ = self.backend.add_rms_norm(x, residual, self._norm, eps, self._offset, None, of_output)
        return multiplied(normed, self.layout.logits_multiplier)


def packs(items: Sequence[Prefill], max_tokens: int) -> Iterator[list[ContextPiece]]:
    """The uncached tokens of the items, in order, in packs of up to `max_tokens`.

    If a pack has several pieces, the tokens that its queries see are also bounded, because a GPU gathers
    their keys and values. Turns of long episodes add few tokens each and see many.
    """
    pack: list[ContextPiece] = []
    room, sight = max_tokens, CONTEXT_PER_QUERY * max_tokens
    for item in items:
        start = item.num_cached
        while start < len(item.token_ids):
            stop = min(len(item.token_ids), start + room)
            if pack and (room == 0 or stop > sight):
                yield pack
                pack, room, sight = [], max_tokens, CONTEXT_PER_QUERY * max_tokens
                stop = min(len(item.token_ids), start + room)
            pack.append(ContextPiece(item, start, stop))
            room, sight = room - (stop - start), sight - stop
            start = stop
    yield pack


Rows = TypeVar("Rows", bound=Tensor | ScaledRows)


def multiplied(x: Rows, factor: float) -> Rows:
    """`x` times a factor of the model's configuration, in place."""
    if factor != 1.0:
        (x.values if isinstance(x, ScaledRows) else x).mul_(factor)
    return x


def _weight(norm: nn.Module | None) -> Tensor | None:
    if norm is None:
        return None
    assert isinstance(norm.weight, Tensor), f"{type(norm).__name__} has no weight"
    return norm.weight
