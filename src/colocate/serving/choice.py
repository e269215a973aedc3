"""`Choice`: one completion of a request, from the tokens that the engine draws to the text that its caller
reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from colocate.serving.calls import Call, ChatCall
from colocate.serving.driver import Drawn
from colocate.serving.handlers import DrawnTurn, DrawRequest
from colocate.serving.message_stream import Delta
from colocate.serving.text_stream import TextStream
from colocate.serving.texts import Texts


@dataclass
class TextPiece:
    """The part of a choice that is new."""

    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    """The parts of a message that the text is."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    offsets: list[int] = field(default_factory=list)
    """The characters of the choice's text before each token."""


class Choice:
    """A completion as it grows.

    Args:
        index: its number among the choices of the request.
    """

    def __init__(self, index: int, call: Call, request: DrawRequest, texts: Texts) -> None:
        self.index = index
        self.request = request
        self.turn = DrawnTurn()
        self.text = ""
        self.offsets: list[int] = []
        self._call = call
        self._texts = texts
        is_chat = isinstance(call, ChatCall)
        # What a message consists of may be marked by special tokens.
        self._stream = TextStream(texts.tokenizer, call.stop, skip_special_tokens=not is_chat)
        context = request.prompt.token_ids
        self._message = texts.message_stream(context, call) if isinstance(call, ChatCall) else None

    @property
    def is_over(self) -> bool:
        return self.turn.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether it ended at a stop text, which the engine does not know."""
        return self._stream.is_stopped

    @property
    def finish_reason(self) -> str | None:
        """Why it has ended, in OpenAI's words; None: it goes on."""
        calls = self.turn.shown is not None and "tool_calls" in self.turn.shown
        return "tool_calls" if calls and self.turn.finish_reason == "stop" else self.turn.finish_reason

    def take(self, drawn: Drawn) -> TextPiece:
        """Add tokens that the engine has drawn; returns the new piece for the caller."""
        text, used, offsets = "", 0, []
        for token_id in drawn.token_ids:
            used += 1
            offsets.append(self._stream.num_chars)
            is_last = drawn.finish_reason == "stop" and used == len(drawn.token_ids)
            if not (is_last and token_id in self.request.sampling.stop_token_ids):
                text += self._stream.feed(token_id)
            if self._stream.is_stopped:
                break
        turn, token_ids = self.turn, drawn.token_ids[:used]
        logprobs = None if drawn.logprobs is None else drawn.logprobs[:used]
        turn.token_ids += token_ids
        turn.num_cached_tokens = drawn.num_cached_tokens
        if token_ids:
            turn.logprobs = None if turn.logprobs is None or logprobs is None else [*turn.logprobs, *logprobs]
        turn.finish_reason = "stop" if self._stream.is_stopped else drawn.finish_reason
        if turn.finish_reason is not None:
            text += self._stream.end()
            if self._stream.is_stopped:  # now or before; the sequence ends elsewhere, if it goes on at all
                turn.finish_reason = "stop"
            else:
                turn.sequence = drawn.sequence
        self.text += text
        self.offsets += offsets
        return TextPiece(text, self._divided(text), token_ids, logprobs, offsets)

    def _divided(self, text: str) -> list[Delta]:
        if self._message is None:
            return []
        deltas = self._message.feed(text)
        if self.is_over:
            assert isinstance(self._call, ChatCall)
            context, told = self.request.prompt.token_ids, self.turn.token_ids
            self.turn.parsed = self._texts.parse(told, context, self._call)
            # A stop text, and what its last token has behind it, are in the turn and not in the answer.
            if self.is_cut:
                told = self._texts.tokenizer(self.text, add_special_tokens=False)["input_ids"]
            deltas += self._message.end(self._texts.parse(told, context, self._call))
            self.turn.shown = self._message.message
        return deltas
