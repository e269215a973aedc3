"""Restores state of the process that a user's code has changed."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from colocate.options.values import shown
from colocate.users_code.forks import ended_forks

logger = logging.getLogger(__name__)

_AUTOCAST_DEVICES = ("cpu", "cuda")
_told: set[tuple[str, str]] = set()
"""The changes that were told already, by function: one that changes a thing in every step is told of once."""
_held: list[Any] = []
"""Contexts that must not be collected: their end would change the mode."""


@contextmanager
def users_code(function: str) -> Iterator[None]:
    """Call a function of the user's in the block: no copy of the process leaves it, and PyTorch's modes,
    defaults and the standard streams are afterwards as they were before.

    A warning names what was put back, once for each function and thing.

    Args:
        function: what the block calls, for messages, such as "The tool 'add'".
    """
    before = _modes()
    try:
        with ended_forks(function):
            yield
    finally:
        if (after := _modes()) != before:
            _restore(before, after)
            for name in before:
                if after[name] != before[name]:
                    _tell(function, name, after[name], before[name])
        for stream in ("stdout", "stderr"):
            if _reopen(stream):
                _tell(function, f"sys.{stream}", "closed", "open")


@contextmanager
def kept_trainer_state(function: str, state: Any) -> Iterator[None]:
    """Keep the numbers and words of the trainer's state as they are: the run counts its steps by them.

    Attributes that a function adds are its own business.
    """
    values = getattr(state, "__dict__", {})
    before = {k: value for k, value in values.items() if isinstance(value, int | float | str | None)}
    try:
        yield
    finally:
        for name, value in before.items():
            if (now := getattr(state, name, None)) is not value and now != value:
                setattr(state, name, value)
                _tell(function, f"trainer_state.{name}", now, value)


def _tell(function: str, name: str, now: Any, value: Any) -> None:
    if (function, name) in _told:
        return
    _told.add((function, name))
    logger.warning(
        "%s has left %s changed, from %s to %s. It is put back: the run shares it with that function. Change "
        "it in a `with` block that ends within the function, or in a process of its own.",
        function,
        name,
        shown(value),
        shown(now),
    )


def _modes() -> dict[str, Any]:
    """PyTorch's modes and defaults in this thread."""
    torch.autocast_increment_nesting()  # there is no other way to ask
    return {
        "the inference mode": torch.is_inference_mode_enabled(),
        "whether gradients are computed": torch.is_grad_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ],
        "the depth of autocast": torch.autocast_decrement_nesting(),
        "PyTorch's default device": torch.get_default_device(),
        "PyTorch's default dtype": torch.get_default_dtype(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
    }


def _restore(before: dict[str, Any], after: dict[str, Any]) -> None:
    if after["the inference mode"] != before["the inference mode"]:
        _held.append(torch.inference_mode(before["the inference mode"]))
        _held[-1].__enter__()
    torch.set_grad_enabled(before["whether gradients are computed"])
    for device, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, before["autocast"], strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)
    for _ in range(after["the depth of autocast"] - before["the depth of autocast"]):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    if after["PyTorch's default device"] != before["PyTorch's default device"]:
        device = before["PyTorch's default device"]
        torch.set_default_device(None if device == torch.device("cpu") else device)
    torch.set_default_dtype(before["PyTorch's default dtype"])
    if torch.get_float32_matmul_precision() != before["the precision of float32 products"]:
        torch.set_float32_matmul_precision(before["the precision of float32 products"])


def _reopen(name: str) -> bool:
    """Open a standard stream again if it is closed or gone, for all its holders; returns whether it was."""
    stream = getattr(sys, name)
    if stream is None and (original := getattr(sys, f"__{name}__")) is not None:
        setattr(sys, name, original)
        _reopen(name)
        return True
    stream = getattr(stream, "rich_proxied_file", stream)  # while a progress bar is shown
    if not getattr(stream, "closed", False):
        return False
    with suppress(OSError, ValueError):  # its file is closed, too
        raw = open({"stdout": 1, "stderr": 2}[name], "wb", closefd=False)  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            stream.__init__(raw, "utf-8", "backslashreplace", line_buffering=True)  # type: ignore[misc]
        else:
            setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True))
    return True
