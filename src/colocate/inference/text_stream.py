"""Turns the tokens of an answer into text while they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""What decoding makes of the first bytes of a character whose other bytes are still to be drawn."""


class TextStream:
    """Decodes tokens piece by piece; the pieces put together are the text of all tokens decoded at once.

    A token may be a part of a character, and may change the space before the next, so each piece is what the
    text of all tokens has more than that of those before. A character that is not complete is held back.

    Args:
        tokenizer: special tokens are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._shown = ""

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that more tokens add.

        Args:
            is_last: no token follows, so that nothing is held back.
        """
        self._token_ids += token_ids
        text = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
        if not is_last:
            text = text.rstrip(_INCOMPLETE)
        if not text.startswith(
            self._shown
        ):  # some tokenizers tidy up what came before, too late to be unsaid
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece
