"""The least time a decode step can take: its matrix products alone, and every byte of KV read once.

    python -m benchmarks.rollout.floor 1p5b_512seq --out floor.json

The matrix products are those of the step with one token per sequence (a fused qkv, o, a fused gate/up and
down in each layer, and the head), each layer with weights of its own, back to back in one CUDA graph. KV
bytes are those of the mean context over the rollout, prompts once per group, at the rate at which this GPU
copies 4 GiB within its memory (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common.results import origin
from benchmarks.common.timing import captured, copy_bytes_per_s, median_s
from benchmarks.rollout.cases import CASES, SHAPES, Case


def kv_bytes_per_step(case: Case) -> float:
    """Mean over the decode steps; step i (from 1) reads the prompts and i completion tokens per sequence."""
    shape = SHAPES[case.model]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    bytes_per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2
    num_tokens = case.num_prompts * case.prompt_tokens + case.num_seqs * case.completion_tokens / 2
    return num_tokens * bytes_per_token


def matrix_products_s(case: Case) -> float:
    shape = SHAPES[case.model]
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    head_dim = hidden // shape["num_attention_heads"]
    qkv = (shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * head_dim
    options = dict(device="cuda", dtype=torch.bfloat16)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, **options) * 0.02

    layers = [
        [
            weight(qkv, hidden),
            weight(hidden, hidden),
            weight(2 * intermediate, hidden),
            weight(hidden, intermediate),
        ]
        for _ in range(shape["num_hidden_layers"])
    ]
    head = weight(shape["vocab_size"], hidden)
    x, y = torch.randn(case.num_seqs, hidden, **options), torch.randn(case.num_seqs, intermediate, **options)

    def body() -> None:
        for w_qkv, w_o, w_gate_up, w_down in layers:
            F.linear(x, w_qkv)
            F.linear(x, w_o)
            F.linear(x, w_gate_up)
            F.linear(y, w_down)
        F.linear(x, head)

    return median_s(captured(body).replay)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    case = CASES[options.case]
    products_s, bandwidth = matrix_products_s(case), copy_bytes_per_s()
    kv_s = kv_bytes_per_step(case) / bandwidth
    record = {
        "kind": "floor",
        **origin(),
        "case": options.case,
        "matrix_products_s": products_s,
        "copy_bytes_per_s": bandwidth,
        "kv_bytes_per_step": kv_bytes_per_step(case),
        "kv_s": kv_s,
        "floor_s": products_s + kv_s,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
