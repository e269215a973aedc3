"""Attention of a training step, forward and backward: cuDNN's against PyTorch's FlashAttention-2 kernels.

    python -m benchmarks.kernels.attention [--hardware h200]

Packs in bfloat16 as training has them: every run with itself, and the completions of shared prompts with
these. TFLOP/s count 4 · D per query head and pair of a query and a key that it sees, forward, and 2.5 times
that backward. Writes results/attention-<hardware>.json; its claims are ratios of median seconds,
FlashAttention's over cuDNN's, forward and backward together.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.results import committed, machine, write_result
from colocate.policy.attention import attention, cudnn_attention
from colocate.policy.attention.pack import Runs

NUM_TIMED = 10
# Query heads, key heads, head size, lengths of the queries' runs, of the keys' (None: with themselves).
CASES: dict[str, tuple[int, int, int, list[int], list[int] | None]] = {
    "1.5B, 4 groups of 256 + 8 x 512: own": (12, 2, 128, [256] * 4 + [512] * 32, None),
    "1.5B, 4 groups of 256 + 8 x 512: to prompts": (12, 2, 128, [4096] * 4, [256] * 4),
    "1.5B, a group of 4096 + 16 x 512: own": (12, 2, 128, [4096] + [512] * 16, None),
    "1.5B, a group of 4096 + 16 x 512: to prompts": (12, 2, 128, [8192], [4096]),
    "7B, 2 groups of 512 + 8 x 1024: own": (28, 4, 128, [512] * 2 + [1024] * 16, None),
    "7B, 2 groups of 512 + 8 x 1024: to prompts": (28, 4, 128, [8192] * 2, [512] * 2),
    "7B, ragged: own": (28, 4, 128, [300, 17, 1, 999, 512, 64, 128, 2000] * 3, None),
    "0.5B, a group of 512 + 8 x 1024: own": (14, 2, 64, [512] + [1024] * 8, None),
    "32B, 12288: own": (64, 8, 128, [12288], None),
    "8B, 46476: own": (32, 8, 128, [46476], None),
}
WAYS = {"flash": False, "cudnn": True}


def seconds(call: Callable[[], object]) -> list[float]:
    for _ in range(2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]


def measure(name: str) -> dict[str, Any]:
    num_heads, num_kv_heads, head_size, queries, keys = CASES[name]
    runs, device = Runs.of(queries, keys, torch.device("cuda")), torch.device("cuda")

    def normal(num_tokens: int, heads: int) -> Tensor:
        return torch.randn(num_tokens, heads, head_size, device=device, dtype=torch.bfloat16)

    q, grad = normal(sum(queries), num_heads), normal(sum(queries), num_heads)
    k, v = normal(sum(runs.key_lengths), num_kv_heads), normal(sum(runs.key_lengths), num_kv_heads)
    scale = head_size**-0.5
    pairs = sum(a * b for a, b in zip(runs.query_lengths, runs.key_lengths, strict=True))
    flop = 4 * num_heads * head_size * pairs * (0.5 if keys is None else 1.0)
    record: dict[str, Any] = {"case": name, "forward_flop": flop}
    for way, has_cudnn in WAYS.items():
        cudnn_attention.has_cudnn = lambda *_, has_cudnn=has_cudnn: has_cudnn
        out, lse = attention._forward(q, k, v, runs, scale, None)
        forward = seconds(lambda: attention._forward(q, k, v, runs, scale, None))
        backward = seconds(
            lambda out=out, lse=lse: attention._backward(grad, q, k, v, out, lse, runs, scale, None)
        )
        record[way] = {"forward_s": forward, "backward_s": backward}
    speeds = {
        way: [flop * times / statistics.median(record[way][key]) / 1e12
              for key, times in (("forward_s", 1.0), ("backward_s", 2.5))]
        for way in WAYS
    }  # fmt: skip
    print(
        f"{name:46}" + "".join(f"{way:>8} {a:4.0f} + {b:4.0f}" for way, (a, b) in speeds.items()), flush=True
    )
    return record


def ratio(record: dict[str, Any]) -> float:
    flash, cudnn = (sum(statistics.median(times) for times in record[way].values()) for way in WAYS)
    return flash / cudnn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    options = parser.parse_args()
    if not cudnn_attention.has_cudnn(torch.device("cuda"), torch.bfloat16, 128):
        raise SystemExit("Needs a Hopper GPU, and pip install 'nvidia-cudnn-frontend~=1.18.0'.")
    torch.manual_seed(0)
    commit = committed()
    print(f"{'TFLOP/s, forward + backward':46}")
    records = [measure(name) for name in CASES]
    claims = {f"cudnn_vs_flash {record['case']}": ratio(record) for record in records}
    print(
        write_result(
            "attention", options.hardware, claims, records, commit,
            machine=machine(), cudnn=torch.backends.cudnn.version(),
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
