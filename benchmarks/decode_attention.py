"""Decode attention on one GPU: time per layer of workloads and of compile variants, beside copy bandwidth.

    python benchmarks/decode_attention.py [workloads] [splits] [suffix] [prefix]

Without a section all are run. A timed graph goes through several layers of a cache far larger than L2; pages
are in random order. "nominal" counts every row's keys and values, "needed" those of shared pages once. Prints
a table, and writes every line to $OUT/decode_attention.json if OUT is set.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from decode_floor import copy_bytes_per_s

from colocate.engines.native import prefixes as prefixes_module
from colocate.engines.native.context import Rotation
from colocate.engines.native.kernels import attention
from colocate.engines.native.kernels.attention import DecodeScratch, Launch, decode_attention, num_splits_for
from colocate.engines.native.prefixes import SharedPrefixes

PAGE_SIZE = 64
NUM_LAYERS = 28
NUM_TIMED_LAYERS = 6
DEVICE = torch.device("cuda")
LINES: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Workload:
    """Prompts and rows of each; `own_tokens` None: log-normal, median 300, at most 2,048."""

    num_groups: int
    group_size: int
    prompt_tokens: int
    own_tokens: int | None
    num_heads: int = 12
    num_kv_heads: int = 2
    head_dim: int = 128

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size


class Batch:
    """The tensors of a workload. `is_page_major`: all layers of a page are one piece of memory."""

    def __init__(self, work: Workload, *, is_page_major: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.work = work
        if work.own_tokens is None:
            own = (300 * torch.randn(work.num_rows, generator=generator).exp()).clamp(1, 2048).int()
        else:
            own = torch.full((work.num_rows,), work.own_tokens, dtype=torch.int32)
        self.context_lens = work.prompt_tokens + own
        self.num_shared = work.prompt_tokens // PAGE_SIZE
        own_pages = -(-self.context_lens // PAGE_SIZE) - self.num_shared
        num_pages = work.num_groups * self.num_shared + int(own_pages.sum())
        places = torch.randperm(num_pages, generator=generator).int()
        tables = torch.zeros(work.num_rows, self.num_shared + int(own_pages.max()), dtype=torch.int32)
        next_page = work.num_groups * self.num_shared
        for row, count in enumerate(own_pages.tolist()):
            first = row // work.group_size * self.num_shared
            tables[row, : self.num_shared] = places[first : first + self.num_shared]
            tables[row, self.num_shared : self.num_shared + count] = places[next_page : next_page + count]
            next_page += count
        inner = (work.num_kv_heads, PAGE_SIZE, work.head_dim)
        num_layers = NUM_LAYERS if is_page_major else NUM_TIMED_LAYERS
        outer = (num_pages, 2 * num_layers) if is_page_major else (2 * num_layers, num_pages)
        cache = torch.empty(*outer, *inner, dtype=torch.bfloat16, device=DEVICE).normal_()
        self.caches = (cache.transpose(0, 1) if is_page_major else cache).unflatten(0, (num_layers, 2))
        heads = work.num_heads + 2 * work.num_kv_heads
        self.qkv = torch.randn(work.num_rows, heads, work.head_dim, dtype=torch.bfloat16, device=DEVICE)
        self.out = self.qkv.new_empty(work.num_rows, work.num_heads, work.head_dim)
        angles = torch.rand(int(self.context_lens.max()), work.head_dim, device=DEVICE)
        self.rotation = Rotation(angles.cos().bfloat16(), angles.sin().bfloat16(), None, None, eps=0.0)
        last = self.context_lens - 1
        last_pages = tables.gather(1, (last // PAGE_SIZE).long()[:, None])[:, 0]
        self.slots = (last_pages * PAGE_SIZE + last % PAGE_SIZE).to(DEVICE)
        self.tables, self.device_lens = tables.to(DEVICE), self.context_lens.to(DEVICE)
        token_bytes = 2 * work.num_kv_heads * work.head_dim * 2
        self.nominal_bytes = int(self.context_lens.sum()) * token_bytes
        repeated = work.num_groups * (work.group_size - 1) * self.num_shared * PAGE_SIZE
        self.needed_bytes = self.nominal_bytes - repeated * token_bytes

    def time_s(self, *, with_prefixes: bool, num_splits: int | None = None) -> float:
        """Median seconds of one layer."""
        work = self.work
        sizes = dict(max_num_seqs=work.num_rows, num_heads=work.num_heads, num_kv_heads=work.num_kv_heads)
        num_bytes = DecodeScratch.num_bytes(**sizes, head_dim=work.head_dim)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        scratch = DecodeScratch(buffer, **sizes, head_dim=work.head_dim)
        prefixes = None
        if with_prefixes:
            prefixes = SharedPrefixes(**sizes, page_size=PAGE_SIZE, device=DEVICE)
            rows = torch.arange(work.num_rows).view(work.num_groups, -1).tolist()
            prefixes.update([(group, self.num_shared) for group in rows])

        def attend(layer: int) -> None:
            decode_attention(
                self.qkv,
                self.rotation,
                self.slots,
                *self.caches[layer],
                self.tables,
                self.device_lens,
                prefixes,
                scratch,
                scale=work.head_dim**-0.5,
                sliding_window=None,
                num_splits=num_splits or num_splits_for(work.num_rows, work.num_kv_heads),
                out=self.out,
            )

        attend(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(NUM_TIMED_LAYERS):
                attend(layer)
        return triton.testing.do_bench(graph.replay, return_mode="median") / 1e3 / NUM_TIMED_LAYERS


def report(section: str, name: str, batch: Batch, measure: Callable[[], float], bandwidth: float) -> None:
    """Time one case; a variant that does not compile or fit is a line, too."""
    line: dict[str, Any] = dict(section=section, name=name)
    try:
        seconds = measure()
    except (triton.runtime.errors.TritonError, RuntimeError) as error:
        line["error"] = f"{type(error).__name__}: {error}"[:100]
        print(f"{section:10s} {name:60s} {line['error']}", flush=True)
    else:
        line |= dict(
            layer_s=seconds,
            nominal_of_copy=batch.nominal_bytes / seconds / bandwidth,
            needed_of_copy=batch.needed_bytes / seconds / bandwidth,
        )
        print(
            f"{section:10s} {name:60s} {seconds * 1e6:8.1f} us  nominal {line['nominal_of_copy']:5.2f}"
            f"  needed {line['needed_of_copy']:5.2f} of copy bandwidth",
            flush=True,
        )
    LINES.append(line)


def workloads(bandwidth: float) -> None:
    """What generation does, and prompts of growing length with and without the prefix level."""
    cases = {
        "512 rows, 256 + 512": Workload(64, 8, 256, 512),
        "512 rows, 512 + 512": Workload(64, 8, 512, 512),
        "512 rows, 1024 + 512": Workload(64, 8, 1024, 512),
        "512 rows, 256 + ragged": Workload(64, 8, 256, None),
        "128 rows, 256 + 512": Workload(16, 8, 256, 512),
        "256 rows in 16 groups, 4096 + 256": Workload(16, 16, 4096, 256),
        "7B: 256 rows, 512 + 512": Workload(32, 8, 512, 512, num_heads=28, num_kv_heads=4),
        "D 64: 256 rows, 256 + 512": Workload(32, 8, 256, 512, 32, 8, 64),
        "D 256: 256 rows, 256 + 512": Workload(32, 8, 256, 512, 8, 4, 256),
    }
    for name, work in cases.items():
        for is_page_major in (False, True):
            batch = Batch(work, is_page_major=is_page_major)
            layout = "page-major" if is_page_major else "layer-major"
            for with_prefixes in (False, True):
                label = f"{name}, {layout}{', prefixes' if with_prefixes else ''}"
                measure = functools.partial(batch.time_s, with_prefixes=with_prefixes)
                report("workloads", label, batch, measure, bandwidth)
            del batch, measure


def splits(bandwidth: float) -> None:
    """Parts per row for small batches."""
    for num_rows in (1, 4, 16, 32, 64, 128):
        batch = Batch(Workload(1, num_rows, 0, 4096), is_page_major=True)
        most = num_splits_for(num_rows, 2)
        for num_splits in (s for s in (1, 2, 4, 8, 16) if s <= most):
            measure = functools.partial(batch.time_s, with_prefixes=False, num_splits=num_splits)
            report("splits", f"{num_rows} rows of 4096 in {num_splits} parts", batch, measure, bandwidth)
        del batch, measure


def variants(section: str, bandwidth: float) -> None:
    """Every tile, number of warps and number of stages for bf16 and D = 128."""
    is_prefix = section == "prefix"
    table = attention.PREFIX_LAUNCH if is_prefix else attention.SUFFIX_LAUNCH
    work = Workload(16, 16, 4096, 256) if is_prefix else Workload(64, 8, 0, 768)
    batch, chosen = Batch(work, is_page_major=True), table[128, 2]
    for tile, warps, stages in itertools.product(
        (32, 64), (4, 8) if is_prefix else (1, 2, 4, 8), (2, 3, 4, 5)
    ):
        table[128, 2] = Launch(tile, warps, stages)
        name = f"tile {tile}, {warps} warps, {stages} stages"
        report(section, name, batch, functools.partial(batch.time_s, with_prefixes=is_prefix), bandwidth)
    table[128, 2] = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections: dict[str, Callable[[float], None]] = {
        "workloads": workloads,
        "splits": splits,
        "suffix": functools.partial(variants, "suffix"),
        "prefix": functools.partial(variants, "prefix"),
    }
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(sections)}")
    chosen = parser.parse_args().sections or list(sections)
    prefixes_module.MIN_SHARED_TOKENS = 1  # what it should be is one of the questions
    bandwidth = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}: copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    for section in chosen:
        sections[section](bandwidth)
    if "OUT" in os.environ:
        record = dict(device=torch.cuda.get_device_name(), copy_bytes_per_s=bandwidth, lines=LINES)
        Path(os.environ["OUT"], "decode_attention.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
