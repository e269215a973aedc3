"""The small kernels of a training step beside what their bytes allow.

    python benchmarks/training_kernels.py

One layer's operations at the size of a micro-batch, 16,384 tokens in bfloat16; the floor is the bytes that
must move at the copy bandwidth measured in the same run. Medians of ten replays of a CUDA graph. The table
goes to the terminal, and to $OUT/training_kernels.json if OUT is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from decode_floor import copy_bytes_per_s
from torch import Tensor
from triton.testing import do_bench_cudagraph

from colocate.engines.native.kernels.gate import silu_mul
from colocate.policy.kernels.gate import silu_mul_backward
from colocate.policy.kernels.merge import merge_attention
from colocate.policy.kernels.norms import rms_norm, rms_norm_backward
from colocate.policy.kernels.rotary import rotate, rotate_backward

SHAPES = {  # hidden, i, H, K, D
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128),
    "Qwen2.5-14B": (5120, 13824, 40, 8, 128),
}
NUM_TOKENS = 16_384
EPS = 1e-6

Case = tuple[str, int, Callable[[], object]]
"""Name, bytes that must move, the call."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cases(shape: tuple[int, ...]) -> Iterator[Case]:
    hidden_size, width, num_heads, num_kv_heads, head_dim = shape
    x, grad, residual, weight = *(normal(NUM_TOKENS, hidden_size) for _ in range(3)), normal(hidden_size)
    yield "rms_norm", 2 * x.nbytes, lambda: rms_norm(x, weight, EPS)
    yield "rms_norm_backward", 3 * x.nbytes, lambda: rms_norm_backward(grad, x, weight, EPS)
    yield (
        "rms_norm_backward, residual",
        4 * x.nbytes,
        lambda: rms_norm_backward(grad, x, weight, EPS, residual),
    )

    gate_up, grad_output = normal(NUM_TOKENS, 2 * width), normal(NUM_TOKENS, width)
    yield "silu_mul", 3 * grad_output.nbytes, lambda: silu_mul(gate_up)
    yield "silu_mul_backward", 6 * grad_output.nbytes, lambda: silu_mul_backward(grad_output, gate_up)

    qkv = normal(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = normal(2, NUM_TOKENS, head_dim)
    grads = [normal(NUM_TOKENS, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    turned_bytes = grads[0].nbytes + grads[1].nbytes
    angles_bytes = cos.nbytes + sin.nbytes
    norm = normal(head_dim)
    for suffix, norms in (("", (None, None)), (", head norms", (norm, norm))):
        yield (
            "rotate" + suffix,
            2 * turned_bytes + angles_bytes,
            lambda norms=norms: rotate(qkv, cos, sin, num_heads, *norms, EPS),
        )
        yield (
            "rotate_backward" + suffix,
            2 * qkv.nbytes + angles_bytes + (turned_bytes if suffix else 0),
            lambda norms=norms: rotate_backward(*grads, qkv, cos, sin, *norms, EPS),
        )

    out, other_out = normal(2, NUM_TOKENS, num_heads, head_dim)
    lse, other_lse = torch.randn(2, num_heads, NUM_TOKENS, device="cuda")
    yield (
        "merge_attention",
        3 * (out.nbytes + lse.nbytes),
        lambda: merge_attention(out, lse, other_out, other_lse),
    )


def main() -> None:
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e12:.2f} TB/s")
    print(f"{'shape':14}{'kernel':30}{'µs':>9}{'floor µs':>10}{'GB/s':>8}{'of copy':>9}")
    rows = []
    for shape_name, shape in SHAPES.items():
        for name, num_bytes, call in cases(shape):
            time_s = do_bench_cudagraph(call, return_mode="median") / 1e3
            floor_s = num_bytes / bandwidth
            print(
                f"{shape_name:14}{name:30}{time_s * 1e6:9.1f}{floor_s * 1e6:10.1f}"
                f"{num_bytes / time_s / 1e9:8.0f}{floor_s / time_s:9.0%}",
                flush=True,
            )
            rows.append({"shape": shape_name, "kernel": name, "num_bytes": num_bytes, "time_s": time_s})
    if "OUT" in os.environ:
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_bytes_per_s": bandwidth,
            "num_tokens": NUM_TOKENS,
            "rows": rows,
        }
        (Path(os.environ["OUT"]) / "training_kernels.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
