"""What `modes.py` measures: the same work by three modes of rollout on the same GPUs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from step_cases import Work

Mode = Literal["native", "colocate", "server"]

NUM_GENERATIONS = 8


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, and on how many prompts at a time."""

    work: Work
    """Of the largest batch."""
    num_prompts: dict[int, tuple[int, ...]]
    """By the number of GPUs, the largest first; the completions divide among all and all but one of them."""

    def at(self, num_prompts: int) -> Work:
        return dataclasses.replace(self.work, num_prompts=num_prompts)


MODELS = {
    "1p5b": Model(Work("1.5b", 0, NUM_GENERATIONS, 256, 512), {2: (128, 32, 8), 4: (192, 48, 12)}),
    # Full fine-tuning takes 16 bytes for each of 7.6 billion parameters: no room for vLLM on the same GPU.
    "7b": Model(Work("7b", 0, NUM_GENERATIONS, 512, 512, lora_rank=32), {2: (64, 16), 4: (96, 24)}),
}

PARTS: dict[str, tuple[str, Mode, int]] = {
    "1p5b-server": ("1p5b", "server", 1),
    "1p5b-colocate": ("1p5b", "colocate", 1),
    "1p5b-native": ("1p5b", "native", 1),
    "7b-server": ("7b", "server", 1),
    "7b-colocate": ("7b", "colocate", 1),
    "7b-native": ("7b", "native", 1),
    "7b-tp2": ("7b", "colocate", 2),
    "1p5b-tp2": ("1p5b", "colocate", 2),
}
"""(model, mode, tensor-parallel size), what the claims need first."""


@dataclasses.dataclass(frozen=True)
class ModeCase:
    """One mode, at one batch size."""

    model: str
    mode: Mode
    tensor_parallel_size: int
    num_gpus: int
    num_prompts: int

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
        return f"{self.model}-{mode}-{self.work.num_completions}"


def cases(part: str, num_gpus: int) -> list[ModeCase]:
    """The cases of a part, the largest batch first; tensor parallel that one only."""
    model, mode, tensor_parallel_size = PARTS[part]
    sizes = MODELS[model].num_prompts[num_gpus]
    return [
        ModeCase(model, mode, tensor_parallel_size, num_gpus, num_prompts)
        for num_prompts in (sizes if tensor_parallel_size == 1 else sizes[:1])
    ]


def largest(model: str, mode: Mode, num_gpus: int, tensor_parallel_size: int = 1) -> ModeCase:
    return ModeCase(model, mode, tensor_parallel_size, num_gpus, MODELS[model].num_prompts[num_gpus][0])


def all_cases(num_gpus: int) -> list[ModeCase]:
    return [case for part in PARTS for case in cases(part, num_gpus)]
