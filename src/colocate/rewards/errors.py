"""Errors of reward functions that say which function, which completion, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch


class RewardError(ValueError):
    """A reward function failed or returned something that is not one number per completion."""


@contextmanager
def blaming(function: str, prompts: Sequence[Any], completions: Sequence[Any]) -> Iterator[None]:
    """Turn an exception into a RewardError that names the function and, if it can be told, the completion."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # a reward model's: not a fault of the function, and the trainer may know a remedy
    except Exception as error:
        message = f"The reward function {function!r} raised {type(error).__name__}: {error}"
        index = _completion_at_hand(error.__traceback__, completions)
        if index is not None:
            message += f"\nIt was working on {describe(prompts, completions, index)}."
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            message += "\nReward functions receive more arguments than they need: declare **kwargs."
        raise RewardError(message) from error


def describe(prompts: Sequence[Any], completions: Sequence[Any], index: int) -> str:
    """A completion with its prompt, shortened to a line."""
    return f"completion {index} ({_shorten(completions[index])} to the prompt {_shorten(prompts[index])})"


def _shorten(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}")


def _completion_at_hand(traceback: TracebackType | None, completions: Sequence[Any]) -> int | None:
    """Which completion a variable of the failing code is, the innermost call's first; None if none is."""
    # By identity: in `for completion in completions` the variable is the very object. Strings of fewer than
    # two characters are shared throughout the interpreter and prove nothing.
    indices = {
        id(completion): index
        for index, completion in enumerate(completions)
        if not isinstance(completion, str) or len(completion) > 1
    }
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        at_hand = [indices[id(value)] for value in frame.f_locals.values() if id(value) in indices]
        # Several completions at hand in one function are a comparison, or leftovers: not evidence.
        found = at_hand[0] if len(set(at_hand)) == 1 else found
        traceback = traceback.tb_next
    return found
