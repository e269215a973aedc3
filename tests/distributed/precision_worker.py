"""Two processes that split the weights and decode in 8 bits together, for `test_precision_of_ranks.py`.

The first one writes what all prompts were completed with, by precision, to the file that is given.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from engine_models import make_lora, make_prompts, randomise_adapters

from colocate.engines.native.engine import NativeEngine
from colocate.types import Prompt, SamplingParams
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import split_weights

SAMPLING = SamplingParams(max_tokens=10, temperature=0.9, seed=7)
PRECISIONS = ("fp8_kv", "fp8")


def model():
    """A model with adapters and biases, whose heads two ranks can share."""
    made = make_lora("llama-biases", vocab_size=1024, num_key_value_heads=4)
    randomise_adapters(made)
    return made


def prompts() -> list[Prompt]:
    return make_prompts([5, 9], 2)


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    drawn = {}
    for precision in PRECISIONS:
        part = model()
        split_weights(part, WeightPart(rank, 2))
        options = dict(max_num_seqs=8, page_size=4, rollout_precision=precision)
        engine = NativeEngine(part, group=dist.group.WORLD, **options)
        engine.wake_up()
        completions = engine.generate(prompts() if rank == 0 else [], SAMPLING)
        drawn[precision] = [(c.token_ids, c.logprobs) for c in completions]
        engine.close()
    if rank == 0:
        torch.save(drawn, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
