"""Makes a reward function's arguments: those that it names, as copies of its own that it may change."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

# Of which no copy is needed; most of what datasets hold, looked up before anything else.
_IMMUTABLE = frozenset({str, int, float, bool, bytes, complex, type(None)})


def own_arguments(shared: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one function, with lists of its own for each completion.

    A judge that appends the completion to the prompt must not change the prompt of the group's other
    completions, of the next function, or of the run. (TRL gives each completion its own prompt and columns,
    but shares them among the functions.) For 1,024 conversations of 4,096 tokens copying takes 0.06 s on a
    slow core, nearly all of it for the tokens.

    Args:
        shared: `completion_ids`, lists of N lists of integers; `prompts`, `completions` and columns, lists of
            N values; any other argument is handed on without a copy.
    """
    own = {}
    for name, value in shared.items():
        if name == "completion_ids":  # millions: not to be looked at one by one
            own[name] = [list(ids) for ids in value]
        else:
            own[name] = own_copy(value) if isinstance(value, list) else value
    return own


def own_copy(value: Any) -> Any:
    """A copy that shares no list, dict, set, array or tensor with `value`; other objects are shared.

    An object that occurs twice becomes two objects (`copy.deepcopy` would make one): all completions of a
    group have one prompt object.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, list):
        return [item if type(item) in _IMMUTABLE else own_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: item if type(item) in _IMMUTABLE else own_copy(item) for key, item in value.items()}
    if kind is tuple:
        return tuple(own_copy(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (set, bytearray, np.ndarray)):
        return value.copy()
    return value


REPLACED_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of the dataset that reward functions do not receive, because they receive those of the rollout."""

_ALWAYS_GIVEN = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
)


def check_columns(
    reward_funcs: Any,
    columns: Collection[str] | None,
    *,
    only_prompts: bool = False,
    provided: Collection[str] = (),
) -> None:
    """Refuse a reward function that needs an argument which neither the trainer nor the dataset provides.

    Args:
        reward_funcs: one reward function or several; reward models need no arguments and are skipped.
        columns: the dataset's columns; None for a stream that does not know them.
        only_prompts: whether `remove_unused_columns` has dropped all columns but `prompt`.
        provided: names of columns that the episodes have besides.

    Raises:
        ValueError: an argument has no column; the message has its name and the columns that there are.
    """
    if columns is None:
        return
    given = _ALWAYS_GIVEN | set(provided) | (set(columns) - set(REPLACED_COLUMNS))
    for func in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        missing = [name for name in _required_arguments(func) if name not in given]
        if missing:
            raise ValueError(
                f"The reward function {getattr(func, '__name__', type(func).__name__)!r} needs the argument "
                f"{' and '.join(map(repr, missing))}, but {_remedy(missing, columns, only_prompts)} the "
                "argument a default value."
            )


def _remedy(missing: Sequence[str], columns: Collection[str], only_prompts: bool) -> str:
    """Advice about missing arguments: the columns that there are, and what to do, up to "or give"."""
    if all(f"{name}s" in _ALWAYS_GIVEN for name in missing):
        plurals = " and ".join(repr(f"{name}s") for name in missing)
        return f"functions get {plurals}, a list with one value per completion. Take that name, or give"
    found = f"the dataset has no such column; its columns are {', '.join(map(repr, columns))}."
    if only_prompts:
        return f"{found} Set remove_unused_columns=False, or give"
    return f"{found} Rename a column (in a run file, columns: {{<column>: {missing[0]}}}), or give"


def _required_arguments(func: Any) -> list[str]:
    if not callable(func) or isinstance(func, torch.nn.Module):
        return []
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # written in C, and says nothing of its arguments
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in by_name and p.default is inspect.Parameter.empty]
