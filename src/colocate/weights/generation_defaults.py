"""A model's `generation_config`, which is saved with it and which transformers refuses to write if its values
contradict each other."""

from __future__ import annotations

import copy
import logging
from typing import Any

from transformers import GenerationConfig

from colocate.options.values import shown

logger = logging.getLogger(__name__)

_FIRST = ("do_sample", "num_beams", "return_dict_in_generate")
"""Switches, on which it depends whether other values fit."""


def make_savable(lm: Any) -> None:
    """Put a copy in the place of a `generation_config` that could not be saved, and say what differs.

    Training does not read these values, but the first save, after all work until then, would fail. A
    temperature or another filter asks for sampling, so that `do_sample=True` is added; values that contradict
    others even then are left out.
    """
    if not lm.can_generate() or _is_savable(lm.generation_config):
        return
    given: GenerationConfig = lm.generation_config
    repaired = copy.deepcopy(given)
    repaired.do_sample = True
    left_out: dict[str, Any] = {}
    if not _is_savable(repaired):
        repaired, left_out = _consistent(given)
    lm.generation_config = repaired
    changes = ["do_sample=True"] if repaired.do_sample and not given.do_sample else []
    changes += [f"no {name}={shown(value)}" for name, value in left_out.items()]
    logger.warning(
        f"The generation_config of {type(lm).__name__} contradicts itself, and transformers would refuse to "
        f"save it: {_problem(given)} It is saved with {' and '.join(changes)}; to choose for yourself, "
        "change model.generation_config before training."
    )


def _consistent(given: GenerationConfig) -> tuple[GenerationConfig, dict[str, Any]]:
    """Split the values, taken one by one, into those that fit together and the others."""
    values = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    taken = GenerationConfig()
    left_out: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: name not in _FIRST):
        before = getattr(taken, name, None)
        setattr(taken, name, copy.deepcopy(values[name]))
        if not _is_savable(taken):
            left_out[name] = values[name]
            if hasattr(GenerationConfig(), name):
                setattr(taken, name, before)
            else:
                delattr(taken, name)
    return taken, left_out


def _is_savable(config: GenerationConfig) -> bool:
    return not _problem(config)


def _problem(config: GenerationConfig) -> str:
    """The first of the problems for which transformers refuses to save; empty if it does not."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        lines = [line.strip("- ") for line in str(error).splitlines() if line.strip()]
        return lines[1 if len(lines) > 1 else 0].rstrip(".") + "."
    return ""
