"""What the benchmarks of rollouts in 8 bits run."""

from __future__ import annotations

import dataclasses

from benchmarks.rollout.cases import CASES, Case
from colocate.engines.native.options import ROLLOUT_PRECISIONS as PRECISIONS

STEPS_PER_LOOK = 8
"""Decode steps from one look at a GPU to the next (`TritonBackend.steps_per_look`)."""
SPEED_CASES = {
    # Contexts of 4,096 to 4,288 tokens that no two sequences share: what is timed is decoding.
    "1p5b_4k_256seq": Case("1.5b", 256, 1, 4096, 192),
    "7b_256seq": CASES["7b_256seq"],
    "1p5b_512seq": CASES["1p5b_512seq"],
}
MEASURED = {
    "1p5b_4k_256seq": PRECISIONS,
    "7b_256seq": ("bf16", "fp8"),
    "1p5b_512seq": PRECISIONS,
}

KV_CACHES = {"fp8": "fp8", "fp8_weights": "auto"}
"""vLLM's `kv_cache_dtype`: in 8 bits, too, or in the model's type."""


def tiny(case: Case) -> Case:
    """The case made small enough for any machine."""
    return dataclasses.replace(
        case, model="tiny", num_prompts=2, num_generations=2, prompt_tokens=24, completion_tokens=12
    )
