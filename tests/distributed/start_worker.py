"""One rank of the runs in test_start_checks.py: `start_worker.py <directory>`.

Starts each case with something that is different on rank 1, and leaves what the trainer said.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from colocate.rewards import get_reward_function
from colocate.run import build, start_checks
from tiny import count_digits, make_model, make_trainer, sums

RANK = int(os.environ["RANK"])


def versions_of_rank_1(libraries: Any) -> dict[str, str | None]:
    return versions(libraries) | ({"triton": "3.0.0"} if RANK == 1 else {})


def same_gpu(args: Any) -> str:
    return "GPU-1234"


def share(completions: list[Any], **_: Any) -> list[float]:
    return [0.5 for _ in completions]


def other_share(completions: list[Any], **_: Any) -> list[float]:
    return [0.25 for _ in completions]


def add(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a + 1


def subtract(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a - 1


class Game:
    def reset(self, **row: Any) -> None:
        pass


class OtherGame(Game):
    pass


versions = start_checks.versions
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "alike": lambda: {
        "reward_funcs": [count_digits, partial(share, device=RANK), lambda completions, **_: [1.0]]
    },
    "unsaved": lambda: {"output_dir": f"{sys.argv[1]}/of-rank-{RANK}"},
    "output_dir": lambda: {"output_dir": f"{sys.argv[1]}/of-rank-{RANK}", "save_strategy": "steps"},
    "option": lambda: {"learning_rate": 0.01 + 0.01 * RANK, "temperature": 1.0 - 0.5 * RANK},
    "dataset": lambda: {"train_dataset": sums(12 - RANK)},
    "order": lambda: {"train_dataset": sums(12).select(range(11, -1, -1) if RANK else range(12))},
    "eval_dataset": lambda: {"eval_dataset": {"hard": sums(4 + RANK)}},
    "weights": lambda: {"model": make_model(seed=RANK)},
    "directory": lambda: {"model": os.environ[f"MODEL_{RANK}"]},
    "version": lambda: {},
    "gpu": lambda: {},
    "reward": lambda: {"reward_funcs": [count_digits, [share, other_share][RANK]]},
    "reward_file": lambda: {
        "reward_funcs": get_reward_function(f"{sys.argv[1]}/node{RANK}/rewards.py:share")
    },
    "tools": lambda: {"tools": [[add, subtract][RANK]]},
    "environment": lambda: {"environment_factory": {"game": [Game, OtherGame][RANK]}},
    "reward_model": lambda: {"reward_funcs": [count_digits, os.environ[f"MODEL_{RANK}"]]},
}
ALIKE = ("alike", "unsaved")
PATCHES: dict[str, tuple[str, Any]] = {
    "version": ("versions", versions_of_rank_1),
    "gpu": ("gpu_of", same_gpu),
}


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    said = {}
    for case, arguments in CASES.items():
        name, value = PATCHES.get(case, ("versions", versions))
        prepared: list[Any] = []
        with (
            mock.patch.object(start_checks, name, value),
            mock.patch.object(build, "prepare_model", side_effect=record(prepared)),
        ):
            try:
                make_trainer(
                    **{"output_dir": directory / case, "per_device_train_batch_size": 2} | arguments()
                )
                said[case] = ""
            except ValueError as error:
                said[case] = str(error)
        assert bool(prepared) == (case in ALIKE), "the model is touched before the ranks are compared"
    (directory / f"said{RANK}.json").write_text(json.dumps(said))


def record(calls: list[Any]) -> Callable[..., Any]:
    prepare_model = build.prepare_model

    def prepare(*arguments: Any) -> Any:
        calls.append(arguments)
        return prepare_model(*arguments)

    return prepare


if __name__ == "__main__":
    main()
