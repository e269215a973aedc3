"""Two GPUs that decode together beside one: the gap of log-probs, and what adding up takes of a decode step.

    torchrun --nproc_per_node 2 -m benchmarks.sharded.tensor_parallel MODEL_DIR --out record.json

Both draw completions of the same prompts, and the trainer's packed forward with whole weights is asked about
them: the gap is the mean of |engine - trainer| over all completion tokens. Then a rollout is profiled; the
share is that of the kernels that add up over GPUs, in the time in which any kernel ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import PartialState

from benchmarks.common.results import origin
from benchmarks.rollout.cases import LOGPROBS_CASE, Case, tiny
from benchmarks.rollout.logprobs import ask_trainer, complete_natively, gap, load_model
from colocate.engines.native.all_reduce import GroupSum, SymmetricSum
from colocate.engines.native.engine import NativeEngine
from colocate.parallel.mesh import Mesh
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import split_weights

TIMED = Case("7b", 64, 8, 256, 256)
NUM_ROLLOUTS = 3


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


def step_s(engine: NativeEngine, prompts: list[Prompt], num_tokens: int) -> float:
    """Seconds of a decode step: what a rollout takes longer than one of few tokens, by its further tokens."""
    few_tokens = max(1, num_tokens // 16)
    for count in (num_tokens, few_tokens):  # captures the graphs
        generate(engine, prompts, count)
    seconds: dict[int, list[float]] = {num_tokens: [], few_tokens: []}
    for _ in range(NUM_ROLLOUTS):
        for count, found in seconds.items():
            dist.barrier()
            begin_s = time.perf_counter()
            generate(engine, prompts, count)
            found.append(time.perf_counter() - begin_s)
    long_s, short_s = (statistics.median(found) for found in seconds.values())
    return (long_s - short_s) / (num_tokens - few_tokens)


def share_of_sums(
    make_engine: Callable[[], NativeEngine], prompts: list[Prompt], num_tokens: int
) -> dict[str, float]:
    """Seconds of a decode step, of one that leaves out the sums over GPUs, and the share that the sums take.

    Without sums the tokens are other ones, which takes no other time: every completion has `num_tokens`.
    """

    def measured() -> float:
        engine = make_engine()
        seconds = step_s(engine, prompts, num_tokens)
        engine.close()
        return seconds

    with_s = measured()
    with ExitStack() as without:
        for kind in (GroupSum, SymmetricSum):
            without.enter_context(mock.patch.object(kind, "sum", lambda _, own: own))
        without_s = measured()
    return {"step_s": with_s, "step_without_s": without_s, "share": 1 - without_s / with_s}


def measure(directory: Path, case: Case, timed: Case, device: torch.device) -> dict[str, Any]:
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
    found: dict[str, Any] = {
        "decode": share_of_sums(
            partial(NativeEngine, model, group=mesh.weight_group, max_num_seqs=timed.num_seqs),
            prompts_of(timed, mesh.weight_part, 2),
            timed.completion_tokens,
        )
    }
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
    case, timed = (tiny(case) if options.tiny else case for case in (LOGPROBS_CASE, TIMED))
    record = {"kind": "tensor_parallel", "label": "tp2", **origin(), "model": options.model_dir.name}
    record |= measure(options.model_dir, case, timed, state.device)
    if state.is_main_process:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record))


if __name__ == "__main__":
    main()
