"""`TextStream`: the text of tokens that arrive a few at a time, up to a text at which it stops."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

HALF_A_CHARACTER = "\ufffd"
_MAX_PENDING = 32
"""Tokens after which bytes that make no character are told: none has so many."""


class TextStream:
    """Decodes tokens as they come. Text that it has returned never changes.

    Held back are bytes that make no character yet, and an end that may become one of the stop texts.

    Args:
        stop: the text ends before the one of these that is complete first.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # A token's text may depend on those before it, so that a few decoded ones are decoded again with it.
        self._first, self._num_decoded = 0, 0
        self._held = ""
        self.num_chars = 0
        """Characters of the tokens so far, but for bytes that make no character yet."""
        self.is_stopped = False
        """Whether a stop text was found: what follows is not decoded."""

    def feed(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now."""
        self._ids.append(token_id)
        text = self._decoded() or ""
        self.num_chars += len(text)
        return self._release(text) if text else ""

    def end(self) -> str:
        """The text that was held back, as nothing follows any more."""
        text = "" if self.is_stopped else self._held + (self._decoded(is_last=True) or "")
        at = self._stop_in(text)
        self._held, self.is_stopped = "", self.is_stopped or at is not None
        return text if at is None else text[:at]

    def _decoded(self, *, is_last: bool = False) -> str | None:
        """The text of the tokens that were not decoded yet; None: it may end within a character."""
        end = len(self._ids)
        before = self._text(self._ids[self._first : self._num_decoded])
        after = self._text(self._ids[self._first :])
        if not is_last and (len(after) <= len(before) or after.endswith(HALF_A_CHARACTER)):
            if end - self._num_decoded < _MAX_PENDING or (cut := self._cut(after)) is None:
                return None
            after, end = cut
        self._first, self._num_decoded = self._num_decoded, end
        return after[len(before) :]

    def _cut(self, whole: str) -> tuple[str, int] | None:
        """Text and number of tokens that are certain, where `whole` ends in many bytes that are no text: in
        front of at least four characters, as a character has at most four bytes."""
        for end in range(len(self._ids) - 4, self._num_decoded, -1):
            text, rest = self._text(self._ids[self._first : end]), self._text(self._ids[end:])
            if text + rest == whole and (len(rest) >= 4 or not text.endswith(HALF_A_CHARACTER)):
                return text, end
        return None

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def _release(self, text: str) -> str:
        text = self._held + text
        if (at := self._stop_in(text)) is not None:
            self._held, self.is_stopped = "", True
            return text[:at]
        num_held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _stop_in(self, text: str) -> int | None:
        """Where the stop text begins that is complete first; None: there is none."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def overlap(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may be a beginning of `mark`, but not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
