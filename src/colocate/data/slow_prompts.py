"""Limits the time that rendering and encoding take, and refuses text that cannot fit."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from colocate.users_code.errors import RewardTimeout
from colocate.users_code.time_limit import TimeLimit

logger = logging.getLogger(__name__)

SLOW_S = 10.0
"""Seconds of silence after which the prompt at work is named."""
START_S = 600.0
"""Seconds that the prompts looked at before the first step may take, all together: dozens, not all."""
_CERTAIN_CHARS = 100_000
"""Shorter prompts are encoded without looking for the tokenizer's longest token."""
_longest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Characters of tokenizers' longest tokens."""


def limited(function: Callable[[], None]) -> None:
    """Call a function that renders and encodes prompts before the first step.

    Raises:
        ValueError: it takes longer than `START_S`.
    """
    limit = TimeLimit(START_S, "chat template", "the limit of the start")
    limit.arm_last_resort()
    try:
        limit.call("of the start", function)
    except RewardTimeout as timeout:
        raise ValueError(
            "Rendering and encoding the prompts that are looked at before the first step, a few dozen, took "
            f"longer than {START_S:g} s, and a run does so with all. Look for loops in loops in the chat "
            "template (tokenizer.chat_template), and for very long text in the dataset."
        ) from timeout
    finally:
        limit.disarm_last_resort()


@contextmanager
def named_if_slow(names: Sequence[str], prompts: Sequence[Any]) -> Iterator[Iterator[int]]:
    """Yield an iterator over the prompts' indices; a warning names the prompt at which it takes long."""
    at_work = [0]

    def numbers() -> Iterator[int]:
        for number in range(len(prompts)):
            at_work[0] = number
            yield number

    def tell() -> None:
        number = at_work[0]
        logger.warning(
            "%s: making its %s characters tokens takes long (%g s, with the %d prompts before it). A chat "
            "template with loops in loops, or very long text, may take minutes, or have no end: Ctrl-C stops "
            "it.",
            names[number],
            f"{len(str(prompts[number])):,}",
            SLOW_S,
            number,
        )

    timer = threading.Timer(SLOW_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield numbers()
    finally:
        timer.cancel()


def check_chars(text: str, tokenizer: PreTrainedTokenizerBase, most_tokens: int, name: str) -> None:
    """Raises ValueError if a text certainly has more tokens than fit: encoding it could take minutes."""
    if len(text) <= _CERTAIN_CHARS:
        return
    if tokenizer not in _longest:
        _longest[tokenizer] = max(map(len, tokenizer.get_vocab()), default=1)
    longest = _longest[tokenizer]
    if len(text) > longest * most_tokens:
        raise ValueError(
            f"{name}: The prompt has {len(text):,} characters, and the tokenizer's longest token has "
            f"{longest}: so it has {len(text) // longest:,} tokens or more, and no more than {most_tokens:,} "
            "fit into the context. Shorten it, leave the row out, or set max_prompt_length to keep the last "
            "tokens."
        )
