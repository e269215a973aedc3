"""The state of a run between two optimizer steps: all that makes a resumed run equal an uninterrupted one.

Beside the policy (weights, masters, moments, schedule) these are the position in the data, the completions
already generated and paid for but not yet trained on, the metrics not yet logged, and the random generators.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colocate.checkpoint import CheckpointError


def random_state() -> dict[str, Any]:
    """State of every global generator that training may draw from (dropout, user code)."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def check_same_run(saved: dict[str, Any], current: dict[str, Any], directory: Path) -> None:
    """Refuse to continue a run as another one.

    Args:
        saved: what the checkpoint says the run is: parameter shapes, batch rules, data, number of ranks.
        current: the same of this run.

    Raises:
        CheckpointError: they differ; the first difference is named with both values.
    """
    for name in sorted(saved.keys() | current.keys()):
        was, now = saved.get(name), current.get(name)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            key = next(k for k in sorted(was.keys() | now.keys()) if was.get(k) != now.get(k))
            name, was, now = f"{name} {key}", was.get(key, "absent"), now.get(key, "absent")
        raise CheckpointError(
            f"{directory} cannot be resumed: {name} was {was} when it was written and is {now} now. "
            f"Set it back, or start a new run in another output_dir with model={str(directory)!r}."
        )
