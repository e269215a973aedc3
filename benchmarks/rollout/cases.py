"""What the rollout benchmarks run: models, prompts, lengths, and the cases of the comparison with vLLM."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Literal

MEDIAN_TOKENS, SIGMA = 300, 0.8
"""The log-normal lengths: half of them are longer than the median, one in 44 is longer than e^(2 sigma) = 5
times that."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One rollout: `num_prompts` prompts of random tokens with `num_generations` completions each."""

    model: str
    num_prompts: int
    num_generations: int
    prompt_tokens: int
    completion_tokens: int
    """Tokens of every completion, or where log-normal lengths are cut."""
    lengths: Literal["fixed", "lognormal"] = "fixed"
    logprobs: bool = True
    """Whether vLLM returns the sampled tokens' log-probs; the native engine always does."""

    @property
    def num_seqs(self) -> int:
        return self.num_prompts * self.num_generations

    @property
    def max_len(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt, the same in every process."""
        rng = random.Random(0)
        low, high = TOKEN_RANGE[self.model]
        return [
            [rng.randrange(low, high) for _ in range(self.prompt_tokens)] for _ in range(self.num_prompts)
        ]

    def limits(self) -> list[list[int]]:
        """Tokens of each completion, prompt by prompt, the same in every process."""
        rng = random.Random(1)

        def length() -> int:
            if self.lengths == "fixed":
                return self.completion_tokens
            return min(
                max(1, round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))), self.completion_tokens
            )

        return [[length() for _ in range(self.num_generations)] for _ in range(self.num_prompts)]


CASES = {
    "1p5b_512seq": Case("1.5b", 64, 8, 256, 1024),
    "1p5b_512seq_nologprobs": Case("1.5b", 64, 8, 256, 1024, logprobs=False),
    "1p5b_128seq": Case("1.5b", 16, 8, 256, 1024),
    "1p5b_8seq": Case("1.5b", 1, 8, 256, 1024),
    "1p5b_longprompt": Case("1.5b", 16, 16, 4096, 512),
    "1p5b_ragged": Case("1.5b", 64, 8, 256, 2048, lengths="lognormal"),
    "7b_256seq": Case("7b", 32, 8, 512, 1024),
}
LOGPROBS_CASE = Case("1.5b", 8, 8, 256, 256)

VOCAB_SIZE = 151936
SHAPES = {
    "0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, vocab_size=VOCAB_SIZE,
    ),
    "1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True, vocab_size=VOCAB_SIZE,
    ),
    "7b": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False, vocab_size=VOCAB_SIZE,
    ),
    # For a CPU.
    "cpu": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False, vocab_size=4096,
    ),
    # To try the scripts themselves. Heads of 32: vLLM has no attention for smaller ones on a CPU.
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, vocab_size=512,
    ),
}  # fmt: skip
"""Shapes of Qwen2.5 models, by size, and two small ones."""
TOKEN_RANGE = {size: (10, shape["vocab_size"] - 10) for size, shape in SHAPES.items()}


def tiny(case: Case) -> Case:
    """The case made small enough for any machine."""
    return dataclasses.replace(
        case,
        model="tiny",
        num_prompts=2,
        num_generations=2,
        prompt_tokens=case.prompt_tokens // 16,
        completion_tokens=case.completion_tokens // 64,
    )


def model_directory(parent: Path, size: str) -> Path:
    """The model of random weights in `parent`, made if it is not there.

    In a process of its own: vLLM's has to be free of CUDA until vLLM itself starts it.
    """
    directory = parent / f"qwen2.5-{size}-random"
    if not model_on_disk(parent, size):
        command = [sys.executable, "-m", "benchmarks.common.random_model", size, str(directory)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    return directory


def model_on_disk(parent: Path, size: str) -> bool:
    """Whether `model_directory` has nothing to make."""
    return (parent / f"qwen2.5-{size}-random" / "config.json").exists()
