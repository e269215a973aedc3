"""The model's forward pass for rollouts, on the trainer's own parameters.

Numerically it follows transformers' modelling code operation by operation (norms in float32, rotary tables
from the model's own module), without padding, without modules and without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colocate.engines.native.attention import PagedAttention
from colocate.engines.native.kv_cache import KVCache
from colocate.weights.adapters import Adapter, active_adapters, base_linear
from colocate.weights.layouts import LayerLayout, Layout
from colocate.weights.shared_views import fused_view

MAX_PREFILL_TOKENS = 8192
"""Tokens packed into one prefill forward; bounds its activations. One longer prompt still goes in one
piece."""


@dataclass(frozen=True)
class Prefill:
    """Tokens to run through the model in one piece: a prompt, or a preempted sequence to recompute."""

    token_ids: Sequence[int]
    """The whole context, from its first token."""
    num_cached: int
    """Leading tokens whose keys and values are already in `pages`."""
    pages: Sequence[int]
    """Pages of the whole context, in order."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - self.num_cached


class Projection:
    """Linear layers that read the same input: one product for all base weights, plus their adapters."""

    def __init__(self, *modules: nn.Module) -> None:
        linears = [base_linear(module) for module in modules]
        self.weight = _joined([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])
        self.adapters: list[tuple[slice, Adapter]] = []
        row = 0
        for module, linear in zip(modules, linears, strict=True):
            rows = slice(row, row + linear.weight.shape[0])
            self.adapters += [(rows, adapter) for adapter in active_adapters(module)]
            row = rows.stop

    def __call__(self, x: Tensor) -> Tensor:
        output = F.linear(x, self.weight, self.bias)
        for rows, adapter in self.adapters:
            adapter.add_to(output[:, rows], x)
        return output


class LayerWeights:
    """One decoder layer's parameters as they are now."""

    def __init__(self, layer: LayerLayout) -> None:
        self.qkv = Projection(layer.q, layer.k, layer.v)
        self.o = Projection(layer.o)
        self.gate_up = Projection(layer.gate, layer.up)
        self.down = Projection(layer.down)
        self.input_norm = _weight(layer.input_norm)
        self.post_attention_norm = _weight(layer.post_attention_norm)
        self.q_norm = None if layer.q_norm is None else _weight(layer.q_norm)
        self.k_norm = None if layer.k_norm is None else _weight(layer.k_norm)
        self.activation = layer.activation
        self.sliding_window = layer.sliding_window


class ModelRunner:
    """Runs prefill and decode steps of one rollout against a KV cache.

    It lives as long as a rollout: weights and adapters are looked up anew for each, and in between nothing
    keeps old storage alive while the trainer moves parameters.
    """

    def __init__(self, layout: Layout, cache: KVCache, max_len: int) -> None:
        self.layout = layout
        self.cache = cache
        self._attention = PagedAttention()
        self._layers = [LayerWeights(layer) for layer in layout.layers]
        self._cos, self._sin = layout.rotary_table(max_len)

    def prefill(self, items: Sequence[Prefill]) -> Tensor:
        """Fill the pages of every item. Returns the logits after each one's last token, [N, V] float32.

        Items are packed in order, so one may read pages that an earlier one fills.
        """
        logits: list[Tensor] = []
        chunk: list[Prefill] = []
        for item in items:
            if chunk and sum(i.num_tokens for i in chunk) + item.num_tokens > MAX_PREFILL_TOKENS:
                logits.append(self._prefill_chunk(chunk))
                chunk = []
            chunk.append(item)
        logits.append(self._prefill_chunk(chunk))
        return torch.cat(logits)

    def decode(
        self, token_ids: Tensor, positions: Tensor, block_tables: Tensor, max_context_len: int
    ) -> Tensor:
        """One step for every sequence.

        Args:
            token_ids: [B], the last token of each sequence.
            positions: [B], its position; earlier ones are in the cache.
            block_tables: [B, pages]; must include the page of the new token.
            max_context_len: max(positions) + 1, known on the host.

        Returns:
            Logits of the next token, [B, V] float32.
        """
        page_size = self.cache.page_size
        page = block_tables.gather(1, (positions // page_size)[:, None])[:, 0]
        context_lens = positions + 1
        scale = self.layout.scaling

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
            return self._attention.decode(
                q, k_cache, v_cache, block_tables, context_lens, max_context_len, scale, window
            )

        hidden = self._forward(token_ids, positions, page * page_size + positions % page_size, attend)
        return self._logits(hidden)

    def _prefill_chunk(self, items: Sequence[Prefill]) -> Tensor:
        device, page_size = self.layout.device, self.cache.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        for item in items:
            new = range(item.num_cached, len(item.token_ids))
            tokens += item.token_ids[item.num_cached :]
            positions += new
            slots += [item.pages[p // page_size] * page_size + p % page_size for p in new]
            last.append(len(tokens) - 1)
        tables = [torch.tensor(item.pages, device=device) for item in items]
        query_lens = [item.num_tokens for item in items]
        context_lens = [len(item.token_ids) for item in items]
        scale = self.layout.scaling

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
            return self._attention.prefill(
                q, k_cache, v_cache, tables, query_lens, context_lens, scale, window
            )

        token_ids, position_ids, slot_ids = torch.tensor([tokens, positions, slots], device=device)
        hidden = self._forward(token_ids, position_ids, slot_ids, attend)
        return self._logits(hidden[torch.tensor(last, device=device)])

    def _forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """Hidden states after the last layer, [T, hidden]; stores the tokens' keys and values."""
        layout = self.layout
        eps, num_heads, num_kv_heads = layout.rms_norm_eps, layout.num_heads, layout.num_kv_heads
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = F.embedding(token_ids, layout.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
            qkv = qkv.view(len(hidden), num_heads + 2 * num_kv_heads, layout.head_dim)
            q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k_cache, v_cache = self.cache.layer(index)
            self._attention.write_kv(k, v, k_cache, v_cache, slots)
            attended = attend(q, k_cache, v_cache, layer.sliding_window)
            hidden = hidden + layer.o(attended.flatten(1))
            gate, up = layer.gate_up(rms_norm(hidden, layer.post_attention_norm, eps)).chunk(2, dim=1)
            hidden = hidden + layer.down(layer.activation(gate) * up)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, _weight(self.layout.norm), self.layout.rms_norm_eps)
        return F.linear(normed, self.layout.lm_head.weight).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32 until the weight is applied."""
    upcast = x.float()
    normed = upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [T, heads, D], whose halves are the two coordinates of each plane."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm.weight, Tensor), f"{type(norm).__name__} has no weight"
    return norm.weight


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else fused_view(parts)
