"""What is trained: run files of recipes/small/, algorithms, and contestants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT

DIRECTORY = ROOT / "recipes/small"

ALGORITHMS: dict[str, dict[str, Any]] = {
    # Advantages over the group's standard deviation, a mean over each completion's tokens (arXiv:2402.03300).
    "grpo": {"loss_type": "grpo"},
    # Neither of these two divisions (arXiv:2503.20783).
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    # A mean over all tokens, a higher upper bound, dull groups replaced, what is cut off left out
    # (arXiv:2503.14476).
    "dapo": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "max_refill_rounds": 2,
    },
    # One ratio per sequence, with the paper's bounds (arXiv:2507.18071).
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    # Ratios are weights with a cap, and no token loses its gradient (arXiv:2506.13585, 2510.13786).
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}
"""The options of each algorithm, beside those of the run file."""
IMITATION = "imitation.json"
"""The file in which a warm start says what it took, and how far it came."""
FRAMEWORKS = ("colocate", "trl", "trl_vllm")
"""This library, and TRL with completions by transformers or by vLLM in its process."""


@dataclass(frozen=True)
class Case:
    """A run file, and who runs it."""

    algorithms: tuple[str, ...] = ("grpo",)
    peers: tuple[str, ...] = ()
    """Who trains the first algorithm, too. TRL's way to tools and environments is another."""
    predicted_s: float = 0.0
    """Seconds of one run of ours on an H100 or H200, start included, by arithmetic; 0 of what is made for a
    CPU."""


CASES = {
    "addition": Case(tuple(ALGORITHMS), peers=("trl",)),
    "chain_sum": Case(),
    "calculator": Case(),
    "game": Case(),
    # 30 rollouts: 75 decode steps of 1 ms and twice 47k tokens x 0.18 GFLOP are 0.2 s, and as much is the
    # host's; 25 s are the start's, and 8 s six evaluations.
    "addition_30m": Case(tuple(ALGORITHMS), peers=("trl", "trl_vllm"), predicted_s=45.0),
    # 15 rollouts: 120 decode steps of 20 ms, 1 million tokens x 0.62 GFLOP at 300 TFLOP/s, 2 s of the host;
    # 25 s are the start's and the evaluations'.
    "handover": Case(predicted_s=125.0),
}
"""By the name of the run file."""
CPU_CASES = tuple(name for name, case in CASES.items() if not case.predicted_s)


def run_file(recipe: str) -> Path:
    return DIRECTORY / f"{recipe}.yaml"


def warm_start_words(recipe: str) -> list[str]:
    """The command at a run file's head that makes its model, without `python` and the output directory."""
    (command,) = re.findall(r"^#   python (.+) --output_dir \S+$", run_file(recipe).read_text(), re.MULTILINE)
    return command.split()


def run_name(record: dict[str, Any]) -> str:
    """The name of a run's file, but for its hardware."""
    return "-".join(str(record[key]) for key in ("recipe", "framework", "algorithm", "seed"))
