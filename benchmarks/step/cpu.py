"""GRPO steps on a CPU: colocate beside TRL with transformers generation, same model, same work, taking turns.

    python -m benchmarks.step.cpu [--rounds 3] [--steps 4]

Random weights: speed does not depend on their values. Both libraries run their own `train()` with the same
options, prompts, group size and lengths. A round is one run of each; its first step (warm-up) is not counted.
Rollout is the time to generate; training is everything else in a step (rewards are free here).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.results import committed, write_result

SHAPE = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
WORK = dict(
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=128,
    temperature=1.0,
    learning_rate=1e-6,
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
PROMPT_TOKENS = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, SHAPE["vocab_size"])}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, eos_token_id=1, pad_token_id=0))


def make_prompts() -> Dataset:
    words = torch.randint(
        2, SHAPE["vocab_size"], (64, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in words.tolist()]})


def num_words(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def run_colocate(num_steps: int, directory: str) -> list[dict[str, float]]:
    from colocate import GRPOConfig, GRPOTrainer

    args = GRPOConfig(output_dir=directory, max_steps=num_steps, **WORK)
    GRPOTrainer(make_model(), num_words, args, make_prompts(), processing_class=make_tokenizer()).train()
    records = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "step_s": record["wall_s"],
            "rollout_s": record["phases"]["rollout"],
            "completion_tokens": record["completions/mean_length"] * WORK["per_device_train_batch_size"],
        }
        for record in records
    ]


def run_trl(num_steps: int, directory: str) -> list[dict[str, float]]:
    import trl

    rollout_seconds: list[float] = []

    class Timed(trl.GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            rollout_seconds.append(time.perf_counter() - start_s)
            return result

    args = trl.GRPOConfig(output_dir=directory, max_steps=num_steps, **WORK)
    trainer = Timed(make_model(), num_words, args, make_prompts(), processing_class=make_tokenizer())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "step_time" in entry]
    return [
        {
            "step_s": entry["step_time"],
            "rollout_s": rollout_s,
            "completion_tokens": entry["completions/mean_length"] * WORK["per_device_train_batch_size"],
        }
        for entry, rollout_s in zip(logs, rollout_seconds, strict=True)
    ]


def medians(repetitions: list[dict[str, Any]], framework: str) -> dict[str, float]:
    steps = [r for r in repetitions if r["framework"] == framework]
    return {
        "rollout_tokens_per_s": statistics.median(r["completion_tokens"] / r["rollout_s"] for r in steps),
        "training_tokens_per_s": statistics.median(
            (r["completion_tokens"] + PROMPT_TOKENS * WORK["per_device_train_batch_size"])
            / (r["step_s"] - r["rollout_s"])
            for r in steps
        ),
        "step_s": statistics.median(r["step_s"] for r in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps a round, the warm-up included")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    commit = committed()
    repetitions = []
    for number in range(options.rounds):
        for framework, run in (("trl", run_trl), ("colocate", run_colocate)):
            with tempfile.TemporaryDirectory() as directory:
                steps = run(options.steps, directory)[1:]
            repetitions += [{"framework": framework, "round": number, **step} for step in steps]
    ours, theirs = medians(repetitions, "colocate"), medians(repetitions, "trl")
    claims = {
        "rollout_tokens_per_s": ours["rollout_tokens_per_s"],
        "training_tokens_per_s": ours["training_tokens_per_s"],
        "rollout_vs_trl": ours["rollout_tokens_per_s"] / theirs["rollout_tokens_per_s"],
        "training_vs_trl": ours["training_tokens_per_s"] / theirs["training_tokens_per_s"],
        "step_vs_trl": theirs["step_s"] / ours["step_s"],
    }
    path = write_result(
        "step", "cpu", claims, repetitions, commit, shape=SHAPE, work=WORK, prompt_tokens=PROMPT_TOKENS,
        num_threads=torch.get_num_threads(),
    )  # fmt: skip
    print(json.dumps(claims, indent=1))
    print(path)


if __name__ == "__main__":
    main()
