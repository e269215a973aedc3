"""The operations of a forward pass and of a decode step in plain PyTorch, for any device.

They are also what the kernels are measured against. Numerically they follow transformers' modelling code
operation by operation: norms in float32, rotary tables from the model's own module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from colocate.engines.native.attention import PagedAttention
from colocate.engines.native.batch import DecodeBatch
from colocate.engines.native.context import DecodeContext, PrefillContext
from colocate.engines.native.sampler import Sampler
from colocate.kernels import definitions
from colocate.kernels.definitions import Rotation
from colocate.weights.adapters import AdaptedLinear
from colocate.weights.layouts import Layout
from colocate.weights.low_rank import LowRank


class TorchBackend:
    """Operations on tensors; what `TritonBackend` does in kernels.

    Shapes: T tokens, B rows, H query heads, K key-value heads, D head size, I width of the MLP, V vocabulary.
    """

    steps_per_look = 1
    """Decode steps between two looks at the host. A look costs nothing where the host does the work."""
    windows_in_flight = 0
    """Windows of steps whose tokens the host has not read while it prepares the next one."""
    captures_graphs = False
    stacks_adapters = False
    """Whether `linear` gains by adapters whose A lie below the weights."""
    shares_prefixes = False
    """Whether attention now reads the pages that rows have in common once for all of them."""
    max_prefill_tokens = 8192

    def __init__(self) -> None:
        self._attention = PagedAttention()

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError if these operations cannot work with such pages."""

    def tell_fallbacks(self, layout: Layout) -> None:
        """Log which operations take slower ways with this model than kernels of theirs."""

    def scratch_bytes(self, layout: Layout, capacity: int) -> int:
        """Memory that decode steps of up to `capacity` rows need beside the KV cache."""
        return 0

    def bind(self, scratch: Tensor, layout: Layout, capacity: int, page_size: int) -> Tensor | None:
        """Lay out `scratch` [scratch_bytes] uint8. Returns room in it for logits, [capacity, V] float32."""
        return None

    def share_prefixes(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> None:
        """Take note of the rows of each prompt and how many leading pages they have in common."""

    def linear(self, x: Tensor, adapted: AdaptedLinear) -> Tensor:
        """The product of x [T, in] with weights and their adapters, each in its columns; [T, out]."""
        weight, bias = adapted.weight, adapted.bias
        if adapted.stack is not None:
            weight = weight[: -adapted.stack.num_rows]
            bias = None if bias is None else bias[: -adapted.stack.num_rows]
        output = F.linear(x, weight, bias)
        for columns, adapter in adapted.adapters:
            adapter.add_to(output[:, columns], x)
        return output

    def linear_apart(self, x: Tensor, adapted: AdaptedLinear) -> tuple[Tensor, LowRank | None]:
        """`linear` in two terms, for a reader that adds them up; or all of it, and None."""
        return self.linear(x, adapted), None

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum; both [T, hidden]. Without a residual the sum is x."""
        if residual is not None:
            x = x + residual
        return definitions.rms_norm(x, weight, eps, offset), x

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """Norm (if there is one) and rotate queries and keys in place, and store keys and values.

        Args:
            qkv: [T, H + 2 K, D].
            positions: [T].
            slots: [T], page * page_size + offset in the page; negative: not stored.
            k_cache, v_cache: [num_pages, K, page_size, D].
        """
        num_kv_heads = k_cache.shape[1]
        q, k, v = qkv.split([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        where = positions.long()
        cos, sin, eps, offset = rotation.cos[where], rotation.sin[where], rotation.eps, rotation.offset
        for heads, norm in ((q, rotation.q_norm), (k, rotation.k_norm)):
            heads.copy_(definitions.norm_and_rotate(heads, norm, cos, sin, eps, offset))
        self._attention.write_kv(k, v, k_cache, v_cache, slots.long())

    def gate(
        self, activation: Callable[[Tensor], Tensor], gate_up: Tensor, low_rank: LowRank | None = None
    ) -> Tensor:
        """activation(gate) * up of [T, 2 I] (+ low_rank, two blocks); returns [T, I]."""
        return definitions.gate(activation, gate_up, low_rank)

    def gated_linear(
        self, activation: Callable[[Tensor], Tensor], x: Tensor, adapted: AdaptedLinear
    ) -> Tensor:
        """`gate` of the product of x [T, in] with weights [2 I, in] and their adapters; [T, I]."""
        return self.gate(activation, *self.linear_apart(x, adapted))

    def prefill_attention(
        self, qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, context: PrefillContext,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """Rotate and store packed tokens `qkv` [T, H + 2 K, D]; causal attention of theirs, [T, H, D].

        `qkv` may be overwritten.
        """
        _, positions, slots = context.tokens
        self.rotate_and_store(qkv, rotation, positions, slots, k_cache, v_cache)
        num_heads = qkv.shape[1] - 2 * k_cache.shape[1]
        return self._attention.prefill(
            qkv[:, :num_heads], k_cache, v_cache, context.block_tables, context.query_lens,
            context.context_lens, scale, window,
        )  # fmt: skip

    def decode_attention(
        self, qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, context: DecodeContext,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """Rotate and store one token per row, `qkv` [B, H + 2 K, D]; attention of theirs, [B, H, D].

        `qkv` may be overwritten.
        """
        self.rotate_and_store(qkv, rotation, context.positions, context.slots, k_cache, v_cache)
        num_heads = qkv.shape[1] - 2 * k_cache.shape[1]
        return self._attention.decode(
            qkv[:, :num_heads], k_cache, v_cache, context.block_tables.long(), context.context_lens.long(),
            context.max_context_len, scale, window,
        )  # fmt: skip

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [T, hidden] times weight [V, hidden] transposed, [T, V] float32; in `out` if given."""
        logits = F.linear(hidden, weight).float()
        return logits if out is None else out.copy_(logits)

    def draw(
        self,
        hidden: Tensor,
        head: Tensor,
        sampler: Sampler,
        batch: DecodeBatch,
        rows: slice,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`sample` from the `logits` of hidden [B, hidden], in `out` if given."""
        return self.sample(self.logits(hidden, head, out), sampler, batch, rows)

    def begin_step(self, batch: DecodeBatch, rows: slice, page_size: int) -> None:
        """Begin the next of the window's steps: where new keys and values go, how long contexts become."""
        positions = batch.positions[rows].long()
        page = batch.block_tables[rows].gather(1, (positions // page_size)[:, None])[:, 0]
        is_dead = batch.finished[rows] != 0
        batch.step += 1
        batch.slots[rows] = (page * page_size + positions % page_size).masked_fill(is_dead, -1).int()
        batch.context_lens[rows] = (positions + 1).masked_fill(is_dead, 0).int()

    def sample(
        self, logits: Tensor, sampler: Sampler, batch: DecodeBatch, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """Draw a token for each of `rows`: tokens [B] and their log-probabilities [B] float32."""
        return sampler(
            logits,
            batch.prompt_keys[rows],
            batch.samples[rows].long(),
            batch.num_generated[rows].long(),
            None if batch.seen is None else batch.seen[rows],
        )

    def end_step(
        self,
        batch: DecodeBatch,
        rows: slice,
        token_ids: Tensor,
        logprobs: Tensor,
        stop_token_ids: Tensor,
    ) -> None:
        """Record the tokens drawn, and finish the rows that drew a stop token or reached their limit."""
        is_live = batch.finished[rows] == 0
        token_ids, step = token_ids.int(), int(batch.step)
        batch.out_token_ids[step, rows] = token_ids.masked_fill(~is_live, -1)
        batch.out_logprobs[step, rows] = logprobs
        batch.last_tokens[rows] = torch.where(is_live, token_ids, batch.last_tokens[rows])
        batch.positions[rows] += is_live
        batch.num_generated[rows] += is_live
        is_last = batch.num_generated[rows] >= batch.limits[rows]
        if len(stop_token_ids):
            is_last |= torch.isin(token_ids, stop_token_ids)
        batch.finished[rows] |= is_last
