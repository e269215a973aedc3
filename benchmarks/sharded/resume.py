"""Whether a checkpoint of split state is the same on another number of processes, bit for bit.

    torchrun --nproc_per_node 2 -m benchmarks.sharded.resume write DIRECTORY --shard 2
    torchrun --nproc_per_node 2 -m benchmarks.sharded.resume read  DIRECTORY --shard 1
    python -m benchmarks.sharded.resume read DIRECTORY

`write` trains two steps and saves. Each prints a checksum of every weight and moment, made of whole tensors.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, set_seed

from benchmarks.common.random_model import make_tokenizer
from benchmarks.memory.cases import config_of
from benchmarks.step.run import is_main_process, num_processes, reward
from colocate import GRPOConfig, GRPOTrainer
from colocate.checkpoints.snapshot import checksum
from colocate.weights.weight_parts import whole_tensor

NUM_COMPLETIONS, NUM_STEPS = 8, 2


def make_trainer(directory: Path, shape: str, shard: Any) -> GRPOTrainer:
    config, rng = config_of(shape), random.Random(0)
    words = [" ".join(f"w{rng.randrange(10, config.vocab_size)}" for _ in range(16)) for _ in range(8)]
    on_gpu = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=str(directory),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=NUM_COMPLETIONS // num_processes(),
        num_generations=4,
        max_completion_length=16,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        shard=shard,
        report_to="none",
        save_strategy="steps",
        save_steps=NUM_STEPS,
        disable_tqdm=True,
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    dataset = Dataset.from_dict({"prompt": words})
    return GRPOTrainer(model, reward, args, dataset, processing_class=make_tokenizer(config.vocab_size))


def checksums(trainer: GRPOTrainer) -> dict[str, str]:
    """Of every whole weight and moment; all ranks must call it together."""
    tensors = trainer.policy.optimizer.tensors()
    wholes = {name: whole_tensor(tensor) for name, tensor in tensors.items()}
    return {name: checksum([tensor]) for name, tensor in sorted(wholes.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("write", "read"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--tiny", action="store_true", help="a small model instead, to try the script")
    parser.add_argument("--shard", default="auto")
    options = parser.parse_args()
    trainer = make_trainer(options.directory, "cpu" if options.tiny else options.shape, options.shard)
    if options.part == "write":
        trainer.train()
    else:
        trainer.load_checkpoint(options.directory / f"checkpoint-{NUM_STEPS}")
    found = checksums(trainer)
    if is_main_process():
        print(json.dumps({"num_processes": num_processes(), "shard": options.shard, "checksums": found}))


if __name__ == "__main__":
    main()
