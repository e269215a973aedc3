"""Text and conversations as the tokens of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

CONTINUE = "continue_final_message"
"""transformers' argument by which the template leaves the last message open. It applies here to prompts that
end with an assistant's message, which the completion then continues."""

_SET_HERE = {
    "add_generation_prompt": "a prompt always ends where the assistant's turn begins; "
    f"{CONTINUE}=True lets the model continue a prompt's last message",
    "tools": "pass `tools` or `environment_factory` to the trainer",
    **dict.fromkeys(
        ("conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
        "prompts are tokenized one by one, and max_prompt_length cuts them",
    ),
}
_CHARS_PER_TOKEN = 4
_SEAM = 64
"""Tokens by which a text's beginning, cut anywhere, may exceed those that the whole text has there."""


class TooManyTokens(ValueError):
    """A text has more tokens than can be used."""


def encoded_up_to(encode: Callable[[str], list[int]], text: str, most: int) -> list[int]:
    """The token ids of a text; encoding stops soon after `most` tokens.

    Raises:
        TooManyTokens: a beginning of the text has more. A text slightly longer than `most` is encoded whole.
    """
    length = _CHARS_PER_TOKEN * (most + _SEAM)
    while length < len(text):
        if len(encode(text[:length])) > most + _SEAM:
            raise TooManyTokens(f"has more than {most} tokens")
        length *= 4
    return encode(text)


def encoded(tokenizer: Any, text: str, what: str) -> list[int]:
    """The token ids of a text, with the special tokens that the tokenizer adds to it.

    Args:
        what: the subject of the error's sentence, such as "The prompt".

    Raises:
        ValueError: the tokenizer has no token for a part of the text, and no unknown token.
    """
    try:
        return list(tokenizer(text=text)["input_ids"])
    except Exception as error:  # tokenizers raises this very class
        if type(error) is not Exception:
            raise
        raise ValueError(
            f"{what} {text!r:.200} has characters that are no tokens of this model's tokenizer ({error})."
        ) from error


def check_template_arguments(arguments: Mapping[str, Any] | None, name: str = "chat_template_kwargs") -> None:
    """Refuse an argument that is set here for every prompt.

    Args:
        name: the option that holds the arguments, for the message.

    Raises:
        ValueError: with what to set instead.
    """
    for argument in arguments or ():
        if argument in _SET_HERE:
            raise ValueError(f"{name} cannot set {argument!r}: {_SET_HERE[argument]}. Leave it out.")


def is_continued(messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> bool:
    """Whether the completion of a prompt continues its last message."""
    return bool(arguments.get(CONTINUE)) and bool(messages) and messages[-1].get("role") == "assistant"


def ending_of(messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `apply_chat_template` for a prompt: the given ones, and those that say how it ends."""
    if is_continued(messages, arguments):
        return {**arguments, "add_generation_prompt": False}
    return {**without_continuing(arguments), "add_generation_prompt": True}


def without_continuing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for conversations whose last message is whole."""
    return {name: value for name, value in arguments.items() if name != CONTINUE}
