"""The text of a completion, whichever form it has."""

from __future__ import annotations

from collections.abc import Sequence

Completions = Sequence[str] | Sequence[list[dict[str, str]]]


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a standard completion, or the content of a conversational one's (first) message."""
    return completion if isinstance(completion, str) else completion[0]["content"]
