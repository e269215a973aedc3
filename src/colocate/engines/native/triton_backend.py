"""The operations of a forward pass and of a decode step as Triton kernels, captured in CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from colocate.engines.native.attention import tokens_at
from colocate.engines.native.batch import DecodeBatch
from colocate.engines.native.context import DecodeContext, PrefillContext
from colocate.engines.native.eight_bit_weights import SIDE, check_gpu
from colocate.engines.native.sampler import Sampler
from colocate.engines.native.torch_backend import TorchBackend, product
from colocate.kernels.checks import fallbacks, kernel_check
from colocate.kernels.checks.fallbacks import is_tested
from colocate.kernels.decode import sampling, steps
from colocate.kernels.decode.attention import DecodeScratch, decode_attention, num_splits_for
from colocate.kernels.decode.prefixes import SharedPrefixes
from colocate.kernels.definitions import Rotation, has_gate_kernels, is_silu, is_tanh_gelu
from colocate.kernels.fp8 import e4m3, quantize
from colocate.kernels.layer import norms, rotary
from colocate.kernels.matmul import gate, lora
from colocate.weights.adapters import AdaptedLinear, AdapterStack, EightBitWeight, ScaledRows
from colocate.weights.layouts import Layout
from colocate.weights.low_rank import MAX_RANK, LowRank

_GROUPED_QUERIES: dict[str, Any] = {}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # from torch 2.12 on; 2.11 always groups
    _GROUPED_QUERIES["enable_gqa"] = True


class TritonBackend(TorchBackend):
    """The operations of `TorchBackend` in kernels; that class gives the shapes."""

    steps_per_look = 8
    """Steps per window: with 8 the host works while the device does; finished rows idle for 8 to 15 steps."""
    windows_in_flight = 1
    captures_graphs = True
    stacks_adapters = True

    def __init__(self) -> None:
        super().__init__()
        self.shares_prefixes = False
        self.broken: Collection[str] = ()
        """Modules of fast kernels that an untested Triton has broken: other kernels do their work."""
        self._prefixes: SharedPrefixes | None = None
        self._scratch: DecodeScratch | None = None

    def check_page_size(self, page_size: int) -> None:
        if page_size < 16 or page_size & (page_size - 1):
            raise ValueError(
                f"page_size={page_size}: on a GPU a page is a power of two from 16 on. Leave it at "
                "None for 64."
            )

    def check_precision(self, rollout_precision: str, layout: Layout) -> None:
        super().check_precision(rollout_precision, layout)
        device = layout.device
        if rollout_precision == "bf16" or device.type != "cuda":
            return
        gpu = f"{device}, {torch.cuda.get_device_name(device)},"
        check_gpu(rollout_precision, layout, torch.cuda.get_device_capability(device), gpu)
        if rollout_precision == "fp8":
            fallbacks.tell(fallbacks.of_products_8bit(layout.dtype))

    def tell_fallbacks(self, layout: Layout) -> None:
        if layout.device.type != "cuda":  # but Triton's interpreter
            return
        model = layout.dtype, layout.head_dim, layout.layers[0].activation
        capability = torch.cuda.get_device_capability(layout.device)
        fallbacks.tell(fallbacks.of_rollout(*model, capability))
        tried = None
        if fallbacks.why_not_fast_products(capability, layout.dtype) is None:
            tried = self._try_kernels(layout)
        fallbacks.tell(fallbacks.of_versions(torch.__version__, triton.__version__, tried))

    def _try_kernels(self, layout: Layout) -> kernel_check.CheckOutcome | None:
        """Do without the kernels that a Triton which they were never tested with has broken."""
        if is_tested("Triton", triton.__version__):
            return None
        index = layout.device.index
        tried = kernel_check.outcome(torch.cuda.current_device() if index is None else index, layout.dtype)
        self.broken = tried.failures.keys()
        return tried

    def scratch_bytes(self, layout: Layout, capacity: int) -> int:
        partials_bytes = DecodeScratch.num_bytes(**_sizes(layout, capacity))
        return _aligned(capacity * layout.local_vocab_size * 4) + _aligned(partials_bytes)

    def bind(self, scratch: Tensor, layout: Layout, capacity: int, page_size: int) -> Tensor:
        logits_bytes = capacity * layout.local_vocab_size * 4
        self._scratch = DecodeScratch(scratch[_aligned(logits_bytes) :], **_sizes(layout, capacity))
        self._prefixes = SharedPrefixes(
            max_num_seqs=capacity,
            num_heads=layout.num_local_heads,
            num_kv_heads=layout.num_local_kv_heads,
            page_size=page_size,
            device=layout.device,
        )
        self.shares_prefixes = False
        return scratch[:logits_bytes].view(torch.float32).view(capacity, layout.local_vocab_size)

    def share_prefixes(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> None:
        assert self._prefixes is not None, "the backend is not bound to a decoder"
        self.shares_prefixes = self._prefixes.update(rows_by_group) > 0

    def would_share(self, rows_by_group: Sequence[tuple[Sequence[int], int]]) -> bool:
        assert self._prefixes is not None, "the backend is not bound to a decoder"
        return self._prefixes.would_share(rows_by_group)

    def linear(self, x: Tensor | ScaledRows, adapted: AdaptedLinear, out: Tensor | None = None) -> Tensor:
        stack = adapted.stack
        if stack is None or isinstance(x, ScaledRows) or len(x) > lora.MAX_ROWS:
            return super().linear(x, adapted, out)
        output, reduced = self._products(x, adapted, stack, out)
        lora.expand(output, reduced, stack)
        return output

    def _products(
        self, x: Tensor, adapted: AdaptedLinear, stack: AdapterStack, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """W x [T, out], written to `out` if that is given, and the adapters' A x [T, the stack's rows]."""
        if adapted.in_8bit is not None:
            assert adapted.stacked_a is not None, "there are no rows below weights in 8 bits"
            output = self.product_8bit(x, adapted.in_8bit, adapted.bias, out)
            return output, F.linear(x, adapted.stacked_a)
        if adapted.stacked_a is not None:
            return product(x, adapted.weight, adapted.bias, out), F.linear(x, adapted.stacked_a)
        assert out is None, "weights with adapters below them are whole, and their products are not summed"
        both = F.linear(x, adapted.weight, adapted.bias)
        return both[:, : -stack.num_rows], both[:, -stack.num_rows :]

    def product_8bit(
        self, x: Tensor | ScaledRows, weight: EightBitWeight, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        rows = self.rounded(x, weight)
        # In Triton's interpreter, and for models in float32, which are for comparisons: with a result in
        # float32 cuBLAS has refused products, and a rounded one would differ from the reference.
        if not rows.values.is_cuda or weight.dtype == torch.float32:
            return super().product_8bit(rows, weight, bias, out)
        output = self._scaled_product(rows, weight, None if weight.by_row else bias)
        if weight.by_row:
            output = (output * rows.factors[:, None]).to(weight.dtype)
            output = output if bias is None else output + bias
        return output if out is None else out.copy_(output)

    def _scaled_product(self, rows: ScaledRows, weight: EightBitWeight, bias: Tensor | None) -> Tensor:
        """The product without the rows' factors; cuBLAS takes up to 1.5 times as long with them."""
        # Before its factor a row's sum may be larger than what float16 can hold.
        is_wide = weight.by_row and weight.dtype == torch.float16
        output = torch._scaled_mm(
            _filled_up(rows.values),
            weight.values.t(),
            weight.input_factor,
            weight.factor,
            bias=bias,
            out_dtype=torch.float32 if is_wide else weight.dtype,
            use_fast_accum=False,  # which sums in fewer bits for 1 to 6 % of the time
        )
        return output[: len(rows.values)]

    def linear_for_norm(self, x: ScaledRows, adapted: AdaptedLinear) -> Tensor | ScaledRows:
        weight = adapted.in_8bit
        assert weight is not None and not adapted.adapters, "a product with nothing but weights in 8 bits"
        if adapted.bias is not None or not x.values.is_cuda or weight.dtype == torch.float32:
            return super().linear_for_norm(x, adapted)
        return ScaledRows(self._scaled_product(x, weight, None), x.factors)

    def rounded(self, x: Tensor | ScaledRows, weight: EightBitWeight) -> ScaledRows:
        if isinstance(x, Tensor) and weight.by_row:
            return ScaledRows(*quantize.rows(x))
        if isinstance(x, Tensor) and not e4m3.is_8bit(x):
            x = quantize.scaled(x.contiguous(), weight.input_factor)
        return super().rounded(x, weight)

    def linear_in_two_terms(self, x: Tensor, adapted: AdaptedLinear) -> tuple[Tensor, LowRank | None]:
        stack = adapted.stack
        if stack is None or len(x) > lora.MAX_ROWS or stack.padded_rank > MAX_RANK:
            return self.linear(x, adapted), None
        output, reduced = self._products(x, adapted, stack)
        if not stack.covers(output.shape[1]):
            lora.expand(output, reduced, stack)
            return output, None
        return output, LowRank(
            tuple(
                part[:, : len(adapter.a)]
                for part, adapter in zip(reduced.split(stack.padded_rank, dim=1), stack.adapters, strict=True)
            ),
            tuple(adapter.b for adapter in stack.adapters),
            tuple(adapter.scaling for adapter in stack.adapters),
        )

    def linear_in_parts(self, x: Tensor | ScaledRows, adapted: AdaptedLinear) -> Tensor:
        if not isinstance(x, ScaledRows) and not adapted.adapters and self._streams(x, adapted):
            from colocate.kernels.matmul import streamed

            return streamed.product(x, adapted.weight, adapted.bias)
        return self.linear(x, adapted)

    def _streams(self, x: Tensor, adapted: AdaptedLinear) -> bool:
        """Whether `kernels.matmul.streamed`, which reads weights ahead, can multiply by these."""
        if "streamed" in self.broken or adapted.in_8bit is not None or self.parallel.num_parts > 1:
            return False
        if adapted.is_written_before_use:
            return False
        from colocate.kernels.matmul.streamed import can_stream

        return can_stream(x, adapted.weight)

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
        values, row_factors = x if isinstance(x, ScaledRows) else (x, None)
        is_alone = self.parallel.num_parts == 1
        return norms.add_rms_norm(
            values, residual, weight, eps, offset, factor, row_factors, output_weight, follows_kernel=is_alone
        )

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float, offset: float | None) -> None:
        norms.rms_norm(x, weight, eps, offset, out=x)

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        num_kv_heads = k_cache.shape[1]
        rotary.rotate_and_store(
            qkv,
            rotation.cos,
            rotation.sin,
            positions,
            slots,
            rotation.q_norm,
            rotation.k_norm,
            rotation.eps,
            k_cache,
            v_cache,
            qkv.shape[1] - 2 * num_kv_heads,
            num_kv_heads,
            rotation.offset,
            rotation.pair_distance,
            rotation.norms_last,
        )

    def gate(
        self, activation: Callable[[Tensor], Tensor], gate_up: Tensor, low_rank: LowRank | None = None
    ) -> Tensor:
        if not has_gate_kernels(activation):
            return super().gate(activation, gate_up, low_rank)
        is_gelu = is_tanh_gelu(activation)
        if low_rank is None:
            return gate.silu_mul(gate_up, is_gelu=is_gelu)
        return gate.silu_mul_low_rank(gate_up, low_rank, is_gelu=is_gelu)

    def gated_linear(
        self,
        activation: Callable[[Tensor], Tensor],
        x: Tensor,
        adapted: AdaptedLinear,
        *,
        in_8bit: bool = False,
    ) -> Tensor | ScaledRows:
        is_plain = not adapted.adapters and is_silu(activation)
        if is_plain and in_8bit and adapted.in_8bit is not None:
            return ScaledRows(*quantize.rows(self.linear(x, adapted), is_gate_up=True))
        if is_plain and adapted.in_8bit is None and adapted.bias is None:
            output = self._swiglu(x, adapted)
            if output is not None:
                return output
        return super().gated_linear(activation, x, adapted)

    def _swiglu(self, x: Tensor, adapted: AdaptedLinear) -> Tensor | None:
        """silu(gate) * up in one kernel; None: there is none for these, or none that is faster."""
        if self._streams(x, adapted):
            from colocate.kernels.matmul import streamed

            if len(x) <= streamed.MAX_GATED_ROWS:
                return streamed.swiglu(x, adapted.weight)
        if "swiglu" not in self.broken:
            from colocate.kernels.matmul import swiglu

            if swiglu.is_faster(x, adapted.weight):
                return swiglu.swiglu(x, adapted.weight)
        return None

    def prefill_attention(
        self,
        qkv: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        context: PrefillContext,
        scale: float,
        window: int | None,
    ) -> Tensor:
        head_dim, num_kv_heads = qkv.shape[2], k_cache.shape[1]
        if fallbacks.why_not_flash(qkv.dtype, head_dim) is not None:
            return super().prefill_attention(qkv, rotation, k_cache, v_cache, context, scale, window)
        _, positions, slots = context.tokens
        self.rotate_and_store(qkv, rotation, positions, slots, k_cache, v_cache)
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        context_slots = context.context_slots
        if context_slots is not None:
            k, v = (tokens_at(cache, context_slots, qkv.dtype) for cache in (k_cache, v_cache))
        cu_queries, cu_contexts = context.cu_seqlens
        output = varlen_attn(
            q,
            k,
            v,
            cu_queries,
            cu_contexts,
            max(context.query_lens),
            max(context.context_lens),
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **_GROUPED_QUERIES,
        )
        assert isinstance(output, Tensor), "the log-sum-exp was not asked for"
        return output

    def decode_attention(
        self,
        qkv: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        context: DecodeContext,
        scale: float,
        window: int | None,
    ) -> Tensor:
        assert self._scratch is not None, "the backend is not bound to a decoder"
        num_rows, num_all_heads, head_dim = qkv.shape[-3:]
        num_kv_heads = k_cache.shape[1]
        num_heads = num_all_heads - 2 * num_kv_heads
        return decode_attention(
            qkv,
            rotation,
            context.slots,
            k_cache,
            v_cache,
            context.block_tables,
            context.context_lens,
            self._prefixes if self.shares_prefixes else None,
            self._scratch,
            scale=scale,
            sliding_window=window,
            num_splits=num_splits_for(num_rows, num_kv_heads),
            out=rotation.cos.new_empty(num_rows, num_heads, head_dim),
        )

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if hidden.dtype == torch.float32:
            return torch.mm(hidden, weight.t(), out=out)
        # The product stays in float32: rounding it to bfloat16 would move logits by up to 2^-8 of their size.
        if out is None:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)

    def begin_step(self, batch: DecodeBatch, rows: slice, page_size: int) -> None:
        steps.begin_step(
            batch.positions[rows],
            batch.finished[rows],
            batch.block_tables[rows],
            page_size,
            batch.slots[rows],
            batch.context_lens[rows],
            batch.step,
        )

    def draw(
        self,
        hidden: Tensor,
        head: Tensor,
        sampler: Sampler,
        batch: DecodeBatch,
        rows: slice,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if out is not None and sampler.is_plain and "head" not in self.broken:
            from colocate.kernels.decode.head import is_faster, logits_and_parts

            if is_faster(hidden, head):
                parts = logits_and_parts(hidden, head, sampler.sampling.temperature, out)
                return self.sample(out, sampler, batch, rows, parts)
        return super().draw(hidden, head, sampler, batch, rows, out)

    def sample(
        self,
        logits: Tensor,
        sampler: Sampler,
        batch: DecodeBatch,
        rows: slice,
        parts: sampling.Parts | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not sampler.is_plain:
            return super().sample(logits, sampler, batch, rows)
        options: dict[str, Any] = {
            "seed": batch.seed,
            "temperature": sampler.sampling.temperature,
            "prompt_keys": batch.prompt_keys[rows],
            "samples": batch.samples[rows],
            "positions": batch.num_generated[rows],
            "finished": batch.finished[rows],
            "parts": parts,
        }
        parallel = self.parallel
        if parallel.num_parts == 1:
            return sampling.sample(logits, **options)
        candidates = sampling.draw_candidates(logits, part=parallel.part, **options)
        return sampling.choose(parallel.gather(candidates), batch.finished[rows])

    def end_step(
        self,
        batch: DecodeBatch,
        rows: slice,
        token_ids: Tensor,
        logprobs: Tensor,
        stop_token_ids: Tensor,
    ) -> None:
        steps.end_step(
            token_ids,
            logprobs,
            stop_token_ids,
            batch.limits[rows],
            batch.last_tokens[rows],
            batch.positions[rows],
            batch.num_generated[rows],
            batch.finished[rows],
            batch.step,
            batch.out_token_ids[:, rows],
            batch.out_logprobs[:, rows],
        )


def _filled_up(rows: Tensor) -> Tensor:
    """Rows [T, n] in 8 bits, with zeros below them where a product wants more rows."""
    missing = -len(rows) % SIDE
    if not missing:  # `pad` would copy them all the same
        return rows
    as_bytes = rows.view(torch.uint8)  # e4m3 has no `pad` of its own
    return F.pad(as_bytes, (0, 0, 0, missing)).view(rows.dtype)


def _sizes(layout: Layout, capacity: int) -> dict[str, int]:
    return {
        "max_num_seqs": capacity,
        "num_heads": layout.num_local_heads,
        "num_kv_heads": layout.num_local_kv_heads,
        "head_dim": layout.head_dim,
    }


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512
