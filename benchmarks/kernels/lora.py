"""What LoRA adds to the matrix products of a decode step.

    python -m benchmarks.kernels.lora --hardware h200 [--rank 32]

The step: all projections of the 28 layers of Qwen2.5-7B, each with weights and adapters of its own, and the
norms and activations that read them, in one CUDA graph; without adapters, and with them on every projection
as the engine does it and as PyTorch's matrix products do. Writes results/decode-lora-<hardware>.json; each
repetition of a step is a median of many replays. The claims are the seconds that adapters add to a step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.common.results import committed, machine, write_result
from benchmarks.common.timing import captured, median_s
from colocate.engines.native.torch_backend import TorchBackend
from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.layer.norms import add_rms_norm
from colocate.weights.adapters import AdaptedLinear, Adapter, AdapterStack

NUM_LAYERS, HIDDEN, INTERMEDIATE, KV_WIDTH = 28, 3584, 18944, 512
PROJECTIONS = {  # inputs, outputs of the layers that read them
    "qkv": (HIDDEN, (HIDDEN, KV_WIDTH, KV_WIDTH)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INTERMEDIATE, INTERMEDIATE)),
    "down": (INTERMEDIATE, (HIDDEN,)),
}
NUM_ROWS = (8, 32, 128, 512)
REPETITIONS = 3
SILU = torch.nn.SiLU()

Weights = tuple[torch.Tensor, AdapterStack]


WAYS = {"engine": TritonBackend, "matrix products": TorchBackend}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype) * 0.02


def make(name: str, rank: int) -> Weights:
    num_in, widths = PROJECTIONS[name]
    adapters, first = [], 0
    for width in widths:
        a, b = normal(rank, num_in, dtype=torch.float32), normal(width, rank, dtype=torch.float32)
        adapters.append((slice(first, first + width), Adapter(a=a, b=b, bias=None, scaling=2.0, dropout=0.0)))
        first += width
    stack = AdapterStack.of(adapters)
    assert stack is not None, f"the adapters of {name} cannot be stacked"
    return normal(first + stack.num_rows, num_in), stack


def call(linear: Callable, x: torch.Tensor, weights: Weights):
    weight, stack = weights
    adapters = list(zip(stack.columns, stack.adapters, strict=True))
    return linear(x, AdaptedLinear(weight, None, adapters, stack))


def step(
    backend: TorchBackend, layers: list[dict[str, Weights]], inputs: dict[str, torch.Tensor], adapted: bool
) -> Callable[[], None]:
    norm, residual = normal(HIDDEN), torch.zeros_like(inputs["o"])

    def body() -> None:
        for layer in layers:
            for name, weights in layer.items():
                if not adapted:
                    output, low_rank = F.linear(inputs[name], weights[0][: -weights[1].num_rows]), None
                elif name == "gate_up":
                    output, low_rank = call(backend.linear_in_two_terms, inputs[name], weights)
                else:
                    output = call(backend.linear, inputs[name], weights)
                if name == "gate_up":
                    backend.gate(SILU, output, low_rank)
                elif name != "qkv":
                    add_rms_norm(output, residual, norm, 1e-6)

    return body


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", help="name of the result")
    parser.add_argument("--rank", type=int, default=32)
    options = parser.parse_args()
    rank, commit = options.rank, committed()
    torch.manual_seed(0)
    layers = [{name: make(name, rank) for name in PROJECTIONS} for _ in range(NUM_LAYERS)]
    steps, claims = [], {}
    print(f"{torch.cuda.get_device_name()}, rank {rank}: milliseconds of a step's projections")
    print(f"{'rows':>5}{'no adapters':>14}" + "".join(f"{way:>22}" for way in WAYS))
    for num_rows in NUM_ROWS:
        inputs = {name: normal(num_rows, num_in) for name, (num_in, _) in PROJECTIONS.items()}
        graphs = {"no adapters": captured(step(TritonBackend(), layers, inputs, False))}
        for way, backend in WAYS.items():
            graphs[way] = captured(step(backend(), layers, inputs, True))
        repetitions = [
            {way: median_s(graph.replay) for way, graph in graphs.items()} for _ in range(REPETITIONS)
        ]
        times = {way: statistics.median(times[way] for times in repetitions) for way in graphs}
        adds = {way: times[way] - times["no adapters"] for way in WAYS}
        print(
            f"{num_rows:5}{times['no adapters'] * 1e3:14.3f}"
            + "".join(f"{times[way] * 1e3:12.3f} (+{adds[way] * 1e3:.3f})" for way in WAYS),
            flush=True,
        )
        steps += [{"num_rows": num_rows, "time_s": times} for times in repetitions]
        claims |= {f"{way}_adds_s_{num_rows}_rows".replace(" ", "_"): adds[way] for way in WAYS}
    print(write_result("decode-lora", options.hardware, claims, steps, commit, rank=rank, machine=machine()))


if __name__ == "__main__":
    main()
