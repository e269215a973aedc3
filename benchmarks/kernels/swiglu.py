"""The product of gate and up with SiLU: one kernel against a matrix product and an activation kernel.

    python -m benchmarks.kernels.swiglu [--hardware h200]

Rows are those of captured decode steps, and of a prefill. Either way runs over the weights of several layers
in one CUDA graph, more than fit into the L2 cache; the two ways take turns. Writes
`results/decode-swiglu-<hardware>.json`: seconds of one layer, a median of replays for each repetition.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common.results import committed, write_result
from benchmarks.common.timing import captured, median_s
from benchmarks.rollout.cases import SHAPES
from colocate.kernels.matmul.gate import silu_mul
from colocate.kernels.matmul.swiglu import is_faster, swiglu

NUM_ROWS = (64, 128, 256, 384, 512, 1024, 2048)
NUM_LAYERS = {"0.5b": 24, "1.5b": 14, "7b": 4}
REPETITIONS = 3

Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WAYS: dict[str, Way] = {
    "one kernel": swiglu,
    "two kernels": lambda x, weight: silu_mul(F.linear(x, weight)),
}


def measure(model: str, num_rows: int) -> dict[str, Any] | None:
    """Seconds of one layer by way, and the share of outputs in which the two ways differ.

    None where the engine takes two kernels.
    """
    hidden, intermediate = SHAPES[model]["hidden_size"], SHAPES[model]["intermediate_size"]
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(2 * intermediate, hidden, **options) * 0.02 for _ in range(NUM_LAYERS[model])]
    x = torch.randn(num_rows, hidden, **options)
    if not is_faster(x, weights[0]):
        return None
    one, two = (way(x, weights[0]) for way in WAYS.values())

    def through_all(way: Way) -> Callable[[], None]:
        def body() -> None:
            for weight in weights:
                way(x, weight)

        return body

    graphs = {name: captured(through_all(way)) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _, (name, graph) in itertools.product(range(REPETITIONS), graphs.items()):
        seconds[name].append(median_s(graph.replay) / len(weights))
    return dict(model=model, num_rows=num_rows, seconds=seconds, differing=(one != two).float().mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    options = parser.parse_args()
    commit, rows, claims = committed(), [], {}
    torch.manual_seed(0)
    for model, num_rows in itertools.product(NUM_LAYERS, NUM_ROWS):
        if (row := measure(model, num_rows)) is None:
            continue
        one, two = (statistics.median(row["seconds"][name]) for name in WAYS)
        print(f"{model:5}{num_rows:6}{one * 1e6:9.1f} µs{two * 1e6:9.1f} µs{two / one:7.2f}", flush=True)
        claims[f"speedup_{model.replace('.', 'p')}_{num_rows}rows"] = two / one
        rows.append(row)
    print(write_result("decode-swiglu", options.hardware, claims, rows, commit))


if __name__ == "__main__":
    main()
