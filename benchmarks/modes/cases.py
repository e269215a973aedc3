"""What `suite.py` measures: the same work by three modes of rollout on the same GPUs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from benchmarks.step.cases import Work

Mode = Literal["native", "colocate", "server"]
Weights = Literal["auto", "buckets"]
"""`vllm_weights`: "auto" shares vLLM's with the trainer in full fine-tuning on one GPU each."""

NUM_GENERATIONS = 8


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, and on how many prompts at a time."""

    work: Work
    """The work of the largest batch."""
    num_prompts: dict[int, tuple[int, ...]]
    """Batches by the number of GPUs, the largest first; completions divide among all GPUs and all but one."""

    def at(self, num_prompts: int) -> Work:
        return dataclasses.replace(self.work, num_prompts=num_prompts)


MODELS = {
    "1p5b": Model(Work("1.5b", 0, NUM_GENERATIONS, 256, 512), {2: (128, 32, 8), 4: (192, 48, 12)}),
    # Full fine-tuning takes 16 bytes for each of 7.6 billion parameters: no room for vLLM on the same GPU.
    "7b": Model(Work("7b", 0, NUM_GENERATIONS, 512, 512, lora_rank=32), {2: (64, 16), 4: (96, 24)}),
}

PARTS: dict[str, tuple[str, Mode, int, Weights]] = {
    "1p5b-server": ("1p5b", "server", 1, "auto"),
    "1p5b-colocate": ("1p5b", "colocate", 1, "auto"),
    "1p5b-native": ("1p5b", "native", 1, "auto"),
    "7b-server": ("7b", "server", 1, "auto"),
    "7b-colocate": ("7b", "colocate", 1, "auto"),
    "7b-buckets": ("7b", "colocate", 1, "buckets"),
    "7b-native": ("7b", "native", 1, "auto"),
    "7b-tp2": ("7b", "colocate", 2, "auto"),
    "1p5b-tp2": ("1p5b", "colocate", 2, "auto"),
}
"""(model, mode, tensor-parallel size, weights), what the claims need first."""


@dataclasses.dataclass(frozen=True)
class ModeCase:
    """One mode, at one batch size."""

    model: str
    mode: Mode
    tensor_parallel_size: int
    num_gpus: int
    num_prompts: int
    weights: Weights = "auto"

    @property
    def work(self) -> Work:
        return MODELS[self.model].at(self.num_prompts)

    @property
    def num_trainers(self) -> int:
        """Processes that train. The server has a GPU for itself."""
        return self.num_gpus - 1 if self.mode == "server" else self.num_gpus

    @property
    def label(self) -> str:
        """Tells its records apart."""
        mode = self.mode if self.tensor_parallel_size == 1 else f"{self.mode}-tp{self.tensor_parallel_size}"
        weights = "" if self.weights == "auto" else f"-{self.weights}"
        return f"{self.model}-{mode}{weights}-{self.work.num_completions}"


def cases(part: str, num_gpus: int) -> list[ModeCase]:
    """The cases of a part, the largest batch first; other ways to colocate vLLM at that one only."""
    model, mode, tensor_parallel_size, weights = PARTS[part]
    sizes = MODELS[model].num_prompts[num_gpus]
    is_plain = (tensor_parallel_size, weights) == (1, "auto")
    return [
        ModeCase(model, mode, tensor_parallel_size, num_gpus, num_prompts, weights)
        for num_prompts in (sizes if is_plain else sizes[:1])
    ]


def largest(model: str, mode: Mode, num_gpus: int, weights: Weights = "auto") -> ModeCase:
    return ModeCase(model, mode, 1, num_gpus, MODELS[model].num_prompts[num_gpus][0], weights)


def all_cases(num_gpus: int) -> list[ModeCase]:
    return [case for part in PARTS for case in cases(part, num_gpus)]
