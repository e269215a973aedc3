"""The options that prompts are made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from colocate.options.requirements import AT_LEAST_ONE, IN_COMPLETIONS


@dataclass
class PromptOptions:
    """The options by which a dataset's row becomes a prompt."""

    # ── Prompts ──────────────────────────────────────────────────────────────────────────────────────────

    max_prompt_length: Annotated[int | None, AT_LEAST_ONE, IN_COMPLETIONS] = None
    """Cut a longer prompt to this many last tokens. None: no prompt is cut. (TRL has dropped the option.)"""
    apply_chat_template: Annotated[bool | None, IN_COMPLETIONS] = None
    """Make a user's message of each prompt that is a string, so that the chat template is applied. None: as
    False, with a warning if the tokenizer has a chat template."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, IN_COMPLETIONS] = None
    """Arguments of the tokenizer's `apply_chat_template` for conversational prompts. With
    continue_final_message: true, completions continue the last message of prompts that end with one of the
    assistant."""
