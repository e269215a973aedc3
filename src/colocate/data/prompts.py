"""Turns rows of a dataset into prompt tokens, and completion tokens into the texts that reward functions see.

A row's `prompt` is *standard*, a string, or *conversational*, a list of messages like
`{"role": "user", "content": "..."}`. Completions take the form of their prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from colocate.data.encoding import check_template_arguments, encoded, ending_of
from colocate.data.slow_prompts import check_chars, named_if_slow

logger = logging.getLogger(__name__)

TrainData = TypeVar("TrainData", bound=datasets.Dataset | datasets.IterableDataset)
IMAGE_COLUMNS = ("image", "images")
# Keyword arguments of every reward function: a column of that name could not reach it.
RESERVED_COLUMNS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]
    )


def validate_columns(dataset: datasets.Dataset | datasets.IterableDataset) -> None:
    """Refuse a dataset that cannot be trained on, before anything is loaded or allocated.

    In a dataset with a length every prompt is looked at (half a second for 100,000 conversations), but not
    tokenized; in a stream only the first prompt is.

    Raises:
        ValueError: the dataset is empty, has no column `prompt`, has images, has a column with the name of an
            argument that every reward function receives, or a prompt is neither text nor a conversation.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("The dataset is empty: it has no prompt to train on.")
    columns = list(first)
    if "prompt" not in columns:
        raise ValueError(
            f"The dataset has no column 'prompt'; it has {', '.join(map(repr, columns)) or 'none'}. "
            "Name the one with the prompts: prompt_column: <name> in a run file, or "
            "dataset.rename_column(<name>, 'prompt') in Python."
        )
    if images := [name for name in IMAGE_COLUMNS if name in columns]:
        raise ValueError(
            f"The dataset has the column {images[0]!r}, but only text can be trained on. "
            f"If the prompts make sense without it, use dataset.remove_columns({images!r})."
        )
    if reserved := [name for name in RESERVED_COLUMNS if name in columns]:
        raise ValueError(
            f"The column {reserved[0]!r} has the name of an argument that every reward function receives. "
            f"Rename it: dataset.rename_column({reserved[0]!r}, <another name>)."
        )
    is_stream = isinstance(dataset, datasets.IterableDataset)
    for row, prompt in enumerate([first["prompt"]] if is_stream else all_prompts(dataset)):
        _check_prompt(prompt, row_name(row))


def all_prompts(dataset: datasets.Dataset) -> list[Any]:
    """All prompts of a dataset that has a length."""
    if "prompt" not in dataset.column_names:  # a transform makes them
        return [row["prompt"] for row in dataset]  # type: ignore[call-overload]
    return dataset["prompt"][:]  # at once: one by one takes several times as long


def as_conversations(dataset: TrainData) -> TrainData:
    """The dataset with each prompt that is a string as a user's message, for the chat template."""
    return dataset.map(
        lambda prompts: {"prompt": [p if is_conversational(p) else user_message(p) for p in prompts]},
        batched=True,
        input_columns=["prompt"],
    )


def user_message(text: Any) -> list[dict[str, Any]]:
    """A conversation of one message, by the user."""
    return [{"role": "user", "content": text}]


def tell_bare_strings(
    prompt: Any, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool | None
) -> None:
    """Warn of prompts that are strings if the tokenizer has a chat template that is neither asked for nor
    declined.

    Args:
        prompt: the first prompt of the training data.
    """
    if apply_chat_template is None and isinstance(prompt, str) and tokenizer.chat_template:
        logger.warning(
            f"The prompts are strings, so the model reads them as they are ({prompt!r:.80}), and the chat "
            "template of its tokenizer is not applied: an instruction-tuned model does not see where the "
            "user's turn ends. Set apply_chat_template=True to make a user's message of each, or False if it "
            "is meant so."
        )


def row_name(row: int) -> str:
    """The name of a dataset's row in errors."""
    return f"Row {row} (from 0)"


def tokenize_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
    names: Sequence[str] | None = None,
    schemas: Sequence[list[dict[str, Any]] | None] | None = None,
    context_length: int | None = None,
) -> list[tuple[int, ...]]:
    """The token ids of each row's `prompt`, never padded.

    Conversational prompts go through the chat template with the generation prompt added, or end with the
    beginning of an answer (`encoding.CONTINUE`). A row's own `chat_template_kwargs` column, if
    there is one, takes precedence over the run's.

    Args:
        max_prompt_length: Longer prompts keep their last `max_prompt_length` tokens, the generation prompt
            and the end of the question among these.
        names: Names of the rows in errors; by default their indices.
        schemas: The JSON schemas of each row's tools, for its chat template; None: it has none.
        context_length: Text that certainly has more tokens is refused before it is encoded; None: none is.

    Raises:
        ValueError: a prompt is empty or neither form, the chat template refuses it, the tokenizer has none
            for conversational prompts, or `max_prompt_length` is not positive.
    """
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(
            f"max_prompt_length={max_prompt_length} would leave no token of the prompt; None keeps all."
        )
    names = [row_name(index) for index in range(len(rows))] if names is None else names
    token_ids = []
    with named_if_slow(names, [row["prompt"] for row in rows]) as indices:
        for index in indices:
            row, prompt, name = rows[index], rows[index]["prompt"], names[index]
            _check_prompt(prompt, name)
            if context_length is not None and max_prompt_length is None:
                for text in texts_of(prompt):
                    check_chars(text, tokenizer, context_length, name)
            if is_conversational(prompt):
                tools = None if schemas is None else schemas[index]
                ids = _apply_chat_template(row, tokenizer, chat_template_kwargs or {}, name, tools)
            else:
                ids = encoded(tokenizer, prompt, f"{name}: The prompt")
            if not ids:
                raise ValueError(
                    f"{name}: The prompt {prompt!r} has no tokens: a completion needs at least one to follow."
                )
            # The oldest tokens go, as with TRL's `max_prompt_length`: the question comes last.
            token_ids.append(tuple(ids if max_prompt_length is None else ids[-max_prompt_length:]))
    return token_ids


def texts_of(prompt: Any) -> list[str]:
    """The text of a prompt, or of each of its messages that is a string."""
    if isinstance(prompt, str):
        return [prompt]
    contents = [message.get("content") for message in prompt]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    texts = contents + [block.get("text") for block in blocks if isinstance(block, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def _apply_chat_template(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any],
    name: str,
    tools: list[Any] | None = None,
) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            "The dataset's prompts are conversations, but the tokenizer "
            f"{tokenizer.name_or_path!r} has no chat template. Take a model that was trained on one (the "
            "names of many end in -Instruct), pass a `processing_class` that has one, or give the prompts as "
            "strings. A text becomes a conversation by system_prompt and by apply_chat_template=True: leave "
            "them out, and write the system prompt into prompt_template."
        )
    # Arrow gives every row all the keys that any row has and fills in None; those were never set.
    own = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    check_template_arguments(own, f"{name}: The column chat_template_kwargs")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            row["prompt"],
            tools=tools,
            tokenize=True,
            return_dict=True,
            **ending_of(row["prompt"], {**chat_template_kwargs, **own}),
        )
    except Exception as error:  # templates are programs that refuse what they like, and fail as they like
        raise ValueError(
            f"{name}: The chat template of the tokenizer raised {type(error).__name__}: {error}\n"
            f"The prompt is {row['prompt']!r:.500}"
        ) from error
    return encoded["input_ids"]


# What an assistant's message may have instead of content.
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking")


def _check_prompt(prompt: Any, name: str) -> None:
    if isinstance(prompt, str):
        return
    if not is_conversational(prompt) or not all(isinstance(message, Mapping) for message in prompt):
        raise ValueError(
            f"{name}: A prompt is a string or a non-empty list of messages like "
            f"{{'role': 'user', 'content': '...'}}; got {type(prompt).__name__}: {prompt!r:.200}"
        )
    for message in prompt:
        _check_message(message, name)


def _check_message(message: Mapping[str, Any], name: str) -> None:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{name}: A message has no role, such as 'user': {message!r:.200}")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and any(map(message.get, _INSTEAD_OF_CONTENT)):
        return
    blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    if any(block.get("type") not in (None, "text") for block in blocks):
        raise ValueError(
            f"{name}: A message has content other than text, which cannot be trained on: {message!r:.200}"
        )
    # Templates would write the word "None", or nothing.
    if content is None or any(block.get("text") is None for block in blocks):
        raise ValueError(f"{name}: A message has no content: {message!r:.200}")


def decode_completions(
    completion_ids: Sequence[Sequence[int]],
    prompts: Sequence[str | list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str | list[dict[str, str]]]:
    """The completions without special tokens, in the form of their prompts: text, or a list of one assistant
    message.

    Args:
        completion_ids: N sequences of token ids, the stop token included or not.
        prompts: N prompts, one per completion.
    """
    # As an array, since `decode` asks of every element of a list what it is, for as long as decoding takes.
    arrays = (np.array(ids, dtype=np.int64) for ids in completion_ids)
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in arrays]
    return [
        [{"role": "assistant", "content": text}] if is_conversational(prompt) else text
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def check_context_length(
    num_prompt_tokens: int, max_completion_length: int, context_length: int, reason: str = ""
) -> None:
    """Raises ValueError unless a prompt and the longest completion together fit the model's context; `reason`
    says what limits that."""
    total = num_prompt_tokens + max_completion_length
    if total <= context_length:
        return
    room = context_length - max_completion_length
    remedy = "max_completion_length" + (f", or max_prompt_length to at most {room}" if room > 0 else "")
    raise ValueError(
        f"A prompt of {num_prompt_tokens} tokens + max_completion_length={max_completion_length} = {total} "
        f"tokens, but the context holds {context_length}{f' ({reason})' if reason else ''}. Lower {remedy}."
    )
