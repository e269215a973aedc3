"""Rewards a completion that has the form that was asked for."""

from __future__ import annotations

import re
from typing import Any

from colocate.rewards.completions import Completions, completion_text

# `(?!.*<think>)` refuses a second opening tag anywhere.
THINK_FORMAT = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: Completions, **kwargs: Any) -> list[float]:
    """1.0 if the completion starts with reasoning between `<think>` and `</think>`, else 0.0.

    Args:
        completions: N completions, standard or conversational.
    """
    return [1.0 if THINK_FORMAT.match(completion_text(completion)) else 0.0 for completion in completions]
