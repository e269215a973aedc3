"""Compiles kernels that read keys and values in 8 bits for a GPU that is not here; prints their PTX in JSON.

    python unpacking_worker.py CACHE

Tensors are on a CPU, so `decode_attention` is told that bytes are to be unpacked as on a GPU. Run without
Triton's interpreter, with the stand-in for Triton's driver of `absent_gpu.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from absent_gpu import Driver
from triton.runtime import driver

from colocate.kernels.decode import attention
from colocate.kernels.decode.attention import DecodeScratch, decode_attention
from colocate.kernels.decode.prefixes import SharedPrefixes
from colocate.kernels.definitions import Rotation
from colocate.kernels.fp8 import int8
from colocate.kernels.layer.rotary import rotate_and_store

ptx: dict[str, list[str]] = {}


def note(*, src: Any, metadata_group: dict[str, str], **_: Any) -> None:
    texts = [Path(path).read_text() for path in metadata_group.values() if path.endswith(".ptx")]
    ptx.setdefault(src.name, []).extend(texts)


class InAsm:
    """A kernel that is launched with `IN_ASM`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self._kernel[grid](*args, **{**options, "IN_ASM": True})


def launch(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> None:
    block = int8.head_block_size(page_size, head_dim, int8.DTYPE)
    pages = torch.zeros(2, 4, num_kv_heads, block, dtype=torch.uint8)[..., : page_size * head_dim]
    caches = pages.unflatten(-1, (page_size, head_dim))
    qkv = torch.zeros(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    tables = torch.zeros(2, 16, head_dim, dtype=dtype)
    places = torch.zeros(4, dtype=torch.int32)
    shape = dict(max_num_seqs=4, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sizes = dict(max_num_seqs=4, num_heads=num_heads, num_kv_heads=num_kv_heads, page_size=page_size)
    prefixes = SharedPrefixes(**sizes, device=qkv.device)
    buffer = torch.zeros(DecodeScratch.num_bytes(**shape), dtype=torch.uint8)
    rotate_and_store(
        qkv,
        *tables,
        places,
        places,
        None,
        None,
        1e-6,
        *caches,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    decode_attention(
        qkv, Rotation(*tables, None, None, 1e-6), places, *caches, places[:, None], places, prefixes,
        DecodeScratch(buffer, **shape), scale=1.0, sliding_window=None, num_splits=1,
        out=torch.zeros(4, num_heads, head_dim, dtype=dtype),
    )  # fmt: skip


def main(cache: str) -> None:
    triton.knobs.cache.dir = cache
    triton.knobs.compilation.listener = note
    driver.set_active(Driver(90))
    for name in ("prefix_kernel", "suffix_kernel"):
        setattr(attention, name, InAsm(getattr(attention, name)))
    launch(4, 1, 64, 64, torch.bfloat16)
    print(json.dumps(ptx))


if __name__ == "__main__":
    main(*sys.argv[1:])
