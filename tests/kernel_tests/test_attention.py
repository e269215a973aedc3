"""Decode attention against a float64 reference that knows nothing of pages, splits or prefixes.

Heads are normed and rotated by the operations that the trainer's model runs, in the model's type: where those
round is part of what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from colocate.kernels.decode import attention
from colocate.kernels.decode import prefixes as prefixes_module
from colocate.kernels.decode.attention import DecodeScratch, decode_attention, num_splits_for
from colocate.kernels.decode.prefixes import SharedPrefixes
from colocate.kernels.definitions import Rotation, norm_and_rotate
from colocate.kernels.fp8 import int8

NAN = float("nan")
# Outputs are means of normal values; the weights and the result are rounded to the type once each.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-6


@dataclass
class Case:
    """A batch: for each prompt its full pages and its rows' tokens behind them (0: a dead row)."""

    groups: list[tuple[int, list[int]]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    num_splits: int = 1
    has_norms: bool = False
    offset: float | None = None
    pair_distance: int | None = None
    norms_last: bool = False
    seed: int = 0
    is_page_major: bool = True
    is_8bit: bool = False
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def make(self, device: torch.device) -> Case:
        """Fill pages in random order; every slot, page and table entry not in use is poison.

        That includes the slot of the new token, whose key and value are yet to be stored.
        """
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
            if self.is_8bit:  # the largest numbers, and NaN as scales
                return torch.full((*shape, self._head_block), 255, dtype=torch.uint8)
            return torch.full((*shape, self._head_block), NAN, dtype=self.dtype)

        if self.is_page_major:
            caches = poisoned(num_pages + 2, 3, 2, self.num_kv_heads)[:, 1].transpose(0, 1)
        else:
            caches = poisoned(2, num_pages + 2, self.num_kv_heads)
        written = set()
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = places[pages]
            for index, page in enumerate(places[pages].tolist()):
                used = min(max(contexts[row] - 1 - index * self.page_size, 0), self.page_size)
                if used and (page, used) not in written:
                    written.add((page, used))
                    values = torch.randn(2, self.num_kv_heads, used, self.head_dim, generator=generator)
                    for which in (0, 1):
                        self._write(caches[which], page, slice(used), values[which])
        fused = torch.randn(
            num_rows, self.num_heads + 2 * self.num_kv_heads + 1, self.head_dim, generator=generator
        )
        fused[:, -1] = NAN  # no part of qkv
        angles = 2 * math.pi * torch.rand(max(1, *contexts), self.head_dim, generator=generator)
        norms = 1 + 0.3 * torch.randn(2, self.head_dim, generator=generator)
        cos, sin, norms = (x.to(self.dtype).to(device) for x in (angles.cos(), angles.sin(), norms))
        if self.pair_distance not in (None, 1):  # a part of the head
            sin[:, 2 * self.pair_distance :] = 0
        q_norm, k_norm = norms if self.has_norms else (None, None)
        self.rotation = Rotation(
            cos, sin, q_norm, k_norm, EPS, self.offset, self.pair_distance, self.norms_last
        )
        slots = [
            places[pages[-1]] * self.page_size + (context - 1) % self.page_size if context else -1
            for pages, context in zip(tables, contexts, strict=True)
        ]
        self.contexts = contexts
        # Strided copies keep the strides of what they copy only if the whole storage moves.
        storage = caches._base if caches._base is not None else caches
        self._pristine, self._storage = storage, storage.to(device, copy=True)
        on_device = self._storage.as_strided(caches.shape, caches.stride(), caches.storage_offset())
        self.inputs = dict(
            qkv=fused.to(self.dtype).to(device)[:, :-1],
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            k_cache=self._values(on_device[0]),
            v_cache=self._values(on_device[1]),
            block_tables=torch.from_numpy(table).to(device)[:, : width - 1],
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        )
        self._store_new(caches)
        return self

    @property
    def _head_block(self) -> int:
        """Elements of one head's part of a page."""
        size = self.page_size * self.head_dim
        return size + self.page_size if self.is_8bit else size

    def _values(self, cache: Tensor) -> Tensor:
        """The values [pages, K, page_size, D] in a cache [pages, K, head_block]."""
        return cache[..., : self.page_size * self.head_dim].unflatten(-1, (self.page_size, self.head_dim))

    def _write(self, cache: Tensor, page: int, tokens: slice | int, heads: Tensor) -> None:
        """Store heads [K, tokens, D], or [K, D] of one token."""
        if not self.is_8bit:
            self._values(cache)[page, :, tokens] = heads.to(self.dtype)
            return
        stored, scales = int8.quantize(heads.to(self.dtype))
        self._values(cache)[page, :, tokens] = stored
        cache[page, :, self.page_size * self.head_dim :][:, tokens] = scales

    def _read(self, cache: Tensor) -> Tensor:
        """What a cache [pages, K, head_block] holds, [pages, K, page_size, D] float64."""
        if not self.is_8bit:
            return self._values(cache).double()
        scales = cache[..., self.page_size * self.head_dim :, None].double()
        factors = torch.where(scales == 255, NAN, 2 ** (scales / 8 - 22))
        return (self._values(cache).double() - 128) * factors

    def _store_new(self, caches: Tensor) -> None:
        """Keep what the storage must hold afterwards, and the queries as attention sees them."""
        qkv, rotation = self.inputs["qkv"].cpu(), self.rotation
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        positions = torch.tensor(self.contexts).sub(1).clamp(min=0)
        angles = [table.cpu()[positions] for table in (rotation.cos, rotation.sin)]
        self._rotated_q, rotated_k = (
            norm_and_rotate(
                heads, norm if norm is None else norm.cpu(), *angles, EPS, self.offset, self.pair_distance,
                self.norms_last,
            )
            for heads, norm in ((q, rotation.q_norm), (k, rotation.k_norm))
        )  # fmt: skip
        self._expected = self._pristine.clone()
        self._expected_caches = self._expected.as_strided(
            caches.shape, caches.stride(), caches.storage_offset()
        )
        for row, slot in enumerate(self.inputs["slots"].tolist()):
            if slot >= 0:
                page, offset = divmod(slot, self.page_size)
                self._write(self._expected_caches[0], page, offset, rotated_k[row])
                self._write(self._expected_caches[1], page, offset, v[row])

    def _all(self, storage: Tensor) -> Tensor:
        return torch.cat([self._read(part) for part in storage.flatten(0, -3).split(1)]).nan_to_num(posinf=0)

    def prefixes(self) -> SharedPrefixes:
        result = SharedPrefixes(
            max_num_seqs=len(self.contexts) + 3,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=self.page_size,
            device=self.inputs["qkv"].device,
        )
        result.num_made = result.update(self.rows_by_group)
        return result

    def run(self, prefixes: SharedPrefixes | None) -> Tensor:
        qkv, num_rows = self.inputs["qkv"], len(self.contexts)
        before = qkv.clone()
        shape = dict(
            max_num_seqs=num_rows + 3,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        num_bytes = DecodeScratch.num_bytes(**shape)
        buffer = torch.full((num_bytes // 4,), NAN, device=qkv.device).view(torch.uint8)
        shape_out = (num_rows, self.num_heads, self.head_dim)
        out = torch.full(shape_out, NAN, dtype=self.dtype, device=qkv.device)
        result = decode_attention(
            **self.inputs,
            rotation=self.rotation,
            prefixes=prefixes,
            scratch=DecodeScratch(buffer, **shape),
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            num_splits=self.num_splits,
            out=out,
        )
        assert result is out
        assert torch.equal(qkv, before)
        return out

    def reference(self) -> Tensor:
        """[B, H, D] float64."""
        out = torch.zeros(self._rotated_q.shape, dtype=torch.float64)
        block_tables = self.inputs["block_tables"].cpu()
        for row, context in enumerate(self.contexts):
            if context == 0:
                continue
            pages = block_tables[row, : -(-context // self.page_size)].long()
            first = max(0, context - self.sliding_window) if self.sliding_window else 0
            k, v = (
                self._read(cache[pages]).transpose(0, 1).flatten(1, 2)[:, first:context]
                for cache in self._expected_caches
            )
            ratio = self.num_heads // self.num_kv_heads
            q = self._rotated_q[row].double().view(self.num_kv_heads, ratio, self.head_dim)
            weights = torch.softmax(q @ k.transpose(1, 2) * self.head_dim**-0.5, dim=-1)
            out[row] = (weights @ v).view(self.num_heads, self.head_dim)
        return out

    def check(self, prefixes: SharedPrefixes | None = None) -> None:
        self._storage.copy_(self._pristine)
        actual = self.run(prefixes).cpu().double()
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(actual, self.reference(), atol=tolerance, rtol=tolerance / 2)
        dead = [row for row, context in enumerate(self.contexts) if context == 0]
        assert not actual[dead].any()
        # A norm's last bit in float32 may round a 16-bit value the other way; all else is exact.
        stored, expected = self._storage.cpu(), self._expected
        largest, loose = float(self._read(self._expected_caches[0]).nan_to_num(posinf=0).abs().max()), 0.0
        if self.has_norms:
            loose = 4 * torch.finfo(self.dtype).eps * largest
            if self.is_8bit:  # which may round a value in 8 bits the other way, too
                stored, expected = self._all(stored), self._all(expected)
                loose = 1.1 * largest / 127  # a step of the largest scale
        torch.testing.assert_close(
            stored,
            expected,
            rtol=0,
            atol=loose,
            equal_nan=True,
            msg=lambda m: f"cache: {m}",
        )


@pytest.fixture
def short_prefixes_count(few_programs, monkeypatch):
    """Prefixes and pieces of one page, so that small cases have all there is."""
    monkeypatch.setattr(prefixes_module, "MIN_SHARED_TOKENS", 1)
    monkeypatch.setattr(prefixes_module, "MIN_PIECE_TOKENS", 1)


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
        head_dim=(head_dim := draw(st.sampled_from([2, 16, 24, 64, 80]))),
        page_size=draw(st.sampled_from([16, 32])),
        dtype=draw(st.sampled_from(dtypes)),
        sliding_window=draw(st.sampled_from([None, None, 1, 17, 50])),
        num_splits=draw(st.sampled_from([s for s in (1, 2, 4, 8, 16) if s <= most_splits])),
        has_norms=draw(st.booleans()),
        pair_distance=draw(st.sampled_from([None, None, 1, max(head_dim // 8, 1)])),
        norms_last=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        is_page_major=draw(st.booleans()),
        is_8bit=draw(st.booleans()),
    )


@pytest.mark.usefixtures("short_prefixes_count")
def test_any_batch_with_and_without_prefixes(device):
    dtypes = [torch.float32, torch.float16]
    if device.type == "cuda":
        dtypes.append(torch.bfloat16)  # which the interpreter keeps as integers and multiplies as such

    # The interpreter takes seconds for one.
    max_examples = 25 if device.type == "cuda" else 10

    @settings(max_examples=max_examples, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(cases(dtypes))
    def check(case: Case) -> None:
        case.make(device)
        case.check()
        case.check(case.prefixes())

    check()


@pytest.mark.usefixtures("short_prefixes_count")
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.share(2)
def test_prefix_in_pieces(device, num_splits, sliding_window):
    """Groups large enough for several tiles, prefixes long enough for several pieces."""
    case = Case(
        [(7, [3, 20, 1, 5, 0, 16, 17]), (2, [9, 0])],
        num_heads=24,
        num_kv_heads=1,
        head_dim=32,
        dtype=torch.float16,
        sliding_window=sliding_window,
        num_splits=num_splits,
        has_norms=num_splits == 2,
    ).make(device)
    prefixes = case.prefixes()
    assert prefixes.num_partials.max() > 2, "the case does not cut prefixes"
    case.check(prefixes)


@pytest.mark.usefixtures("short_prefixes_count")
def test_pages_longer_than_a_tile(device, monkeypatch):
    monkeypatch.setattr(attention, "OTHER_LAUNCH", attention.Launch(16, 4, 2))
    groups = [(2, [5, 70, 129, 0]), (0, [40, 1])]
    case = Case(groups, head_dim=40, page_size=64, sliding_window=100, has_norms=True, offset=1.0).make(
        device
    )
    case.check(case.prefixes())


@pytest.mark.usefixtures("short_prefixes_count")
def test_prefixes_change_between_steps(device):
    """The tensors of one `SharedPrefixes` serve batch after batch; nothing of the last one is left."""
    first = Case([(3, [5, 20, 33]), (2, [1, 40])], num_heads=12).make(device)
    prefixes = first.prefixes()
    pointers = [prefixes.items.data_ptr(), prefixes.num_items.data_ptr(), prefixes.prefix_lens.data_ptr()]
    first.check(prefixes)
    second = Case([(1, [8, 8]), (0, [5, 7, 11])], num_heads=12, seed=1).make(device)
    prefixes.update(second.rows_by_group)
    second.check(prefixes)
    prefixes.update([])
    second.check(prefixes)
    assert pointers == [
        prefixes.items.data_ptr(),
        prefixes.num_items.data_ptr(),
        prefixes.prefix_lens.data_ptr(),
    ]


@pytest.mark.usefixtures("short_prefixes_count")
@pytest.mark.parametrize(
    ("num_parts", "has_norms", "num_splits", "num_kv_heads", "is_8bit"),
    [(2, True, 2, 2, False), (5, False, 1, 2, False), (3, True, 1, 1, True)],
)
@pytest.mark.share(3)
def test_parts_of_a_product_are_summed_in_their_order(
    device, num_parts, has_norms, num_splits, num_kv_heads, is_8bit
):
    """Outputs and stored keys and values are bit for bit those of the rounded sum."""
    heads = dict(num_heads=3 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=24)
    sizes = dict(**heads, page_size=16, dtype=torch.float16)
    options = dict(has_norms=has_norms, num_splits=num_splits, is_8bit=is_8bit)
    case = Case([(2, [3, 20]), (0, [18, 0])], **sizes, **options)
    case.make(device)
    generator = torch.Generator(device).manual_seed(num_parts)
    shape = (num_parts, *case.inputs["qkv"].shape)
    parts = torch.randn(shape, generator=generator, device=device)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    for prefixes in (None, case.prefixes()):
        outcomes = []
        for qkv in (total.half(), parts):
            case.inputs["qkv"] = qkv
            case._storage.copy_(case._pristine)
            outcomes.append((case.run(prefixes), case._storage.clone().nan_to_num()))
        assert all(torch.equal(whole, summed) for whole, summed in zip(*outcomes, strict=True))


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_is_no_number_shows_in_8_bits_at_once(device, part, num_splits):
    """In the token's own step and head, whose key or value is not read from the page yet."""
    case = Case([(0, [5, 20])], dtype=torch.float16, is_8bit=True, num_splits=num_splits).make(device)
    case.inputs["qkv"] = case.inputs["qkv"].clone()
    case.inputs["qkv"][1, case.num_heads + (2 if part == "value" else 0), 3] = math.inf
    is_nan = case.run(None).isnan().cpu()
    assert is_nan[1, :2].all() and not is_nan[1, 2:].any() and not is_nan[0].any()


def test_parts_fill_the_device_and_fit_the_scratch():
    for num_kv_heads in (1, 2, 8, 300):
        sizes = dict(max_num_seqs=512, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=16)
        scratch = DecodeScratch(torch.empty(DecodeScratch.num_bytes(**sizes), dtype=torch.uint8), **sizes)
        for num_rows in range(1, 513):
            num_splits = num_splits_for(num_rows, num_kv_heads)
            assert num_splits & (num_splits - 1) == 0 and 1 <= num_splits <= attention.MAX_SPLITS
            if num_splits > 1:
                assert scratch.num_prefix_slots + num_rows * num_splits <= scratch.num_slots
            elif num_rows * num_kv_heads < attention.TARGET_PROGRAMS // 4:
                raise AssertionError(f"{num_rows} rows leave most of the device idle")
    assert num_splits_for(1, 2) == 16 and num_splits_for(512, 2) == 1


@pytest.mark.parametrize(
    ("dtype", "is_8bit"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, False)],
    ids=["bfloat16", "8 bits", "float16", "float32"],
)
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, page_size",
    [
        (12, 2, 128, 64),  # Qwen2.5 1.5B
        (28, 4, 128, 64),  # Qwen2.5 7B
        (32, 8, 64, 64),
        (32, 32, 80, 32),
        (24, 8, 96, 128),
        (8, 4, 256, 64),
        (8, 4, 256, 256),
        (64, 1, 128, 16),
        (6, 2, 112, 256),
        (14, 2, 200, 32),
    ],
)
@pytest.mark.gpu
def test_model_shapes(num_heads, num_kv_heads, head_dim, page_size, dtype, is_8bit):
    """The compiled kernels at the sizes of models, with prefixes cut as they are in earnest."""
    pages = 2048 // page_size
    groups = [(pages, [1, 100, 700, 0, 350, 9, 64, 65]), (pages // 4, [5, 300]), (0, [1, 257])]
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size)
    for num_splits, has_norms in ((1, False), (num_splits_for(12, num_kv_heads), True)):
        options = dict(dtype=dtype, is_8bit=is_8bit, num_splits=num_splits, has_norms=has_norms)
        case = Case(groups, **shape, **options).make(torch.device("cuda"))
        case.check()
        case.check(case.prefixes())


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_captured_graph_follows_the_tensors(num_splits):
    """One graph, replayed after contexts, queries, pages and prefixes have changed."""
    device = torch.device("cuda")
    sizes = dict(num_heads=12, head_dim=128, page_size=64, dtype=torch.bfloat16, num_splits=num_splits)
    batches = [
        Case([(16, [5, 20, 33, 100]), (9, [1, 400, 3, 3])], **sizes).make(device),
        Case([(0, [900, 20, 33]), (16, [1, 0, 7, 650, 64])], **sizes, seed=1).make(device),
        Case([(0, [0, 0, 0, 0, 0, 0, 0, 17])], **sizes, seed=2).make(device),
    ]
    # One set of tensors large enough for all; unused pages stay poisoned.
    shape = dict(max_num_seqs=8, num_heads=12, num_kv_heads=2, head_dim=128)
    scratch = DecodeScratch(
        torch.empty(DecodeScratch.num_bytes(**shape), dtype=torch.uint8, device=device), **shape
    )
    prefixes = SharedPrefixes(max_num_seqs=8, num_heads=12, num_kv_heads=2, page_size=64, device=device)
    fixed = {
        name: torch.empty(
            [max(sizes) for sizes in zip(*(case.inputs[name].shape for case in batches), strict=True)],
            dtype=batches[0].inputs[name].dtype,
            device=device,
        )
        for name in batches[0].inputs
    }
    out = fixed["qkv"].new_empty(8, 12, 128)
    tables = torch.zeros(2, 2048, 128, dtype=torch.bfloat16, device=device)
    rotation = Rotation(tables[0], tables[1], None, None, EPS)

    def attend() -> None:
        decode_attention(
            **fixed,
            rotation=rotation,
            prefixes=prefixes,
            scratch=scratch,
            scale=128**-0.5,
            sliding_window=None,
            num_splits=num_splits,
            out=out,
        )

    def load(case: Case) -> None:
        fixed["block_tables"].fill_(2**30)
        for name, tensor in case.inputs.items():
            fixed[name][tuple(map(slice, tensor.shape))] = tensor
        for table, values in zip(tables, (case.rotation.cos, case.rotation.sin), strict=True):
            table[: len(values)] = values
        prefixes.update(case.rows_by_group)

    load(batches[0])
    attend()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in [*batches, batches[0]]:
        load(case)
        out.fill_(NAN)
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), case.reference(), atol=1.6e-2, rtol=1e-2)


@pytest.mark.gpu
def test_pages_beyond_two_billion_elements():
    """Page times stride does not fit 32 bits: the last of 70 pages that lie 32 Mi elements apart."""
    stride, page_size, head_dim = 2**25, 16, 64
    case = Case([(0, [9])], num_heads=2, num_kv_heads=1, dtype=torch.float16).make(torch.device("cuda"))
    expected = case.reference()
    storage = torch.full((70 * stride,), NAN, dtype=torch.float16, device="cuda")
    shape, strides = (70, 1, page_size, head_dim), (stride, page_size * head_dim, head_dim, 1)
    page = int(case.inputs["block_tables"][0, 0])
    for name, offset in (("k_cache", 0), ("v_cache", page_size * head_dim)):
        cache = storage.as_strided(shape, strides, offset)
        cache[69] = case.inputs[name][page]
        case.inputs[name] = cache
    case.inputs["block_tables"][0, 0] = 69
    case.inputs["slots"].fill_(69 * page_size + 8)
    torch.testing.assert_close(case.run(None).cpu().double(), expected, atol=2e-3, rtol=1e-3)
    assert not case.inputs["k_cache"][69, 0, 8].isnan().any()
    assert torch.equal(case.inputs["v_cache"][69, 0, 8], case.inputs["qkv"][0, 3])
