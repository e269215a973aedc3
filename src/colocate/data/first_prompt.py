"""Checks of the first prompt as the model will read it: one prompt shows some faults of a whole run."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from colocate.data.encoding import CONTINUE, is_continued
from colocate.data.options import PromptOptions
from colocate.data.prompts import is_conversational, tell_bare_strings

logger = logging.getLogger(__name__)

_USUAL_TAGS = ("think", "thinking", "reasoning", "thought", "answer", "solution")
"""Tags that reward functions look for."""
_READS_TAGS = {"think_format_reward": "<think>"}
"""Built-in reward functions that want a tag at a completion's beginning."""


def tell_first_prompt(
    row: Mapping[str, Any],
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    reward_names: Collection[str] = (),
) -> None:
    """Warn of faults that a prompt shows, once of each.

    Args:
        row: the first row of the training data.
        token_ids: its prompt.
        reward_names: the run's reward functions.
    """
    tell_bare_strings(row["prompt"], tokenizer, options.apply_chat_template)
    text = str(tokenizer.decode(list(token_ids)))
    arguments = {**(options.chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})}
    for warning in (
        *_ends(row["prompt"], token_ids, tokenizer),
        *_left_open(row["prompt"], arguments),
        *_hidden_tags(text, tokenizer),
        *_opened_tags(text, reward_names),
    ):
        logger.warning(warning)


def _ends(prompt: Any, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """A beginning that is there twice, and an end after which the model begins another text."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and list(token_ids[:2]) == [bos, bos]:
        where = "the chat template" if is_conversational(prompt) else "the text of the prompts"
        yield (
            f"Prompts begin with {tokenizer.bos_token!r} twice: it is in {where}, and the tokenizer adds it, "
            "too. Models are not trained on that. Leave it out of the text, or give messages instead of text "
            "that apply_chat_template has made."
        )
    ends = token_ids[-1] == eos != bos and len(token_ids) > 1
    if ends and isinstance(prompt, str) and not prompt.endswith(str(tokenizer.eos_token)):
        yield (
            f"The tokenizer puts {tokenizer.eos_token!r} behind every prompt, so the model begins a new text "
            "and does not complete the prompt. Pass a processing_class that adds none (add_eos_token=False, "
            "or another post-processor)."
        )


def _left_open(prompt: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    is_answered = is_conversational(prompt) and prompt[-1].get("role") == "assistant"
    if is_answered and not is_continued(prompt, arguments):
        yield (
            "Prompts end with a message of the assistant, which the chat template closes: the model answers "
            f"in a new turn. Set chat_template_kwargs={{{CONTINUE!r}: True}} if it is to continue that "
            "message, or leave the message out."
        )


def _hidden_tags(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Tags that completions are decoded without, as they are special tokens."""
    special = {str(token) for token in tokenizer.all_special_tokens}
    pairs = [token for token in special if f"</{token[1:]}" in special and re.fullmatch(r"<\w+>", token)]
    usual = {f"<{name}>" for name in _USUAL_TAGS}
    if hidden := sorted(tag for tag in pairs if tag in usual or tag in text):
        named = ", ".join(f"{tag} and </{tag[1:]}" for tag in hidden)
        yield (
            f"{named} are special tokens of the tokenizer, and completions are decoded without those: no "
            "reward function sees them in the text. Add them as tokens that are not special "
            "(tokenizer.add_tokens), or look for their ids in completion_ids."
        )


def _opened_tags(text: str, reward_names: Collection[str]) -> Iterator[str]:
    for name, tag in _READS_TAGS.items():
        if name in reward_names and text.rfind(tag) > text.rfind(f"</{tag[1:]}"):
            yield (
                f"Prompts end after {tag}, so completions begin within the reasoning, and {name}, which "
                f"looks for {tag} at their beginning, gives 0 to all. Use a reward that looks for "
                f"</{tag[1:]} alone, or a chat template that leaves the tag to the model."
            )
