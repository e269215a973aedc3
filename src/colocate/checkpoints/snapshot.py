"""The state of a run between two optimizer steps: all that makes a resumed run equal an uninterrupted one.

Beside the policy (weights, masters, moments, schedule) these are the position in the data, the completions
already generated and paid for but not yet trained on, the metrics not yet logged, and the random generators.

    checkpoint-120/
        config.json, model.safetensors, tokenizer...   a plain Hugging Face directory (an adapter's with PEFT)
        trainer_state.json                              transformers' TrainerState
        optimizer.pt                                    masters, moments, schedule
        rank0.pt, rank1.pt, ...                         each rank's share of the rest
        manifest.json                                   sizes and checksums (`sealed.py`)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from colocate.checkpoints.sealed import CheckpointError


class Resumable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def checksum(weights: Iterable[Tensor]) -> str:
    """16 hexadecimal digits that change with any bit of the weights, the same on every device.

    Sums the elements' bits as integers, which no order of summation can round, at memory speed.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for position, weight in enumerate(weights, start=1):
        bits = weight.detach().view(integers[weight.element_size()])
        total += position * int(bits.sum(dtype=torch.int64))  # tells apart two weights that changed places
    return f"{total % 2**64:016x}"


def save_rank_state(
    directory: Path, rank: int, parts: Mapping[str, Resumable], identity: dict[str, Any]
) -> None:
    """Write this rank's share of the state.

    Args:
        parts: by name; what each one's `state_dict` returns is saved.
        identity: what makes this run this run; a run of another identity cannot resume from here.
    """
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(
        {"parts": state, "identity": identity, "random": _random_state()}, directory / f"rank{rank}.pt"
    )


def load_rank_state(
    directory: Path, rank: int, parts: Mapping[str, Resumable], identity: dict[str, Any]
) -> None:
    """Restore every part, and the random generators.

    Raises:
        CheckpointError: the checkpoint is of another run.
    """
    file = directory / f"rank{rank}.pt"
    if not file.is_file():
        raise CheckpointError(
            f"{directory} was written by fewer than {rank + 1} processes: it has no {file.name}. Resume with "
            "as many processes as before, or start a new run with the directory as the model."
        )
    # Our own file, checked against its manifest; generator states need the full unpickler.
    state = torch.load(file, weights_only=False, map_location="cpu")
    _check_same_run(state["identity"], identity, directory)
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    _restore_random_state(state["random"])


def _check_same_run(saved: dict[str, Any], current: dict[str, Any], directory: Path) -> None:
    for name in dict.fromkeys([*current, *saved]):
        was, now = saved.get(name), current.get(name)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            key = next(k for k in sorted(was.keys() | now.keys()) if was.get(k) != now.get(k))
            name, was, now = f"{name} {key}", was.get(key, "absent"), now.get(key, "absent")
        raise CheckpointError(
            f"{directory} cannot be resumed: {name} was {was} when it was written and is {now} now. Go back "
            f"to the former, or start a new run in another output_dir with model={str(directory)!r}."
        )


def _random_state() -> dict[str, Any]:
    # Sampling has its own counters; these are for dropout and for reward functions that draw.
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
