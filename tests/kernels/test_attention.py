"""Decode attention against a float64 reference that knows nothing of pages, splits or prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from colocate.engines.native import prefixes as prefixes_module
from colocate.engines.native.kernels import attention
from colocate.engines.native.kernels.attention import DecodeScratch, decode_attention, num_splits_for
from colocate.engines.native.prefixes import SharedPrefixes

NAN = float("nan")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Case:
    """A batch: `groups` lists, per prompt, its full pages and its rows' tokens behind them (0: a dead row)."""

    groups: list[tuple[int, list[int]]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    num_splits: int = 1
    seed: int = 0
    is_page_major: bool = True
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def make(self, device: torch.device) -> Case:
        """Fill pages in random order; every slot, page and table entry not in use is poison."""
        rng = np.random.default_rng(self.seed)
        num_rows = sum(len(own) for _, own in self.groups)
        order = rng.permutation(num_rows).tolist()
        self.rows_by_group = []
        contexts, tables, num_pages = [0] * num_rows, [[] for _ in range(num_rows)], 0
        for num_full, own in self.groups:
            rows = [order.pop() for _ in own]
            self.rows_by_group.append((rows, num_full))
            shared = list(range(num_pages, num_pages + num_full))
            num_pages += num_full
            for row, tokens in zip(rows, own, strict=True):
                num_own = -(-tokens // self.page_size)
                contexts[row] = num_full * self.page_size + tokens if tokens else 0
                tables[row] = shared + list(range(num_pages, num_pages + num_own))
                num_pages += num_own
        places = rng.permutation(num_pages + 2)
        width = max(map(len, tables)) + 3
        # Not a page: touching it ends in an exception or a fault.
        table = np.full((num_rows, width), 2**30, dtype=np.int32)
        generator = torch.Generator().manual_seed(self.seed)

        def poisoned(*shape: int) -> Tensor:
            return torch.full(shape, NAN, dtype=self.dtype)

        inner = (self.num_kv_heads, self.page_size, self.head_dim)
        if self.is_page_major:
            caches = poisoned(num_pages + 2, 3, 2, *inner)[:, 1].transpose(0, 1)
        else:
            caches = poisoned(2, num_pages + 2, *inner)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = places[pages]
            for index, page in enumerate(places[pages].tolist()):
                used = min(max(contexts[row] - index * self.page_size, 0), self.page_size)
                if used and caches[0, page, :, :used].isnan().any():
                    values = torch.randn(2, self.num_kv_heads, used, self.head_dim, generator=generator)
                    caches[:, page, :, :used] = values.to(self.dtype)
        fused = torch.randn(
            num_rows, self.num_heads + 2 * self.num_kv_heads, self.head_dim, generator=generator
        )
        self.contexts, self.width = contexts, width
        # Strided copies keep the strides of what they copy only if the whole storage moves.
        storage = caches._base if caches._base is not None else caches
        moved = storage.to(device)
        on_device = moved.as_strided(caches.shape, caches.stride(), caches.storage_offset())
        self.inputs = dict(
            q=fused.to(self.dtype).to(device)[:, : self.num_heads],
            k_cache=on_device[0],
            v_cache=on_device[1],
            block_tables=torch.from_numpy(table).to(device)[:, : width - 1],
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        )
        return self

    def prefixes(self) -> SharedPrefixes:
        result = SharedPrefixes(
            max_num_seqs=len(self.contexts) + 3,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=self.page_size,
            device=self.inputs["q"].device,
        )
        result.num_made = result.update(self.rows_by_group)
        return result

    def run(self, prefixes: SharedPrefixes | None) -> Tensor:
        q = self.inputs["q"]
        shape = dict(
            max_num_seqs=len(q) + 3,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        num_bytes = DecodeScratch.num_bytes(**shape)
        buffer = torch.full((num_bytes // 4,), NAN, device=q.device).view(torch.uint8)
        out = torch.full(q.shape, NAN, dtype=q.dtype, device=q.device)
        result = decode_attention(
            **self.inputs,
            prefixes=prefixes,
            scratch=DecodeScratch(buffer, **shape),
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            num_splits=self.num_splits,
            out=out,
        )
        assert result is out
        return out

    def reference(self) -> Tensor:
        """[B, H, D] float64."""
        inputs = {name: tensor.cpu() for name, tensor in self.inputs.items()}
        out = torch.zeros(inputs["q"].shape, dtype=torch.float64)
        for row, context in enumerate(self.contexts):
            if context == 0:
                continue
            pages = inputs["block_tables"][row, : -(-context // self.page_size)].long()
            first = max(0, context - self.sliding_window) if self.sliding_window else 0
            k, v = (
                inputs[name][pages].transpose(0, 1).flatten(1, 2)[:, first:context].double()
                for name in ("k_cache", "v_cache")
            )
            ratio = self.num_heads // self.num_kv_heads
            q = inputs["q"][row].double().view(self.num_kv_heads, ratio, self.head_dim)
            weights = torch.softmax(q @ k.transpose(1, 2) * self.head_dim**-0.5, dim=-1)
            out[row] = (weights @ v).view(self.num_heads, self.head_dim)
        return out

    def check(self, prefixes: SharedPrefixes | None = None) -> None:
        actual = self.run(prefixes).cpu().double()
        torch.testing.assert_close(actual, self.reference(), atol=TOLERANCES[self.dtype], rtol=0)
        dead = [row for row, context in enumerate(self.contexts) if context == 0]
        assert not actual[dead].any()


@pytest.fixture(autouse=True)
def short_prefixes_count(monkeypatch):
    """Prefixes and pieces of one page, so that small cases have all there is; few programs to interpret."""
    monkeypatch.setattr(prefixes_module, "MIN_SHARED_TOKENS", 1)
    monkeypatch.setattr(prefixes_module, "MIN_PIECE_TOKENS", 1)
    for module in (prefixes_module, attention):
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 24)


@st.composite
def cases(draw, dtypes: Sequence[torch.dtype]) -> Case:
    own = st.lists(st.integers(0, 40), min_size=1, max_size=5)
    groups = draw(st.lists(st.tuples(st.integers(0, 5), own), min_size=1, max_size=3))
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_rows = sum(len(rows) for _, rows in groups)
    most_splits = num_splits_for(num_rows, num_kv_heads)
    return Case(
        groups,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 5, 6, 7, 12, 24])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 64, 80])),
        page_size=draw(st.sampled_from([16, 32])),
        dtype=draw(st.sampled_from(dtypes)),
        sliding_window=draw(st.sampled_from([None, None, 1, 17, 50])),
        num_splits=draw(st.sampled_from([s for s in (1, 2, 4, 8, 16) if s <= most_splits])),
        seed=draw(st.integers(0, 1000)),
        is_page_major=draw(st.booleans()),
    )


def test_any_batch_with_and_without_prefixes(device):
    dtypes = [torch.float32, torch.float16]
    if device.type == "cuda":
        dtypes.append(torch.bfloat16)

    @settings(
        max_examples=40 if device.type == "cuda" else 25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(cases(dtypes))
    def check(case: Case) -> None:
        case.make(device)
        case.check()
        case.check(case.prefixes())

    check()
