"""The small kernels of a decode step beside what their bytes allow.

    python benchmarks/decode_kernels.py

Each kernel runs many times within one CUDA graph, as it does in a decode step, so what fits into the L2 cache
is read from there; the floor is its bytes at the copy bandwidth measured in the same run. Medians of ten
replays. The table goes to the terminal, and to $OUT/decode_kernels.json if OUT is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from decode_floor import copy_bytes_per_s
from triton.testing import do_bench_cudagraph

from colocate.engines.native.kernels.gate import silu_mul
from colocate.engines.native.kernels.layers import add_rms_norm, rotate_and_store
from colocate.engines.native.kernels.sampling import sample
from colocate.engines.native.kernels.steps import begin_step, end_step

SHAPES = {  # hidden, intermediate, H, K, D, V
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128, 151936),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128, 152064),
}
NUM_TOKENS = (8, 128, 512)
PAGE_SIZE = 64
MAX_LEN = 4096
DEVICE = torch.device("cuda")

Case = tuple[str, int, Callable[[], object]]
"""Name, bytes that must move, the call."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def int32(high: int, num_rows: int) -> torch.Tensor:
    return torch.randint(0, high, (num_rows,), device=DEVICE, dtype=torch.int32)


def cases(shape: tuple[int, ...], num_tokens: int) -> Iterator[Case]:
    hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size = shape
    x, residual, weight = (
        normal(num_tokens, hidden_size),
        normal(num_tokens, hidden_size),
        normal(hidden_size),
    )
    yield "add_rms_norm", 4 * x.nbytes, lambda: add_rms_norm(x, residual, weight, 1e-6)

    gate_up = normal(num_tokens, 2 * intermediate_size)
    yield "silu_mul", gate_up.nbytes * 3 // 2, lambda: silu_mul(gate_up)

    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = (angles := torch.rand(MAX_LEN, head_dim, device=DEVICE)).cos(), angles.sin()
    cos, sin = cos.bfloat16(), sin.bfloat16()
    k_cache, v_cache = normal(2, num_tokens, num_kv_heads, PAGE_SIZE, head_dim)
    slots = torch.arange(num_tokens, device=DEVICE, dtype=torch.int32) * PAGE_SIZE + int32(
        PAGE_SIZE, num_tokens
    )
    positions = int32(MAX_LEN, num_tokens)
    # Read once; queries, keys and the cache's keys and values written.
    num_rows_moved = 2 * num_heads + 5 * num_kv_heads
    norm = normal(head_dim)
    for name, norms in (("rotate_and_store", (None, None)), ("rotate_and_store, head norms", (norm, norm))):
        yield (
            name,
            num_tokens * (num_rows_moved + 2) * head_dim * 2,
            lambda norms=norms: rotate_and_store(
                qkv, cos, sin, positions, slots, *norms, 1e-6, k_cache, v_cache, num_heads, num_kv_heads
            ),
        )

    logits = normal(num_tokens, vocab_size)
    keys = torch.randint(-(2**63), 2**63 - 1, (num_tokens,), device=DEVICE)
    members = int32(8, num_tokens)
    for name, temperature in (("sample", 1.0), ("sample, greedy", 0.0)):
        yield (
            name,
            logits.nbytes,
            lambda temperature=temperature: sample(
                logits,
                seed=1,
                temperature=temperature,
                prompt_keys=keys,
                samples=members,
                positions=positions,
            ),
        )

    tables = torch.zeros(num_tokens, MAX_LEN // PAGE_SIZE, device=DEVICE, dtype=torch.int32)
    zeros = torch.zeros(8, num_tokens, device=DEVICE, dtype=torch.int32)
    finished, new_slots, context_lens, tokens, last_tokens, steps, num_generated, out_tokens = zeros
    step, row = torch.zeros(2, 1, device=DEVICE, dtype=torch.int32)
    yield (
        "begin_step",
        6 * finished.nbytes,
        lambda: begin_step(positions, finished, tables, PAGE_SIZE, new_slots, context_lens, step),
    )
    limits = torch.full_like(finished, 2**31 - 1)
    stop_token_ids = torch.tensor([151643, 151645], device=DEVICE, dtype=torch.int32)
    logprobs, out_logprobs = torch.zeros(2, num_tokens, device=DEVICE)
    yield (
        "end_step",
        11 * finished.nbytes,
        lambda: end_step(
            tokens,
            logprobs,
            stop_token_ids,
            limits,
            last_tokens,
            steps,
            num_generated,
            finished,
            row,
            out_tokens[None],
            out_logprobs[None],
        ),
    )


def main() -> None:
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e12:.2f} TB/s")
    print(f"{'shape':14}{'T':>5}  {'kernel':30}{'µs':>9}{'floor µs':>10}{'of copy':>9}")
    rows = []
    for shape_name, shape in SHAPES.items():
        for num_tokens in NUM_TOKENS:
            for name, num_bytes, call in cases(shape, num_tokens):
                time_s = do_bench_cudagraph(call, return_mode="median") / 1e3
                floor_s = num_bytes / bandwidth
                print(
                    f"{shape_name:14}{num_tokens:5}  {name:30}{time_s * 1e6:9.1f}{floor_s * 1e6:10.1f}"
                    f"{floor_s / time_s:9.0%}",
                    flush=True,
                )
                rows.append(
                    {
                        "shape": shape_name,
                        "num_tokens": num_tokens,
                        "kernel": name,
                        "time_s": time_s,
                        "floor_s": floor_s,
                    }
                )
    if "OUT" in os.environ:
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_bytes_per_s": bandwidth,
            "rows": rows,
        }
        (Path(os.environ["OUT"]) / "decode_kernels.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
