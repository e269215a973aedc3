"""One rank of two that split the weights, for test_gpu_tensor_parallel.py: `<this file> <directory>`.

Writes what both drew together as `<case>-<rank>.pt`, and what the ways to add up made of given numbers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from engine_models import make_lora, make_model, make_prompts

from colocate.engines.native import all_reduce
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.gathered_engine import GatheredEngine
from colocate.parallel.mesh import DecodeMesh, Mesh
from colocate.types import Completion, SamplingParams
from colocate.weights.layouts import WeightPart, layout_for
from colocate.weights.weight_parts import split_weights

# Parts of four blocks of the sampler; 8 query heads and 4 key-value heads of 64 values.
SIZES: dict[str, Any] = dict(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, vocab_size=2048, max_position_embeddings=512, initializer_range=0.05,
)  # fmt: skip
MODELS = {
    "biases": lambda: make_model("llama-biases", **SIZES),
    "lora": lambda: make_lora("qwen3", **{**SIZES, "head_dim": 64}),
    "bfloat16": lambda: make_model("qwen2", **SIZES).bfloat16(),
}
SHOTS = {"nccl": (0, 0), "one-shot": (2**30, 2**30), "two-shot": (0, 2**30), "both": (64 * 512 * 4, 2**30)}
"""Largest sum of one shot, and of symmetric memory, in bytes. "both": beyond 64 rows two shots."""
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0),
    "drawn": SamplingParams(max_tokens=24, temperature=0.8, seed=2**40 + 3),
    "filtered": SamplingParams(
        max_tokens=24, seed=5, top_k=40, top_p=0.9, stop_token_ids=tuple(range(0, 2048, 20))
    ),
}
PROMPTS = make_prompts([1, 29, 300, 16, 97], 18)
"""Ninety completions: steps of 128, 64, 32 and 8 rows."""


def kept(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


class Recorder:
    """What both ranks drew together in the last rollout."""

    def __init__(self) -> None:
        self.drawn: list[tuple[Any, ...]] = []
        finish = NativeEngine._finish

        def recorded(engine: NativeEngine) -> None:
            finish(engine)
            ended = engine._submissions.ended
            self.drawn = kept([ended[number] for number in sorted(ended)])

        NativeEngine._finish = recorded  # type: ignore[method-assign]


def rollouts(name: str, mesh: Mesh, recorder: Recorder) -> dict[str, Any]:
    """Rollouts with captured graphs; then the weights change in place, and move on one rank alone."""
    rank, device = mesh.weight_part, torch.device("cuda", mesh.weight_part)
    model = MODELS[name]().to(device)
    split_weights(model, WeightPart(rank, 2))
    engine = NativeEngine(model, group=mesh.weight_group, page_size=16)
    prompts = PROMPTS[rank * 3 : 3 + rank * 2]
    found: dict[str, Any] = {"kind": type(engine._parallel._sum).__name__}

    def generate(kind: str, name: str | None = None) -> None:
        engine.wake_up()
        own = kept(engine.generate(prompts, SAMPLINGS[kind]))
        first = 54 * rank
        assert own == recorder.drawn[first : first + len(own)]
        found[name or kind] = recorder.drawn
        engine.sleep()

    for kind in SAMPLINGS:
        generate(kind)
    generate("greedy", "greedy again")
    found["graphs"] = engine._decoder.num_graphs
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        generate("greedy", "after a step")
        if rank == 1:
            moved = layout_for(model).layers[1].o
            weight = getattr(moved, "base_layer", moved).weight
            weight.data = weight.data.t().clone().t()
        generate("greedy", "after a move")
    gated, num_calls = engine._backend.gated_linear, 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if rank == 1 and num_calls == 3:
            raise torch.OutOfMemoryError("injected")
        return gated(*arguments)

    engine._backend.gated_linear = failing  # type: ignore[method-assign]
    generate("greedy", "after a shortage")
    engine.close()
    return found


def gathered(name: str, mesh: Mesh) -> dict[str, Any]:
    """What a rank draws alone from weights that it gathers for each rollout, and the memory they take."""
    rank, device = mesh.weight_part, torch.device("cuda", mesh.weight_part)
    model = MODELS[name]().to(device)
    split_weights(model, WeightPart(rank, 2))
    engine = GatheredEngine(model, DecodeMesh.of(mesh, 1), page_size=16)
    found: dict[str, Any] = {"bytes": []}

    def generate(kind: str, name: str | None = None) -> None:
        asleep = engine.rollout_weight_bytes
        engine.wake_up()
        found["bytes"].append((asleep, engine.rollout_weight_bytes))
        found[name or kind] = kept(engine.generate(PROMPTS, SAMPLINGS[kind]))
        engine.sleep()

    for kind in (*SAMPLINGS, "greedy"):  # another way to draw forgets the graphs of the last one
        generate(kind)
    graphs = set(engine._decoder._graphs.values())
    generate("greedy", "greedy again")
    found["graphs"], found["more graphs"] = len(graphs), len({*engine._decoder._graphs.values()} - graphs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    generate("greedy", "after a step")
    engine.close()
    return found


def sums(mesh: Mesh) -> list[tuple[str, float, bool]]:
    """For sums of many sizes: the largest error in units of rounding, and whether both ranks have one result.

    Eager and from a graph, and so soon after one another that a rank may not be late.
    """
    device, group = torch.device("cuda", mesh.weight_part), mesh.weight_group
    assert group is not None
    added = all_reduce.make_sum(group, device, num_bytes=512 * 3584 * 4, num_rows=512)
    results = []
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-23)):
        for rows in (1, 2, 8, 37, 128, 512, 700):
            generator = torch.Generator(device).manual_seed(rows + mesh.weight_part)
            partial = torch.randn(rows, 3584, generator=generator, device=device).to(dtype)
            exact = all_reduce.GroupSum(group).gather(partial).double().sum(0)
            totals = [added.sum(partial.clone()).clone() for _ in range(20)]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = [added.sum(partial.clone()).clone() for _ in range(20)]
            graph.replay()
            graph.replay()
            for total in (*totals, *captured):
                error = ((total.double() - exact).abs() / exact.abs().clamp(min=1)).max().item() / unit
                results.append((f"{rows} rows of {dtype}", error, added.is_equal_everywhere(total)))
    rows = torch.full((90, 4), float(mesh.weight_part + 1), device=device)
    rows[:, 0], rows[:, 1] = -torch.inf, 2.0**24 - 1
    expected = torch.stack([rows, rows])
    expected[:, :, 2:] = torch.tensor([1.0, 2.0], device=device).view(2, 1, 1)
    is_right = all(torch.equal(added.gather(rows[:n]), expected[:, :n]) for n in (90, 1, 17, 90))
    return [*results, ("gathers", 0.0, is_right)]


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mesh, recorder = Mesh.of("cuda", 2), Recorder()
    for shots, (one_shot, symmetric) in SHOTS.items():
        all_reduce.ONE_SHOT_BYTES, all_reduce.SYMMETRIC_BYTES = one_shot, symmetric
        torch.save(sums(mesh), directory / f"sums-{shots}-{rank}.pt")
        for name in MODELS:
            torch.save(rollouts(name, mesh, recorder), directory / f"{name}-{shots}-{rank}.pt")
    for name in ("biases", "bfloat16"):
        torch.save(gathered(name, mesh), directory / f"{name}-gathered-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
