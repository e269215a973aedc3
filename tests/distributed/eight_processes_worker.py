"""One rank of the runs in test_eight_processes.py: `eight_processes_worker.py <directory>`.

Trains once for each number of parts that eight processes can split the weights into, and saves each model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from small_runs import make_model, make_trainer

SHARDS = (1, 2, 4, 8)


def share_of_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def build(directory: Path, num_ranks: int, **options: Any) -> Any:
    """The trainer of one of `num_ranks` ranks, of which each has 16 / `num_ranks` of a step's completions."""
    # An eighth of the vocabulary is one block of the sampler, whose noise then does not depend on the parts.
    sizes = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=8, head_dim=8, vocab_size=2048)
    model = make_model("llama", **sizes)
    asked = {"engine": "native", "max_steps": 3, "learning_rate": 3e-3, "num_generations": 4, "beta": 0.1}
    size = {"per_device_train_batch_size": 16 // num_ranks, "gradient_accumulation_steps": 1}
    return make_trainer(directory, model=model, reward_funcs=share_of_even, **asked, **size, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for shard in SHARDS:
        trainer = build(Path(sys.argv[1]) / str(shard), int(os.environ["WORLD_SIZE"]), shard=shard)
        assert trainer.accelerator.num_processes == 8
        trainer.train()
        trainer.save_model()
