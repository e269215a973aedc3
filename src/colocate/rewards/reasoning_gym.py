"""Rewards answers to problems that reasoning_gym generates, by each task's own verifier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from colocate.data.reasoning_gym import score_answer
from colocate.rewards.completions import Completions, completion_text

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(completions: Completions, entry: Sequence[str], **kwargs: Any) -> list[float]:
    """Score each answer with its task's `score_answer`, usually 0.0 to 1.0 with partial credit.

    The answer is the text in the last `<answer>...</answer>`; without these tags, all text after the last
    `</think>`; without that tag, the whole completion.

    Args:
        completions: N completions, standard or conversational.
        entry: N entries, the column `entry` of `load_prompts("reasoning_gym:<task>")`.

    Raises:
        ImportError: reasoning_gym is not installed.
    """
    return [
        score_answer(_extract_answer(completion_text(c)), e) for c, e in zip(completions, entry, strict=True)
    ]


def _extract_answer(text: str) -> str:
    answers = ANSWER.findall(text)
    return (answers[-1] if answers else text.rpartition("</think>")[2]).strip()
