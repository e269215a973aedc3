"""The operations of a forward pass and of a decode step in plain PyTorch, for any device.

Tests compare the kernels with these operations. The operations follow transformers' modelling code one by
one, also numerically: norms in float32, rotary tables from the model's own module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from colocate.engines.native.attention import PagedAttention
from colocate.engines.native.batch import DecodeBatch
from colocate.engines.native.context import DecodeContext, PrefillContext
from colocate.engines.native.options import ROLLOUT_PRECISIONS
from colocate.engines.native.sampler import Sampler, choose
from colocate.engines.native.tensor_parallel import ONE_RANK, OneRank
from colocate.kernels import definitions
from colocate.kernels.definitions import Rotation
from colocate.kernels.fp8 import e4m3
from colocate.weights.adapters import AdaptedLinear, EightBitWeight, ScaledRows
from colocate.weights.layouts import Layout
from colocate.weights.low_rank import LowRank


class TorchBackend:
    """Operations on tensors, which `TritonBackend` replaces by kernels.

    Letters in shapes: T tokens, B rows, H query heads, K key-value heads, D head size, I width of the MLP, V
    vocabulary. Where ranks split the weights, H, K, I and V are this rank's.
    """

    steps_per_look = 1
    """Decode steps until the host reads their tokens; on a CPU one, because reading costs nothing there."""
    windows_in_flight = 0
    """Windows of steps whose tokens the host has not read yet when it prepares the next window."""
    captures_graphs = False
    """Whether decode steps are captured in CUDA graphs."""
    stacks_adapters = False
    """Whether `linear` is faster with the adapters' A stored one below the other, in the weights' type."""
    shares_prefixes = False
    """Whether decode attention now reads pages that several rows share once for all of them."""
    max_prefill_tokens = 8192
    """Tokens of a prefill's forward pass at most."""

    def __init__(self) -> None:
        self.parallel: OneRank = ONE_RANK
        """The ranks that split the weights, if any do."""
        self._attention = PagedAttention()

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError if these operations cannot work with pages of `page_size` tokens."""

    def check_precision(self, rollout_precision: str, layout: Layout) -> None:
        """Raises ValueError if these operations cannot compute in this precision with this model."""
        if rollout_precision not in ROLLOUT_PRECISIONS:
            known = ", ".join(ROLLOUT_PRECISIONS)
            raise ValueError(f"rollout_precision={rollout_precision!r} is unknown; it is one of {known}.")

    def tell_fallbacks(self, layout: Layout) -> None:
        """Log which operations have no kernel for this model and take a slower way."""

    def scratch_bytes(self, layout: Layout, capacity: int) -> int:
        """Bytes of buffers that decode steps of up to `capacity` rows need, apart from the KV cache."""
        return 0

    def bind(self, scratch: Tensor, layout: Layout, capacity: int, page_size: int) -> Tensor | None:
        """Divide `scratch` [scratch_bytes] uint8 into buffers for steps of up to `capacity` rows.

        Returns:
            The buffer for logits, [capacity, V] float32; None: logits need no fixed place.
        """
        return None

    def share_prefixes(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> None:
        """Note each running prompt's rows, and how many leading pages these rows have in common."""

    def would_share(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> bool:
        """Whether steps of these groups would read shared pages once for several rows."""
        return False

    def linear(self, x: Tensor | ScaledRows, adapted: AdaptedLinear, out: Tensor | None = None) -> Tensor:
        """x [T, in] times the weights, plus the bias and each adapter's product in its columns; [T, out].

        It is written to `out` if that is given. In 8 bits `x` may be rounded already, by `add_rms_norm`.
        """
        weight, bias = adapted.weight, adapted.bias
        if adapted.in_8bit is not None:
            output = self.product_8bit(x, adapted.in_8bit, bias, out)
            for columns, adapter in adapted.adapters:
                assert isinstance(x, Tensor), "adapters read the input in the model's type"
                adapter.add_to(output[:, columns], x)
            return output
        assert isinstance(x, Tensor), "weights in the model's type are multiplied in it"
        if num_below := adapted.num_rows_below:
            weight = weight[:-num_below]
            bias = None if bias is None else bias[:-num_below]
        output = product(x, weight, bias, out)
        for columns, adapter in adapted.adapters:
            adapter.add_to(output[:, columns], x)
        return output

    def product_8bit(
        self, x: Tensor | ScaledRows, weight: EightBitWeight, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """x [T, in] times a weight in 8 bits, plus the bias; [T, out]. It rounds x to 8 bits if it is not."""
        rows = self.rounded(x, weight)
        output = F.linear(rows.values.float(), weight.values.float()) * (weight.input_factor * weight.factor)
        if weight.by_row:
            output *= rows.factors[:, None]
        if bias is not None:
            output += bias
        return output.to(weight.dtype) if out is None else out.copy_(output)

    def rounded(self, x: Tensor | ScaledRows, weight: EightBitWeight) -> ScaledRows:
        """x [T, in] in 8 bits, as the weight wants it; without `by_row` the rows' factors are not used."""
        if isinstance(x, ScaledRows):
            return x
        if weight.by_row:
            values, exponents = e4m3.quantize(x)
            return ScaledRows(values, e4m3.factors(exponents))
        values = x if e4m3.is_8bit(x) else (x.float() / weight.input_factor).to(e4m3.DTYPE)
        return ScaledRows(values, weight.input_factor.expand(len(x)))

    def linear_in_two_terms(self, x: Tensor, adapted: AdaptedLinear) -> tuple[Tensor, LowRank | None]:
        """`linear` as a sum of two terms, the second of low rank and not multiplied out, or whole, and None.

        A kernel that reads the first term next can add the second as it does so, which saves a pass over
        memory.
        """
        return self.linear(x, adapted), None

    def linear_in_parts(self, x: Tensor | ScaledRows, adapted: AdaptedLinear) -> Tensor:
        """`linear`, or [parts, T, out] float32, which `add_rms_norm` and `decode_attention` add up."""
        return self.linear(x, adapted)

    def linear_for_norm(self, x: ScaledRows, adapted: AdaptedLinear) -> Tensor | ScaledRows:
        """`linear` of rows that are yet to be multiplied, which may be left to `add_rms_norm`."""
        return self.linear(x, adapted)

    def add_rms_norm(
        self,
        x: Tensor | ScaledRows,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float | None = None,
        factor: Tensor | None = None,
        output_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The RMS norm of x + residual, and x + residual itself, both [T, hidden]; None counts as 0.

        `x` may be in parts (`linear_in_parts`), and with an `output_weight` it is normed with that before it
        is added. Without a `weight` the sum is not normed. With a `factor` the norm is divided by it and
        rounded to e4m3.
        """
        assert isinstance(x, Tensor), "these operations multiply rows by their factors at once"
        if output_weight is not None:
            x = definitions.rms_norm(x, output_weight, eps, offset)
        if residual is not None:
            x = x + residual
        if weight is None:
            return x, x
        normed = definitions.rms_norm(x, weight, eps, offset)
        return normed if factor is None else (normed.float() / factor).to(e4m3.DTYPE), x

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float, offset: float | None) -> None:
        """Replace the rows of x [T, n], which may be any distance apart, by their RMS norm."""
        x.copy_(definitions.rms_norm(x, weight, eps, offset))

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """Norm queries and keys if the model does, rotate them in place, and store keys and values.

        Args:
            qkv: [T, H + 2 K, D], the heads of queries, then keys, then values.
            rotation: tables of cosines and sines, and the weights of the norms of queries and keys.
            positions: [T].
            slots: [T], page * page_size + offset in the page; a negative slot is not stored.
            k_cache, v_cache: [num_pages, K, page_size, D] in the type of `qkv`, or bytes with scales behind
                each head's numbers (`kernels.fp8.int8`).
        """
        num_kv_heads = k_cache.shape[1]
        q, k, v = qkv.split([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        where = positions.long()
        cos, sin = rotation.cos[where], rotation.sin[where]
        constants = rotation.eps, rotation.offset, rotation.pair_distance, rotation.norms_last
        for heads, norm in ((q, rotation.q_norm), (k, rotation.k_norm)):
            heads.copy_(definitions.norm_and_rotate(heads, norm, cos, sin, *constants))
        self._attention.write_kv(k, v, k_cache, v_cache, slots.long())

    def gate(
        self, activation: Callable[[Tensor], Tensor], gate_up: Tensor, low_rank: LowRank | None = None
    ) -> Tensor:
        """activation(gate) * up, [T, I]: gate_up [T, 2 I] has gate's columns first, then up's.

        `low_rank`, with a block for each of the two, is added to `gate_up` before.
        """
        return definitions.gate(activation, gate_up, low_rank)

    def gated_linear(
        self,
        activation: Callable[[Tensor], Tensor],
        x: Tensor,
        adapted: AdaptedLinear,
        *,
        in_8bit: bool = False,
    ) -> Tensor | ScaledRows:
        """`gate` of `linear` of x [T, in] with weights [2 I, in]; [T, I], with `in_8bit` it may be in 8."""
        return self.gate(activation, *self.linear_in_two_terms(x, adapted))

    def prefill_attention(
        self, qkv: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, context: PrefillContext,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        """`rotate_and_store` packed tokens `qkv` [T, H + 2 K, D], then causal attention of their queries.

        Returns:
            Attended values, [T, H, D]. `qkv` may be overwritten.
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
        """`rotate_and_store` one token per row, `qkv` [B, H + 2 K, D], then attention of its query.

        `qkv` may be in parts (`linear_in_parts`).

        Returns:
            Attended values, [B, H, D]. `qkv` may be overwritten.
        """
        self.rotate_and_store(qkv, rotation, context.positions, context.slots, k_cache, v_cache)
        num_heads = qkv.shape[1] - 2 * k_cache.shape[1]
        return self._attention.decode(
            qkv[:, :num_heads], k_cache, v_cache, context.block_tables.long(), context.context_lens.long(),
            context.max_context_len, scale, window,
        )  # fmt: skip

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [T, V] float32 of hidden states [T, hidden] with the head's weight [V, hidden].

        They are written to `out` if it is given.
        """
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
        """`sample` from the `logits` of hidden states [B, hidden], which are written to `out` if given."""
        return self.sample(self.logits(hidden, head, out), sampler, batch, rows)

    def begin_step(self, batch: DecodeBatch, rows: slice, page_size: int) -> None:
        """Begin the window's next step: set `slots` and `context_lens` of the rows for their new tokens.

        Rows that have finished get slot -1, which stores nothing, and length 0.
        """
        positions = batch.positions[rows].long()
        page = batch.block_tables[rows].gather(1, (positions // page_size)[:, None])[:, 0]
        is_dead = batch.finished[rows] != 0
        batch.step += 1
        batch.slots[rows] = (page * page_size + positions % page_size).masked_fill(is_dead, -1).int()
        batch.context_lens[rows] = (positions + 1).masked_fill(is_dead, 0).int()

    def sample(
        self, logits: Tensor, sampler: Sampler, batch: DecodeBatch, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """Draw a token for each of `rows` from logits [B, V]: tokens [B], log-probabilities [B] float32.

        Where ranks split the vocabulary, they exchange candidates, or all logits if the draw filters them.
        """
        keys = batch.prompt_keys[rows], batch.samples[rows].long(), batch.num_generated[rows].long()
        if self.parallel.num_parts > 1 and sampler.is_plain:
            candidates = sampler.candidates(logits, *keys, part=self.parallel.part)
            return choose(self.parallel.gather(candidates))
        seen = None if batch.seen is None else batch.seen[rows]
        return sampler(self.parallel.whole_vocabulary(logits), *keys, seen)

    def end_step(
        self,
        batch: DecodeBatch,
        rows: slice,
        token_ids: Tensor,
        logprobs: Tensor,
        stop_token_ids: Tensor,
    ) -> None:
        """Record the tokens [B] and log-probabilities [B] of a step, and finish rows that are complete.

        A row is complete when it has drawn a stop token or reached its limit.
        """
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


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """`F.linear`, whose result [T, out] is written to `out` if that is given."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
