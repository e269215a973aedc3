"""Which of TRL's settings trains fastest: the training half of its step, with every candidate in turn.

    python -m benchmarks.step.tune --comparison 1p5b --out record.json

TRL's own `GRPOTrainer` trains on completions that its `rollout_func` makes up, so that no engine has to start
for each candidate: the settings only concern training. A quarter of the case's prompts is enough, since what
is compared is seconds per completion. A candidate that fails (out of memory, a missing package) is recorded
with its error.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import origin
from benchmarks.rollout.cases import TOKEN_RANGE, model_directory
from benchmarks.step.cases import COMPARISONS, TUNING_SHARE, PeerSettings, Work, tiny
from benchmarks.step.run import StepClock, load_tokenizer, peft_config, prompts, reward, settings

WARM_UP, STEPS = 1, 1


def made_up_rollout(work: Work) -> Any:
    """A `rollout_func` of TRL: random completions of the work's length."""
    rng = random.Random(0)

    def rollout(rows: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(rows)["input_ids"]
        completion_ids = [
            [rng.randrange(*TOKEN_RANGE[work.model]) for _ in range(work.new_tokens)] for _ in rows
        ]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    return rollout


def seconds_per_step(candidate: PeerSettings, work: Work, model_dir: Path) -> list[float]:
    """Of the steps after the warm-up."""
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    options = argparse.Namespace(
        warm_up=WARM_UP,
        steps=STEPS,
        micro_batch=min(candidate.micro_batch, work.num_completions),
        gradient_checkpointing=candidate.gradient_checkpointing,
        option={},
    )
    clock = StepClock()
    with tempfile.TemporaryDirectory() as directory:
        args = GRPOConfig(
            **settings(options, work, directory),
            model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32", "attn_implementation": "sdpa"},
            use_liger_kernel=candidate.liger and on_gpu,
        )
        trainer = GRPOTrainer(
            str(model_directory(model_dir, work.model)),
            reward,
            args,
            prompts(work, work.num_prompts * args.max_steps),
            processing_class=load_tokenizer(model_directory(model_dir, work.model), work),
            callbacks=[clock],
            peft_config=peft_config(work),
            rollout_func=made_up_rollout(work),
        )
        trainer.train()
    return clock.step_s()[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparison", choices=COMPARISONS, required=True)
    parser.add_argument("--tiny", action="store_true", help="the work made tiny, to try the script")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    comparison = COMPARISONS[options.comparison]
    work = comparison.work
    work = (
        tiny(work)
        if options.tiny
        else dataclasses.replace(work, num_prompts=work.num_prompts // TUNING_SHARE)
    )
    model_directory(options.model_dir, work.model)
    record: dict[str, Any] = {
        "kind": "tune",
        "comparison": options.comparison,
        **origin(),
        "work": dataclasses.asdict(work),
        "candidates": [],
    }
    for candidate in comparison.candidates:
        if work.num_completions % candidate.micro_batch and not options.tiny:
            raise SystemExit(f"A micro-batch of {candidate.micro_batch} does not divide {work}.")
        entry: dict[str, Any] = dataclasses.asdict(candidate)
        try:
            entry["step_s"] = seconds_per_step(candidate, work, options.model_dir)
        except Exception as error:  # whatever keeps a candidate from running, the others are tried
            entry["error"] = f"{type(error).__name__}: {error}"[:500]
        gc.collect()  # a trainer is full of cycles
        if torch.cuda.is_available():
            entry["torch_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        record["candidates"].append(entry)
        print(entry, flush=True)
        # Candidate by candidate, so that a time limit does not take all of them.
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
