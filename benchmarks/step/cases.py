"""What the step benchmarks run, and the arithmetic of a training step."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.rollout.cases import SHAPES

PEAK_FLOP_PER_S = 990e12
"""Dense bfloat16 products of one H100 or H200 (NVIDIA's data sheet: 1,979 TFLOP/s with sparsity)."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers of attention and MLP."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One GRPO step: prompts of random words, completions of a given length (nothing stops them)."""

    model: str
    num_prompts: int
    num_generations: int
    prompt_tokens: int
    new_tokens: int
    lora_rank: int | None = None
    """None: full fine-tuning."""

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens, the prompt counted with each completion."""
        return self.num_completions * (self.prompt_tokens + self.new_tokens)

    def num_processed_tokens(self, *, shares_prompts: bool) -> int:
        """Tokens that go through the layers in training."""
        num_prompts = self.num_prompts if shares_prompts else self.num_completions
        return num_prompts * self.prompt_tokens + self.num_completions * self.new_tokens

    def words(self) -> list[str]:
        """The fields as options of step/run.py."""
        sizes = {
            "prompts": self.num_prompts,
            "generations": self.num_generations,
            "prompt-tokens": self.prompt_tokens,
            "new-tokens": self.new_tokens,
        }
        words = [
            "--shape",
            self.model,
            *(w for name, size in sizes.items() for w in (f"--{name}", str(size))),
        ]
        return [*words, "--lora-rank", str(self.lora_rank)] if self.lora_rank else words


@dataclasses.dataclass(frozen=True)
class PeerSettings:
    """How TRL trains; each must divide the work evenly."""

    micro_batch: int
    """Completions."""
    gradient_checkpointing: bool
    liger: bool
    """Liger's kernels for norms, rotary embedding and MLP."""

    def words(self) -> list[str]:
        """The fields as options of step/run.py."""
        return [
            "--micro-batch", str(self.micro_batch),
            "--gradient-checkpointing" if self.gradient_checkpointing else "--no-gradient-checkpointing",
            "--liger" if self.liger else "--no-liger",
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One case against TRL. `candidates` are what its tuning tries, the best one on an H200 first."""

    work: Work
    num_warm_up: int
    num_timed: int
    candidates: tuple[PeerSettings, ...]


def _candidates(*settings: tuple[int, bool, bool]) -> tuple[PeerSettings, ...]:
    return tuple(PeerSettings(*setting) for setting in settings)


COMPARISONS = {
    "1p5b": Comparison(
        Work("1.5b", 32, 8, 256, 512),
        1,
        3,
        _candidates((32, False, True), (16, False, True)),
    ),
    "1p5b_longprompt": Comparison(
        Work("1.5b", 8, 16, 4096, 512),
        1,
        3,
        _candidates((8, False, True), (4, False, True)),
    ),
    # A step takes TRL the better part of a minute: two of them are timed, after one.
    "7b_lora": Comparison(
        Work("7b", 16, 8, 512, 1024, lora_rank=32),
        1,
        2,
        _candidates((8, False, True), (4, False, True)),
    ),
}

TUNING_SHARE = 4
"""Tuning steps have a quarter of the prompts."""


def tiny(work: Work) -> Work:
    """The work made small enough for any machine, in parts for up to four processes."""
    return dataclasses.replace(
        work, model="tiny", num_prompts=2, num_generations=6, prompt_tokens=16, new_tokens=8
    )


def training_flop(work: Work, *, shares_prompts: bool) -> dict[str, float]:
    """Floating-point operations that a training step's gradient needs, without any recomputation.

    - A weight in a matrix product: 2 per token forward and 4 backward, one half for the gradient of the
      input and one for the weight's (Kaplan et al., arXiv:2001.08361, §2.1; Hoffmann et al.,
      arXiv:2203.15556, appendix F). A frozen weight has no gradient: 4 in all. The embedding is looked up,
      not multiplied, so a tied matrix counts once, as the head.
    - The head: only for the tokens whose log-probs are needed, the completions'.
    - Attention: 12 · H · D per layer, query and key (Chowdhery et al., arXiv:2204.02311, appendix B, there
      with T keys for every query). A causal query at position i has i + 1 keys, which makes it half of that.

    Args:
        shares_prompts: a prompt goes through the layers once for its group. Its keys still meet every
            completion's queries.

    Returns:
        "layers", "head", "attention", "adapters" and their sum "total".
    """
    shape: dict[str, Any] = SHAPES[work.model]
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_size = hidden // heads
    query_size, kv_size = heads * head_size, kv_heads * head_size
    # (inputs, outputs) of each matrix of a layer.
    matrices = [
        (hidden, query_size), (hidden, kv_size), (hidden, kv_size), (query_size, hidden),
        (hidden, mlp), (hidden, mlp), (mlp, hidden),
    ]  # fmt: skip
    num_layers = shape["num_hidden_layers"]
    num_tokens = work.num_processed_tokens(shares_prompts=shares_prompts)
    num_scored = work.num_completions * work.new_tokens
    per_weight = 6 if work.lora_rank is None else 4
    rank = work.lora_rank or 0

    prompt, new = work.prompt_tokens, work.new_tokens
    num_prompts = work.num_prompts if shares_prompts else work.num_completions
    # (query, key) pairs: within a prompt, and from a completion to its prompt and itself.
    num_pairs = num_prompts * prompt * (prompt + 1) // 2
    num_pairs += work.num_completions * (new * prompt + new * (new + 1) // 2)
    flop: dict[str, float] = {
        "layers": per_weight * num_layers * sum(i * o for i, o in matrices) * num_tokens,
        "head": per_weight * shape["vocab_size"] * hidden * num_scored,
        "attention": 12 * num_layers * query_size * num_pairs,
        "adapters": 6 * num_layers * rank * sum(i + o for i, o in matrices) * num_tokens,
    }
    return flop | {"total": sum(flop.values())}
