"""What sharding weights over two GPUs would cost, before it is built: layers gathered by FSDP2, products with
transposed weights, all-reduces in a CUDA graph.

    torchrun --nproc_per_node 2 benchmarks/sharding_probe.py h200x2

Three questions, each with figures of its own in `results/sharding-probe-<hardware>.json`:

- `exposed_*`: how much longer forward and backward over four layers take when FSDP2 shards their weights over
  the two GPUs (gathered one layer ahead, gradients reduced in float32) than with whole weights. The layout
  "fused" has four parameters per layer, all `Shard(0)`, those of o and down transposed; "plain" has
  transformers' seven.
- `transposed_*`: the time of y = x W and its two gradients with W stored as [in, out], over the time with
  W stored as [out, in], for the matrices o and down.
- `all_reduce_*`: microseconds of one all-reduce in a CUDA graph, by NCCL and through symmetric memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.common.results import committed, write_result

REPETITIONS = 7
NUM_LAYERS = 4
SHAPES = {
    # hidden, query heads, key/value heads, intermediate; heads of 128
    "7b": (3584, 28, 4, 18944),
    "32b": (5120, 40, 8, 27648),
}
HEAD_DIM = 128
STEP_TOKENS = {"7b": (4096, 16384), "32b": (4096, 16384)}
DECODE_ROWS = (64, 128, 256, 512)
ALL_REDUCED = ((64, 3584), (256, 3584), (512, 3584), (256, 5120), (512, 5120))


def seconds_of(body: Callable[[], Any], repetitions: int = REPETITIONS) -> list[float]:
    """Seconds of each call of `body`, after two that do not count; all ranks start together."""
    seconds = []
    for _ in range(repetitions + 2):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return seconds[2:]


def in_graph_s(body: Callable[[], Any], calls: int) -> float:
    """Median seconds of one of `calls` calls of `body` within a CUDA graph."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            body()
    return statistics.median(seconds_of(graph.replay)) / calls


# ── Layers ───────────────────────────────────────────────────────────────────────────────────────────────


class PlainLayer(nn.Module):
    """A decoder layer without norms and biases, with the seven matrices that transformers has."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        sizes = {name: (n * HEAD_DIM, hidden) for name, n in zip("qkv", self.heads, strict=True)}
        sizes |= {"o": (hidden, num_heads * HEAD_DIM), "gate": (intermediate, hidden)}
        sizes |= {"up": (intermediate, hidden), "down": (hidden, intermediate)}
        for name, size in sizes.items():
            setattr(self, name, random_parameter(size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, getattr(self, name)) for name in "qkv")
        x = x + F.linear(attend(q, k, v, self.heads), self.o)
        return x + F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class FusedLayer(nn.Module):
    """The same layer with four parameters: qkv and gate_up fused, o and down transposed."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.qkv = random_parameter((sum(self.heads) * HEAD_DIM, hidden))
        self.o_transposed = random_parameter((num_heads * HEAD_DIM, hidden))
        self.gate_up = random_parameter((2 * intermediate, hidden))
        self.down_transposed = random_parameter((intermediate, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv).split([n * HEAD_DIM for n in self.heads], dim=-1)
        x = x + attend(q, k, v, self.heads) @ self.o_transposed
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ self.down_transposed


def random_parameter(size: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, int, int]) -> Tensor:
    """Causal attention over sequences of 2,048 tokens; q, k, v are [tokens, heads × HEAD_DIM]."""
    q, k, v = (x.view(-1, 2048, n, HEAD_DIM).transpose(1, 2) for x, n in zip((q, k, v), heads, strict=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


def layer_times(model: str) -> Iterator[dict[str, Any]]:
    """Forward and backward over `NUM_LAYERS` layers: whole, and sharded in both layouts."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layout, is_sharded in (("fused", False), ("fused", True), ("plain", False), ("plain", True)):
        torch.manual_seed(0)
        make = FusedLayer if layout == "fused" else PlainLayer
        layers = nn.Sequential(*(make(*SHAPES[model]) for _ in range(NUM_LAYERS)))
        if is_sharded:
            for layer in layers:
                fully_shard(layer, mesh=mesh, mp_policy=precision)
            fully_shard(layers, mesh=mesh, mp_policy=precision)
        for num_tokens in STEP_TOKENS[model]:
            x = torch.randn(num_tokens, SHAPES[model][0], device="cuda", dtype=torch.bfloat16) * 0.1

            def step(layers: nn.Module = layers, x: Tensor = x) -> None:
                layers(x).float().square().mean().backward()
                layers.zero_grad()

            yield {
                "question": "layers",
                "model": model,
                "layout": layout,
                "sharded": is_sharded,
                "tokens": num_tokens,
                "seconds": seconds_of(step),
            }
        del layers, step, x
        torch.cuda.empty_cache()


# ── Products ─────────────────────────────────────────────────────────────────────────────────────────────


def product_times(model: str) -> Iterator[dict[str, Any]]:
    """The matrices o and down, whole in training and half of their columns in decode."""
    hidden, num_heads, _, intermediate = SHAPES[model]
    for name, depth in (("o", num_heads * HEAD_DIM), ("down", intermediate)):
        for rows in DECODE_ROWS:
            # Every product reads weights that left the cache long ago, as in a decode step.
            copies = max(2, 2**28 // (hidden * depth))
            weights = torch.randn(copies, hidden, depth // 2, device="cuda", dtype=torch.bfloat16)
            transposed = weights.transpose(1, 2).contiguous()
            x = torch.randn(rows, depth // 2, device="cuda", dtype=torch.bfloat16)
            yield product_record(
                model, name, rows, "decode",
                in_graph_s(lambda w=weights, x=x: [F.linear(x, m) for m in w], 1) / copies,
                in_graph_s(lambda w=transposed, x=x: [x @ m for m in w], 1) / copies,
            )  # fmt: skip
            del weights, transposed
        weight = torch.randn(hidden, depth, device="cuda", dtype=torch.bfloat16)
        transposed = weight.t().contiguous()
        x = torch.randn(16384, depth, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(16384, hidden, device="cuda", dtype=torch.bfloat16)

        def plain(w: Tensor = weight, x: Tensor = x, grad: Tensor = grad) -> None:
            F.linear(x, w), grad @ w, grad.t() @ x

        def stored_transposed(w: Tensor = transposed, x: Tensor = x, grad: Tensor = grad) -> None:
            x @ w, F.linear(grad, w), x.t() @ grad

        yield product_record(
            model, name, 16384, "training", in_graph_s(plain, 4), in_graph_s(stored_transposed, 4)
        )


def product_record(model: str, name: str, rows: int, phase: str, plain_s: float, transposed_s: float) -> Any:
    return {
        "question": "products",
        "model": model,
        "matrix": name,
        "rows": rows,
        "phase": phase,
        "plain_s": plain_s,
        "transposed_s": transposed_s,
    }


# ── All-reduces ──────────────────────────────────────────────────────────────────────────────────────────


def all_reduce_times() -> Iterator[dict[str, Any]]:
    group = dist.group.WORLD.group_name
    for rows, hidden in ALL_REDUCED:
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        shared = symmetric_memory.empty(rows, hidden, device="cuda", dtype=torch.bfloat16)
        symmetric_memory.rendezvous(shared, group)
        shared.normal_()
        ways: dict[str, Callable[[], Any]] = {
            "nccl": lambda x=x: dist.all_reduce(x),
            "one_shot": lambda x=shared: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group),
            "two_shot": lambda x=shared: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group),
        }
        for way, body in ways.items():
            yield {
                "question": "all-reduce",
                "rows": rows,
                "hidden": hidden,
                "way": way,
                "us": in_graph_s(body, 56) * 1e6,
            }


def claims_of(records: list[dict[str, Any]]) -> dict[str, float]:
    claims = {}
    layers = {
        (r["model"], r["layout"], r["tokens"], r["sharded"]): statistics.median(r["seconds"])
        for r in records
        if r["question"] == "layers"
    }
    for (model, layout, tokens, is_sharded), seconds in layers.items():
        if is_sharded:
            whole = layers[model, layout, tokens, False]
            claims[f"exposed_{model}_{layout}_{tokens}tokens"] = round(seconds / whole - 1, 4)
    for r in records:
        if r["question"] == "products":
            name = f"transposed_{r['model']}_{r['matrix']}_{r['phase']}_{r['rows']}rows"
            claims[name] = round(r["transposed_s"] / r["plain_s"], 3)
        if r["question"] == "all-reduce":
            claims[f"all_reduce_{r['way']}_{r['rows']}x{r['hidden']}_us"] = round(r["us"], 1)
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hardware")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    commit = committed()
    records: list[dict[str, Any]] = []

    def note(new: Iterator[dict[str, Any]]) -> None:
        for record in new:
            records.append(record)
            if dist.get_rank() == 0:
                print({key: value for key, value in record.items() if key != "question"}, flush=True)

    note(all_reduce_times())
    for model in SHAPES:
        note(product_times(model))
        note(layer_times(model))
    if dist.get_rank() == 0:
        path = write_result(
            "sharding-probe", options.hardware, claims_of(records), records, commit, num_layers=NUM_LAYERS
        )
        print(path)
    dist.barrier()
    os._exit(0)  # NCCL's communicators of captured graphs can outlive the group


if __name__ == "__main__":
    main()
