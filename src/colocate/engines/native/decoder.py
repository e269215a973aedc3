"""Decode steps over the running rows, and the CUDA graphs of such steps, which later rollouts use again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colocate.engines.native.batch import DecodeBatch
from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.kv_cache import KVCache
from colocate.engines.native.model_runner import ModelRunner
from colocate.engines.native.pages import pages_for
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.sampler import Sampler
from colocate.engines.native.scheduler import Prefill
from colocate.engines.native.torch_backend import TorchBackend
from colocate.kernels.compile_ahead import can_compile_ahead, compiling
from colocate.types import SamplingParams
from colocate.weights.layouts import Layout

BUCKETS = (8, 32, 64)
"""Numbers of rows for which a step is captured, followed by the multiples of 128. Up to 64 rows a step takes
the time of reading the weights, and an unused row costs next to nothing. With more rows, matrix products work
in tiles of 128: on an H200 those with 320 rows take longer than those with 384."""


MAX_ROWS_PER_START = 64
"""Sequences that draw their first token together; it bounds the stacked copy of their logits, [64, V]."""


def bucket_for(num_rows: int) -> int:
    """The number of rows of the captured step that serves `num_rows` rows."""
    for bucket in BUCKETS:
        if num_rows <= bucket:
            return bucket
    return -(-num_rows // 128) * 128


def capacity_for(max_num_seqs: int, backend: TorchBackend) -> int:
    """Rows for which decode steps need room, unused rows of the largest captured step included."""
    return bucket_for(max_num_seqs) if backend.captures_graphs else max_num_seqs


class Decoder:
    """Runs decode steps; on a GPU as CUDA graphs, one per bucket of batch sizes.

    A graph is captured when a step first needs it. Graphs hold the addresses of the weights, the KV cache and
    the rows. So they stay valid when weights are updated in place, and after sleep, because the cache returns
    to the same addresses.
    """

    def __init__(
        self,
        cache: KVCache,
        weights: RolloutWeights,
        in_8bit: EightBitWeights,
        backend: TorchBackend,
        layout: Layout,
        *,
        max_num_seqs: int,
        max_len: int,
    ) -> None:
        self.cache = cache
        self.weights = weights
        self.in_8bit = in_8bit
        self.backend = backend
        capacity = capacity_for(max_num_seqs, backend)
        self.batch = DecodeBatch(
            max_num_seqs=capacity,
            # Triton compiles kernels anew for a stride that 16 does not divide; a multiple of 16 avoids that.
            max_num_pages=-(-pages_for(max_len, cache.page_size) // 16) * 16,
            max_num_steps=backend.steps_per_look,
            device=layout.device,
        )
        self.max_num_seqs = max_num_seqs
        self.max_len = max_len
        self._dtype = layout.dtype
        self.runner = ModelRunner(layout, weights, cache, backend, layout.rotary_tables(max_len), in_8bit)
        self._identity = self.runner.identity()
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        """Graphs by (rows, whether prefixes are shared, whether drawing the tokens is captured, too)."""
        self._captured: dict[tuple[float, tuple[int, ...]], Tensor] = {}
        """The stop tokens on the device by (temperature, stop tokens) of the captured draws: one entry."""
        self._logits = backend.bind(cache.scratch, layout, capacity, cache.page_size)
        self._pool: Any = None
        self._compiled: dict[tuple[bool, bool, bool], int] = {}
        """Rows of the largest step whose kernels are compiled ahead, by whether it shares prefixes, whether
        its draw is captured, and whether that takes the largest logit."""
        self.forget_graphs()

    def fits(self, layout: Layout, *, max_len: int) -> bool:
        """Whether this decoder can run sequences of up to `max_len` tokens of the model in `layout`."""
        is_same_kind = (layout.device, layout.dtype) == (self.batch.device, self._dtype)
        return is_same_kind and max_len <= self.max_len

    @property
    def num_graphs(self) -> int:
        """Steps that are captured."""
        return len(self._graphs)

    def refresh(self, layout: Layout) -> None:
        """Look the weights up again, and forget the graphs if a weight has moved."""
        tables = self.runner.rotary_tables
        runner = ModelRunner(layout, self.weights, self.cache, self.backend, tables, self.in_8bit)
        identity = runner.identity()
        if identity != self._identity:
            self.runner, self._identity = runner, identity
            self._compiled.clear()
            self.forget_graphs()

    def start_rollout(self, sampling: SamplingParams) -> None:
        """Forget all rows, and draw tokens as `sampling` says from now on."""
        self._sampler = Sampler(sampling)
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int32, device=self.batch.device)
        vocab_size = self.runner.layout.vocab_size if self._sampler.needs_seen_tokens else None
        self.batch.reset(seed=sampling.seed, vocab_size=vocab_size)
        if self._sampler.is_plain:
            # A graph of a draw holds the value of the temperature and the address of the stop tokens.
            drawing = sampling.temperature, sampling.stop_token_ids
            if drawing not in self._captured:
                self._captured = {drawing: self._stops}
                self.forget_graphs()
            self._stops = self._captured[drawing]

    def compile_ahead(self, prefills: Sequence[Prefill], num_rows: int, *, has_prefixes: bool) -> None:
        """Compile the kernels of a rollout that begins with `num_rows` rows: of prefills, first draws and
        steps, and with `has_prefixes` of steps that share prefixes.

        Ranks that decode together would exchange garbage here, so they compile each kernel at its first use.
        """
        kind = has_prefixes, self._sampler.is_plain, self._sampler.sampling.temperature == 0
        if bucket_for(num_rows) <= self._compiled.get(kind, 0) or self.backend.parallel.num_parts > 1:
            return
        if not self.backend.captures_graphs or not can_compile_ahead(self.batch.device):
            return
        self._compiled[kind] = bucket_for(num_rows)
        runner, shares_prefixes = self.runner, self.backend.shares_prefixes
        self.runner = runner.with_few_layers()
        try:
            with compiling(self.batch.device):
                self.runner.prefill(prefills)
                self._compile_steps(num_rows, has_prefixes=has_prefixes)
        finally:
            self.runner, self.backend.shares_prefixes = runner, shares_prefixes

    def _compile_steps(self, num_rows: int, *, has_prefixes: bool) -> None:
        assert self._logits is not None, "captured steps need a fixed place for their logits"
        if self._sampler.is_plain:
            rows = slice(0, min(num_rows, MAX_ROWS_PER_START))
            self.backend.sample(self._logits[rows], self._sampler, self.batch, rows)
        for shares_prefixes in {False, has_prefixes}:
            self.backend.shares_prefixes = shares_prefixes
            for bucket in sorted({bucket_for(count) for count in range(1, num_rows + 1)}):
                self._captured_step(bucket)

    def begin_window(self) -> None:
        """Begin a window, that is, steps whose tokens the host will read together."""
        self.batch.step.fill_(-1)

    def draw_first(self, rows: slice, logits: Tensor) -> None:
        """Draw the first tokens of rows that have just started, from logits [rows, V]: step 0 of a window."""
        self.batch.step.zero_()
        self._record(rows, *self.backend.sample(logits, self._sampler, self.batch, rows))

    def step(self, max_context_len: int) -> None:
        """Feed every row's last token to the model and draw its next token."""
        num_rows = self.batch.num_rows
        rows = slice(0, num_rows)
        if self._pool is None:
            hidden = self.runner.decode(self.batch, num_rows, max_context_len=max_context_len)
            self.backend.parallel.least(0)  # raises if memory ran out on a rank, before a token is drawn
            drawn = self.backend.draw(hidden, self.runner.head, self._sampler, self.batch, rows)
            self._record(rows, *drawn)
            return
        assert self._logits is not None, "captured steps need a fixed place for their logits"
        bucket = bucket_for(num_rows)
        key = bucket, self.backend.shares_prefixes, self._sampler.is_plain
        if key not in self._graphs:
            self._graphs[key] = self._capture(bucket)
        self._graphs[key].replay()
        if not self._sampler.is_plain:
            drawn = self.backend.sample(self._logits[:num_rows], self._sampler, self.batch, rows)
            self._record(rows, *drawn)

    def _record(self, rows: slice, tokens: Tensor, logprobs: Tensor) -> None:
        batch = self.batch
        self.backend.end_step(batch, rows, tokens, logprobs, self._stops)
        if batch.seen is not None:
            batch.seen[rows].scatter_(1, tokens[:, None].long(), True)

    def forget_graphs(self) -> None:
        """Capture every step anew."""
        self._graphs.clear()
        # PyTorch frees a pool of memory with the last graph in it, so new graphs need a new pool.
        self._pool = torch.cuda.graph_pool_handle() if self.backend.captures_graphs else None

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        # This first step compiles kernels and makes cuBLAS take its workspace, neither of which can be
        # captured. Its changes to the rows are undone; the keys and values that it stored will be stored
        # again, equal and in the same places.
        before, parallel = self.batch.save(), self.backend.parallel
        self._captured_step(bucket)
        self.batch.restore(before)
        torch.cuda.synchronize()
        parallel.least(0)  # raises if memory ran out on a rank
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._captured_step(bucket)
        parallel.least(0)
        return graph

    def _captured_step(self, bucket: int) -> None:
        assert self._logits is not None, "captured steps need a fixed place for their logits"
        rows, logits = slice(0, bucket), self._logits[:bucket]
        hidden = self.runner.decode(self.batch, bucket, max_context_len=0)
        if self._sampler.is_plain:
            drawn = self.backend.draw(hidden, self.runner.head, self._sampler, self.batch, rows, logits)
            self._record(rows, *drawn)
        else:
            self.backend.logits(hidden, self.runner.head, logits)
