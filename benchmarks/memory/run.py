"""One run of the memory benchmark, in a process of its own (`suite.py` starts it and watches the GPU).

    python -m benchmarks.memory.run --model llama-3.1-8b --method qlora --generations 2 --length 47500

Two GRPO steps of the library's `GRPOTrainer` with one prompt: rollout by the native engine, reward, forward,
backward, optimizer. A sequence of `--length` tokens can be divided in two ways:

- decoded (the default): all but the last `--new-tokens` are the prompt, and those are generated. The KV
  cache then holds the whole sequences, the prompt once for all completions. To decode tens of thousands of
  tokens one by one would take many minutes.
- `--teacher-forced`: the prompt has 512 tokens and the completions all others, made up instead of generated.
  Training then has nothing to share: it sees every token of every sequence and takes log-probs of nearly all.

Under torchrun each process takes its share of the completions, and the first prints the record.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PretrainedConfig

from benchmarks.common.random_model import make_tokenizer
from benchmarks.memory.cases import LORA_RANK, config_of, make_model
from benchmarks.step.cases import LORA_TARGETS
from benchmarks.step.run import assignment, is_main_process, num_processes, reward
from colocate import GRPOConfig, GRPOTrainer
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import random_parts

TEACHER_FORCED_PROMPT_TOKENS = 512
NUM_STEPS = 2
FIRST_WORD = 10


def divided(length: int, new_tokens: int, teacher_forced: bool) -> tuple[int, int]:
    """(prompt tokens, completion tokens) of a sequence."""
    if teacher_forced:
        return TEACHER_FORCED_PROMPT_TOKENS, length - TEACHER_FORCED_PROMPT_TOKENS
    return length - new_tokens, new_tokens


def force_completions(trainer: GRPOTrainer, vocab_size: int) -> None:
    """From now on the engine's completions are made up: of full length, without log-probs."""
    rng = random.Random(0)

    def generate(prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        return [
            Completion(
                token_ids=tuple(rng.randrange(FIRST_WORD, vocab_size) for _ in range(sampling.max_tokens)),
                logprobs=None,
                finish_reason="length",
                policy_version=trainer.policy.version,
            )
            for prompt in prompts
            for _ in prompt.samples
        ]

    trainer.engine.generate = generate  # type: ignore[method-assign]


def predicted(trainer: GRPOTrainer) -> dict[str, Any]:
    """What the planner says of this run: from shapes and options, as `colocate plan` does."""
    planner: Any = trainer.policy.planner
    assert planner is not None, "there is a GPU and a layout"
    plan = planner.plan()
    return {
        # PyTorch and the engine keep memory that nobody else asks for: this is what the driver shows.
        "predicted_peak_bytes": plan.occupied_bytes,
        "predicted_need_bytes": plan.peak_bytes,
        "predicted_rows": [[row.phase, row.moment, row.name, row.size_bytes] for row in plan.rows],
        "planned": vars(plan.train_plan),
    }


def train(options: argparse.Namespace, config: PretrainedConfig, device: torch.device) -> dict[str, Any]:
    """Make the model, train, and say what PyTorch and the trainer's own timeline saw."""
    prompt_tokens, new_tokens = divided(options.length, options.new_tokens, options.teacher_forced)
    vocab_size = config.get_text_config().vocab_size
    rng = random.Random(1)
    words = [" ".join(f"w{rng.randrange(FIRST_WORD, vocab_size)}" for _ in range(prompt_tokens))]
    peft_config = None
    if options.method != "full":
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
        )
    start_s = time.perf_counter()
    num_parts = dict(options.option).get("shard", 1)
    if num_parts in (1, "auto", "none"):
        model = make_model(config, options.method, device)
    else:  # a model that no GPU could hold whole
        part = WeightPart(int(os.environ["RANK"]) % num_parts, num_parts)
        model = random_parts(config, part, device=device, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as directory:
        args = GRPOConfig(
            output_dir=directory,
            max_steps=NUM_STEPS,
            engine="native",
            per_device_train_batch_size=options.generations // num_processes(),
            num_generations=options.generations,
            max_completion_length=new_tokens,
            max_prompt_length=prompt_tokens,
            max_num_seqs=options.generations,
            vllm_max_model_length=options.length,
            learning_rate=1e-5,
            bf16=True,
            use_cpu=device.type == "cpu",
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **dict(options.option),
        )
        trainer = GRPOTrainer(
            model,
            reward,
            args,
            Dataset.from_dict({"prompt": words * NUM_STEPS}),
            processing_class=make_tokenizer(vocab_size),
            peft_config=peft_config,
        )
        del model
        prediction = predicted(trainer) if device.type == "cuda" else {}
        player = trainer.run.player
        player.sampling = SamplingParams(**{**vars(player.sampling), "stop_token_ids": ()})
        if options.teacher_forced:
            force_completions(trainer, vocab_size)
        made_s = time.perf_counter() - start_s
        trainer.train()
        if not is_main_process():
            return {}
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if not record.get("eval")]
    lengths = {step["completions/mean_length"] for step in steps}
    if lengths != {new_tokens} or any(step["skipped_updates"] for step in steps):
        raise RuntimeError(f"Steps were skipped or have other than {new_tokens} tokens: {steps}")
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "made_s": made_s,
        **prediction,
        "steps": [
            {key: step[key] for key in ("wall_s", "phases", "memory", "grad_norm", "loss")} for step in steps
        ],
        # What the policy ended with: an out-of-memory makes it smaller.
        "train_plan": vars(trainer.policy.plan),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=("full", "lora", "qlora"), required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of prompt and completion")
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--teacher-forced", action="store_true")
    parser.add_argument("--option", type=assignment, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to try the script")
    return parser.parse_args()


def main() -> None:
    options = parse()
    config = config_of("tiny" if options.tiny else options.model)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    record = train(options, config, device)
    if not is_main_process():
        return
    if device.type == "cuda":
        record["torch_peak_allocated_bytes"] = max(
            span["peak_allocated_bytes"] for step in record["steps"] for span in step["memory"]["spans"]
        )
        record["torch_reserved_bytes"] = torch.cuda.memory_reserved()
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
