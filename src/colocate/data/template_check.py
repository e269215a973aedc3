"""Checks that a chat template tells prompts apart, and renders one prompt the same each time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from colocate.data.prompts import is_conversational

logger = logging.getLogger(__name__)

NUM_ROWS = 8
"""Rows that are rendered to be compared, and times that one of them is."""

_CLOCK = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1")
"""Where a template asks for the time, and in which format."""
_TIME_OF_DAY = set("HIMSpfcXTRrs")
"""Directives of strftime that change within a day."""

Tokenize = Callable[[Sequence[dict[str, Any]]], list[tuple[int, ...]]]


def check_template(
    rows: Sequence[dict[str, Any]], tokenize: Tokenize, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a chat template that loses what users say or draws lots, and warn of one that reads the clock.

    Args:
        rows: a few rows of the training data.
        tokenize: returns the prompt tokens of rows.

    Raises:
        ValueError: prompts with different texts have the same tokens, or one prompt has different tokens each
            time.
    """
    rows = [row for row in rows if is_conversational(row["prompt"])]
    if not rows:
        return
    shortest = min(rows, key=lambda row: len(str(row["prompt"])))
    if _tells_clock(shortest, tokenize, tokenizer):
        return
    if len(set(tokenize([shortest] * NUM_ROWS))) > 1:
        raise ValueError(
            "The chat template renders the same prompt differently each time, so that no run could be "
            f"repeated or resumed, and turns would not go on from what was sampled: {_shown(shortest)}. Take "
            "`random` and the like out of the template."
        )
    said = {_said(row["prompt"]) for row in rows}
    if len(said) > 1 and len(set(tokenize(rows))) == 1:
        raise ValueError(
            f"The chat template renders all of the first {len(rows)} prompts alike, though {len(said)} of "
            f"them say different things: it leaves out what users say. One is {_shown(rows[0])}. Check how "
            "it writes `message.content`, or set another `tokenizer.chat_template`."
        )


def _tells_clock(row: dict[str, Any], tokenize: Tokenize, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the prompt contains the time at which it was rendered; warns if so."""
    before = datetime.now()
    (ids,) = tokenize([row])
    text = _packed(str(tokenizer.decode(list(ids))))
    letters: set[str] = set()
    for _, form in _CLOCK.findall(str(tokenizer.chat_template)):
        if any(_packed(time.strftime(form)) in text for time in (before, datetime.now())):
            letters.update(re.findall(r"%[-#]?([A-Za-z])", form))
    if letters:
        logger.warning(
            "The chat template writes %s into prompts (strftime_now): they change while the run goes on, and "
            "a run that is resumed later reads others. If the template has an argument for it, such as "
            "date_string, set that in chat_template_kwargs; else take it out of the template.",
            "the time of day" if letters & _TIME_OF_DAY else "today's date",
        )
    return bool(letters)


def _packed(text: str) -> str:
    return "".join(text.split())


def _said(prompt: Sequence[Mapping[str, Any]]) -> str:
    return str([message.get("content") for message in prompt if message.get("role") == "user"])


def _shown(row: Mapping[str, Any]) -> str:
    return f"{row['prompt']!r:.200}"
