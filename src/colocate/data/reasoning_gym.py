"""Problems that reasoning_gym generates, as text in a dataset, and the verifiers of their answers."""

from __future__ import annotations

import functools
import json
import logging
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


def import_reasoning_gym() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            'Generated tasks need reasoning_gym: pip install "reasoning-gym>=0.1.20"'
        ) from error
    return reasoning_gym


def encode_entry(task: str, parameters: dict[str, Any], entry: dict[str, Any]) -> str:
    """The task, its parameters and the problem as JSON: all that is needed to verify an answer."""
    return json.dumps(_to_json({"task": task, "parameters": parameters, "problem": entry}))


def score_answer(answer: str, encoded_entry: str) -> float:
    """The score of an answer to an encoded problem, by its task's verifier."""
    entry = json.loads(encoded_entry, object_hook=_from_json)
    verifier = _verifier(entry["task"], json.dumps(_to_json(entry["parameters"]), sort_keys=True))
    try:
        return float(verifier.score_answer(answer, entry["problem"]))
    except Exception as error:
        # Some verifiers (prime_factorization, boxnet, ...) convert the answer without checking it first and
        # raise when its form is wrong. That is a wrong answer, and no reason to end a run.
        _warn_once(entry["task"], type(error).__name__)
        return 0.0


@functools.cache
def _warn_once(task: str, error: str) -> None:
    logger.warning("The verifier of %r raises %s on some answers; they score 0.", task, error)


@functools.lru_cache(maxsize=256)
def _verifier(task: str, parameters: str) -> Any:
    return import_reasoning_gym().create_dataset(task, **json.loads(parameters, object_hook=_from_json))


# JSON has neither tuples nor keys other than strings, and arc_agi and rearc compare with grids of tuples.
def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _to_json(item) for key, item in value.items()}
        return {"__dict__": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    return value


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__dict__"}:
        return dict(value["__dict__"])
    return value
