"""Rollouts of one case in 16 and in 8 bits: seconds of every repetition, in turns.

    python -m benchmarks.precision.speed 7b_256seq --out record.json

Random weights and prompts, temperature 1, no stop tokens. A warm-up, which captures the graphs, is not part
of a repetition. Besides the whole rollout, the decoding is timed: from the fourth look at the device, when
all sequences decode, to the end. The engines of all precisions read the same weights.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.results import origin
from benchmarks.precision.cases import MEASURED, PRECISIONS, SPEED_CASES, STEPS_PER_LOOK, tiny
from benchmarks.rollout.cases import SHAPES, Case
from colocate.engines.native.engine import NativeEngine
from colocate.types import Prompt, SamplingParams

NUM_SKIPPED = 4
"""Looks at the device that are not counted as decoding: prompts are read, and windows begin to overlap."""


def model_of(size: str) -> Qwen2ForCausalLM:
    """A model of random weights in bf16, made where it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen2Config(**SHAPES[size], max_position_embeddings=32768, rope_theta=1e6, dtype="bfloat16")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def begin(engine: NativeEngine, case: Case, seed: int) -> list[int]:
    """Submit all of the case's sequences, none of whose prompts is remembered; returns their numbers."""
    engine.update_weights(version=engine.policy_version + 1)
    prompts = [Prompt(tuple(ids), key, range(case.num_generations)) for key, ids in enumerate(case.prompts())]
    return engine.submit(prompts, SamplingParams(case.completion_tokens, temperature=1.0, seed=seed))


def warm_up(engine: NativeEngine, case: Case) -> None:
    """Capture the graphs of full steps, with tables for the full length."""
    numbers = begin(engine, case, seed=0)
    for _ in range(NUM_SKIPPED):
        engine.poll()
    engine.abort(numbers)


def rollout(engine: NativeEngine, case: Case, seed: int) -> dict[str, Any]:
    """Complete all prompts.

    Raises:
        RuntimeError: another number of tokens came than was asked for.
    """
    moments, drawn = [time.perf_counter()], 0
    begin(engine, case, seed)
    while engine.is_busy:
        drawn += sum(len(completion.token_ids) for completion in engine.poll().values())
        moments.append(time.perf_counter())
    expected = case.num_seqs * case.completion_tokens
    if drawn != expected:
        raise RuntimeError(f"{expected} tokens were asked for and {drawn} came.")
    return {
        "seconds": moments[-1] - moments[0],
        "tokens_per_s": drawn / (moments[-1] - moments[0]),
        "decode_s_per_look": (moments[-1] - moments[NUM_SKIPPED]) / (len(moments) - 1 - NUM_SKIPPED),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=SPEED_CASES)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="the case made tiny, to try the script")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    case = tiny(SPEED_CASES[options.case]) if options.tiny else SPEED_CASES[options.case]
    model = model_of(case.model)
    record: dict[str, Any] = {"kind": "speed", **origin(), "case": options.case, **vars(case), "runs": {}}
    for precision in options.precisions or MEASURED[options.case]:
        engine = NativeEngine(model, max_num_seqs=case.num_seqs, rollout_precision=precision)
        engine.wake_up()
        warm_up(engine, case)
        runs = [rollout(engine, case, seed=1 + number) for number in range(options.repetitions)]
        memory = {"kv_cache_bytes": engine.kv_cache_bytes, "weight_bytes": engine.rollout_weight_bytes}
        record["runs"][precision] = {"repetitions": runs, **memory}
        print(options.case, precision, *(f"{run['seconds']:.3f}" for run in runs), memory, flush=True)
        for run in runs:
            print(f"  {run['decode_s_per_look'] * 1e3 / STEPS_PER_LOOK:.3f} ms a step", flush=True)
        engine.close()
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
