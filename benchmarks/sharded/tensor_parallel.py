"""Two GPUs that decode together beside one: the gap of log-probs, and what adding up takes of a decode step.

    torchrun --nproc_per_node 2 -m benchmarks.sharded.tensor_parallel MODEL_DIR --out record.json

Both draw completions of the same prompts, and the trainer's packed forward with whole weights is asked about
them: the gap is the mean of |engine - trainer| over all completion tokens. Then a rollout is profiled; the
share is that of the kernels that add up over GPUs, in the time in which any kernel ran.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.results import origin
from benchmarks.rollout.cases import LOGPROBS_CASE, Case, tiny
from benchmarks.rollout.logprobs import ask_trainer, complete_natively, gap, load_model
from colocate.engines.native.engine import NativeEngine
from colocate.parallel.mesh import Mesh
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import split_weights

SUMS = ("shot_all_reduce", "AllReduce", "allreduce")
"""What is in the names of kernels that add up over GPUs."""
PROFILED = Case("7b", 64, 8, 256, 64)


def prompts_of(case: Case, rank: int, num_ranks: int) -> list[Prompt]:
    """This rank's share of the prompts."""
    all_prompts = [
        Prompt(tuple(ids), key, range(case.num_generations)) for key, ids in enumerate(case.prompts())
    ]
    share = len(all_prompts) // num_ranks
    return all_prompts[rank * share :][:share]


def generate(engine: NativeEngine, prompts: list[Prompt], num_tokens: int) -> list[Completion]:
    engine.wake_up()
    completions = engine.generate(prompts, SamplingParams(max_tokens=num_tokens, seed=1))
    engine.sleep()
    return completions


def share_of_sums(engine: NativeEngine, prompts: list[Prompt], num_tokens: int) -> dict[str, float]:
    """Seconds of kernels that add up over GPUs, and of all kernels, in the second of two rollouts."""
    generate(engine, prompts, num_tokens)  # captures the graphs
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(engine, prompts, num_tokens)
    kernels = [event for event in profiler.key_averages() if event.self_device_time_total]
    total_s = sum(event.self_device_time_total for event in kernels) / 1e6
    sums_s = sum(e.self_device_time_total for e in kernels if any(name in e.key for name in SUMS)) / 1e6
    return {"sums_s": sums_s, "kernels_s": total_s, "share": sums_s / total_s}


def measure(directory: Path, case: Case, profiled: Case, device: torch.device) -> dict[str, Any]:
    mesh = Mesh.of(device.type, 2)
    model = load_model(directory)
    split_weights(model, WeightPart(mesh.weight_part, 2))
    engine = NativeEngine(model, group=mesh.weight_group, max_num_seqs=case.num_seqs)
    prompts = prompts_of(case, mesh.weight_part, 2)
    completions = generate(engine, prompts, case.completion_tokens)
    engine.close()
    owners = [prompt for prompt in prompts for _ in prompt.samples]
    own = [
        {"prompt": prompt.token_ids, "completion": completion.token_ids, "engine": completion.logprobs}
        for prompt, completion in zip(owners, completions, strict=True)
    ]
    found: dict[str, Any] = {}
    if device.type == "cuda":
        engine = NativeEngine(model, group=mesh.weight_group, max_num_seqs=profiled.num_seqs)
        share = prompts_of(profiled, mesh.weight_part, 2)
        found["decode"] = share_of_sums(engine, share, profiled.completion_tokens)
        engine.close()
    del engine, model
    whole = load_model(directory)
    ask_trainer(whole, own)
    gaps: list[Any] = [None] * 2
    dist.all_gather_object(gaps, gap(own))
    alone = complete_natively(whole, case)
    ask_trainer(whole, alone)
    return found | {"gap_of_two": sum(gaps) / 2, "gap_of_one": gap(alone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    state = PartialState(cpu=not torch.cuda.is_available())
    cases = [tiny(case) if options.tiny else case for case in (LOGPROBS_CASE, PROFILED)]
    record = {"kind": "tensor_parallel", "label": "tp2", **origin(), "model": options.model_dir.name}
    record |= measure(options.model_dir, *cases, state.device)
    if state.is_main_process:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record))


if __name__ == "__main__":
    main()
