"""Text as the tokens of a model."""

from __future__ import annotations

from typing import Any


def encoded(tokenizer: Any, text: str, what: str) -> list[int]:
    """The token ids of a text, with the special tokens that the tokenizer adds to it.

    Args:
        what: the subject of the error's sentence, such as "The prompt".

    Raises:
        ValueError: the tokenizer has no token for a part of the text, as one without an unknown token may.
    """
    try:
        return list(tokenizer(text=text)["input_ids"])
    except Exception as error:  # tokenizers raises this very class
        if type(error) is not Exception:
            raise
        raise ValueError(
            f"{what} {text!r:.200} has characters that are no tokens of this model's tokenizer ({error})."
        ) from error
