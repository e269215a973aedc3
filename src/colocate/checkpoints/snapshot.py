"""The state of a run between two optimizer steps, with which a resumed run equals an uninterrupted one.

It has the policy (weights, masters, moments, schedule), the position in the data, the completions that were
generated but not yet trained on, the metrics that were not yet logged, and the random generators.

    checkpoint-120/
        config.json, model.safetensors, tokenizer...   a plain Hugging Face directory (an adapter's with PEFT)
        trainer_state.json                              transformers' TrainerState
        run.json                                        what run this is (`changes.py`)
        optimizer.pt                                    masters, moments, schedule
        shards/                                         masters and moments, where ranks split them
        rank0.pt, rank1.pt, ...                         each rank's share of the rest
        manifest.json                                   sizes and checksums (`sealed.py`)

All files hold data only: tensors, numbers, text and containers of these. Reading them runs no code, so a
checkpoint from a stranger can do no harm but train badly.
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
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
    """16 hexadecimal digits that change with any bit of the weights, the same on every device."""
    return as_text(bit_sum(enumerate(weights, start=1)))


def as_text(total: int) -> str:
    return f"{total % 2**64:016x}"


def bit_sum(numbered: Iterable[tuple[int, Tensor]]) -> int:
    """A sum of all elements' bits as integers, at memory speed. No order of summation rounds it, and the sums
    of a weight's parts add up to that of the weight.

    Args:
        numbered: each weight with its number, by which its bits are multiplied.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for position, weight in numbered:
        bits = weight.detach().view(integers[weight.element_size()])
        total += position * int(bits.sum(dtype=torch.int64))  # so that swapping two weights changes the sum
    return total


def save_rank_state(directory: Path, rank: int, parts: Mapping[str, Resumable]) -> None:
    """Write this rank's share of the state.

    Args:
        parts: the parts of the run by name; the result of each one's `state_dict` is saved.
    """
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(_plain({"parts": state, "random": _random_state()}), directory / f"rank{rank}.pt")


def load_rank_state(directory: Path, rank: int, parts: Mapping[str, Resumable]) -> None:
    """Restore every part, and the random generators.

    If another number of ranks wrote the checkpoint, rank r reads the file of rank r modulo that number.
    """
    num_saved = len(list(directory.glob("rank*.pt")))
    state = read_data(directory / f"rank{rank % num_saved if num_saved else rank}.pt")
    for name, part in parts.items():
        # Runs that carried nothing over, or refilled nothing, have saved no such part.
        if name not in ("player", "selector") or name in state["parts"]:
            part.load_state_dict(state["parts"][name])
    _restore_random_state(state["random"])


def saved_by_ranks(directory: Path, part: str) -> Iterator[dict[str, Any]]:
    """The state of one part of the run on each rank that saved, whether this run has as many or not."""
    for file in sorted(directory.glob("rank*.pt")):
        yield read_data(file)["parts"][part]


def save_policy(directory: Path, state: dict[str, Any]) -> None:
    """Write the policy's `state_dict()`."""
    torch.save(_plain(state), directory / "optimizer.pt")


def load_policy(directory: Path) -> dict[str, Any]:
    """Read the policy's state, which `save_policy` wrote, on the CPU."""
    file = directory / "optimizer.pt"
    if not file.is_file():
        raise CheckpointError(
            f"{directory} was written with save_only_model=True: there is no optimizer state to resume. "
            f"Start a new run with model={str(directory)!r}."
        )
    return read_data(file)


def read_data(file: Path) -> Any:
    """Read a file of `torch.save` that holds tensors, numbers, text and containers of these.

    Raises:
        CheckpointError: the file holds other objects. None of their code was run.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(
            f"{file} is not read: it holds something else than tensors, numbers and text, and reading that "
            f"could run code ({first_line}). Take a checkpoint from a source that you trust, or start a new "
            f"run with model={str(file.parent)!r}."
        ) from error


def _plain(value: Any) -> Any:
    """`value` with NumPy's numbers and arrays, which need the full unpickler, turned into Python numbers and
    tensors."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64) if value.dtype.kind == "u" else value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _random_state() -> dict[str, Any]:
    # Sampling does not use these generators, but dropout does, and reward functions may.
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        # Of this process's GPU alone: a run that goes on may see fewer of them.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
