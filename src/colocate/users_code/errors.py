"""Errors of reward functions that say which function, which completion, and what to do."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch


class RewardError(ValueError):
    """A reward function failed or returned something that is not one number per completion."""


class RewardTimeout(BaseException):
    """Raised within a reward function that takes too long; `blaming` turns it into a RewardError. It also
    interrupts a tool that takes too long.

    It is not an Exception, because functions that execute code catch `Exception`.

    Attributes:
        timeout_s: The limit in seconds.
        blocked_at: Frames and lines, the outermost first, at which the loop of the async functions is
            blocked; None if the function was interrupted: then the traceback says where.
    """

    def __init__(self, timeout_s: float, blocked_at: Sequence[tuple[FrameType, int]] | None = None) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s
        self.blocked_at = blocked_at


_LONGEST_MESSAGE = 2000


@contextmanager
def blaming(
    function: str, prompts: Sequence[Any], completions: Sequence[Any], own: Sequence[Any] | None = None
) -> Iterator[None]:
    """Turn an exception in a function into a RewardError that names the function and, if known, the
    completion.

    SystemExit is also treated as an error: a completion whose code is executed may call `exit()`, and the run
    must not end with status 0. KeyboardInterrupt comes from the user and is passed on.

    Args:
        own: The copies of the completions that the function was given; None if it got no copies.
    """
    own = list(completions if own is None else own)  # the function may change its list
    try:
        yield
    # Running out of memory is a reward model's: no fault of the function, and the trainer may know a remedy.
    except (RewardError, KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except RewardTimeout as timeout:
        message = f"The reward function {function!r} took longer than reward_timeout_s={timeout.timeout_s:g}"
        raise RewardError(message + _circumstances(timeout, prompts, completions, own)) from timeout
    except BaseException as error:
        message = f"The reward function {function!r} raised {words_of(error)}"
        places = list(traceback.walk_tb(error.__traceback__))
        message += _place(places)
        index = _completion_at_hand(places, own)
        if index is not None:
            message += f"\nIt was working on {describe(prompts, completions, index)}."
        if isinstance(error, TypeError) and "unexpected keyword argument" in words_of(error):
            message += "\nReward functions receive more arguments than they need: declare **kwargs."
        if isinstance(error, SystemExit):
            message += (
                "\nCode of a completion that the function executes may have called exit(): catch SystemExit, "
                "or execute such code in a process of its own."
            )
        raise RewardError(message) from error


def words_of(error: BaseException) -> str:
    """The kind of an exception and its message, shortened, or without it if it cannot be made into text."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return kind
    return f"{kind}: {text if len(text) <= _LONGEST_MESSAGE else f'{text[:_LONGEST_MESSAGE]} ...'}"


def describe(prompts: Sequence[Any], completions: Sequence[Any], index: int) -> str:
    """A completion and its prompt in words, shortened to a line."""
    return f"completion {index} ({_shorten(completions[index])} to the prompt {_shorten(prompts[index])})"


def _shorten(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}")


def _circumstances(
    timeout: RewardTimeout, prompts: Sequence[Any], completions: Sequence[Any], own: Sequence[Any]
) -> str:
    """Sentences that say where the function was, at which completion, and what to do."""
    places = list(timeout.blocked_at or traceback.walk_tb(timeout.__traceback__))
    index = _completion_at_hand(places, own)
    text = _place(places)
    if timeout.blocked_at is not None:
        text += ", which blocks the one loop of all async functions: `await asyncio.to_thread(...)` would not"
    if index is not None:
        return f"{text}. It was working on {describe(prompts, completions, index)}." + _REMEDY
    return (
        f"{text}. It was given the completions 0 to {len(completions) - 1}, first "
        f"{describe(prompts, completions, 0)}; which one it was working on is not known: a variable that "
        "holds one completion, as in `for completion in completions`, tells." + _REMEDY
    )


def _place(places: Iterable[tuple[FrameType, int]]) -> str:
    """The words ", at file:line in function" for the innermost call that is not within Python and, if there
    is one, not within an installed package; "" if there is none."""
    users = [(frame, line) for frame, line in places if not _is_machinery(frame)]
    own = [place for place in users if "site-packages" not in place[0].f_code.co_filename] or users
    if not own:
        return ""
    frame, line = own[-1]
    return f", at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


_REMEDY = "\nCorrect the function, or set a larger reward_timeout_s."


def _is_machinery(frame: FrameType) -> bool:
    """Whether the frame belongs to Python or calls reward functions, so that it says nothing to the user."""
    module = str(frame.f_globals.get("__name__"))
    callers = ("time_limit", "background", "base", "errors", "process_state")
    return module.partition(".")[0] in sys.stdlib_module_names or module in {
        f"{__package__}.{name}" for name in callers
    }


def _completion_at_hand(places: Iterable[tuple[FrameType, int]], completions: Sequence[Any]) -> int | None:
    """The index of the completion that a variable of the failing code holds, from the innermost call
    outwards; None if no variable holds one."""
    # By identity: in `for completion in completions` the variable is the very object. Strings of fewer than
    # two characters are shared throughout the interpreter and prove nothing.
    indices = {
        id(value): index
        for index, completion in enumerate(completions)
        for value in _tell_tales(completion)
        if not isinstance(value, str) or len(value) > 1
    }
    found = None
    for frame, _ in places:
        at_hand = {indices[id(value)] for value in frame.f_locals.values() if id(value) in indices}
        # Several completions at hand in one function are a comparison, or leftovers: not evidence.
        found = at_hand.pop() if len(at_hand) == 1 else found
    return found


def _tell_tales(completion: Any) -> list[Any]:
    """The objects by which a variable shows that the function is at this completion."""
    if isinstance(completion, list) and completion and isinstance(completion[0], dict):
        return [completion, completion[0], completion[0].get("content")]
    return [completion]
