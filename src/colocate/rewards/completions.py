"""The text of a completion, whichever form it has."""

from __future__ import annotations

from collections.abc import Sequence

Completion = str | list[dict[str, str]]
Completions = Sequence[Completion]


def completion_text(completion: Completion) -> str:
    """The text of a standard completion, or the content of the first message of a conversational one."""
    return completion if isinstance(completion, str) else completion[0]["content"]
