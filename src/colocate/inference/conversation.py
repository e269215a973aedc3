"""A conversation with a model: messages become tokens, and generated tokens become text at once.

The engine keeps one sequence for the whole conversation. An answer is drawn in short turns, so that its text
can be shown while it grows, and the next message is appended to the tokens that are there: what was said
before is neither rendered nor computed again, unless the chat template rewrites it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from colocate.data.encoding import encoded
from colocate.engines.base import RolloutEngine
from colocate.episodes.renderer import Message, Renderer
from colocate.serving.text_stream import TextStream
from colocate.types import Prompt, SamplingParams


class Conversation:
    """Speaks with a model through an engine.

    Args:
        renderer: the tokenizer's chat template; None: the model has none, and each text is a prompt of its
            own, which the model continues.
        sampling: `max_tokens` bounds one answer.
        context_length: tokens that the whole conversation may have.
        system_prompt: the first message of the conversation.
        tokens_per_piece: tokens that are drawn before the engine is polled again. A piece costs the native
            engine one prefill of a token besides its decode steps.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        renderer: Renderer | None,
        sampling: SamplingParams,
        *,
        context_length: int,
        system_prompt: str | None = None,
        tokens_per_piece: int = 8,
    ) -> None:
        if system_prompt is not None and renderer is None:
            raise ValueError(
                "A system prompt is a message, and messages need a chat template, which the model does not "
                "have."
            )
        self._engine, self._tokenizer, self._renderer = engine, tokenizer, renderer
        self._sampling = sampling
        self._context_length = context_length
        self._system_prompt = system_prompt
        self._tokens_per_piece = tokens_per_piece
        self._num_asked = 0
        self._sequence: int | None = None
        self._token_ids: list[int] = []
        """The tokens of the conversation so far, as the engine has them."""
        self._given: list[int] | None = None
        """Tokens to append before the next piece is drawn."""
        self.clear()

    @property
    def has_turns(self) -> bool:
        """Whether messages follow each other; else each is a prompt of its own."""
        return self._renderer is not None

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self._leave()
        system = self._system_prompt
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> Generator[str]:
        """Say something, and yield the answer piece by piece.

        Closing the iterator ends the answer where it is; the conversation goes on from there.

        Raises:
            ValueError: the text is empty or cannot be tokenized, or the conversation has no room in the
                model's context.
        """
        limit = self._begin_turn(text)
        stream = TextStream(self._tokenizer)
        drawn: list[int] = []
        try:
            for token_ids, is_last in self._drawn(limit):
                drawn += token_ids
                piece = "".join(map(stream.feed, token_ids)) + (stream.end() if is_last else "")
                if piece:
                    yield piece
        finally:
            self._end_turn(drawn)

    def _begin_turn(self, text: str) -> int:
        """Send the user's message to the engine. Returns the number of tokens that the answer may have."""
        if not text:
            raise ValueError("There is nothing to answer: the text is empty.")
        asked: Message = {"role": "user", "content": text}
        added = None
        if self._renderer is not None and self._sequence is not None:
            added = self._renderer.bridge(self.messages, [asked], last_id=self._token_ids[-1])
        if self._renderer is not None:
            self.messages.append(asked)
        if added is not None:
            self._token_ids += added
        else:
            self._leave()
            self._token_ids = self._rendered(text)
        room = self._context_length - len(self._token_ids)
        if room < 1:
            num_tokens = len(self._token_ids)
            self.clear()
            raise ValueError(
                f"The conversation has {num_tokens} tokens and the context {self._context_length}: there "
                "is no room for an answer. It begins anew."
            )
        self._given = added
        return min(self._sampling.max_tokens, room)

    def _rendered(self, text: str) -> list[int]:
        if self._renderer is None:
            return encoded(self._tokenizer, text, "The text")
        return self._renderer.render(self.messages)

    def _drawn(self, limit: int) -> Iterator[tuple[list[int], bool]]:
        """The answer's tokens in pieces, each with whether it is the last."""
        while limit > 0:
            size = min(self._tokens_per_piece, limit)
            self._submit(size)
            assert self._sequence is not None
            completion = None
            while completion is None:
                completion = self._engine.poll().get(self._sequence)
            self._token_ids += completion.token_ids
            limit -= len(completion.token_ids)
            is_last = completion.finish_reason == "stop" or limit == 0
            yield list(completion.token_ids), is_last
            if is_last:
                return

    def _submit(self, size: int) -> None:
        """Ask the engine for up to `size` more tokens."""
        if self._sequence is not None:
            self._engine.extend(self._sequence, self._given or [], size)
        else:
            prompt = Prompt(tuple(self._token_ids), self._num_asked, max_tokens=(size,))
            room = self._context_length - len(self._token_ids)
            sampling = replace(self._sampling, max_tokens=room)
            (self._sequence,) = self._engine.submit([prompt], sampling, keep=True)
            self._num_asked += 1
        self._given = None

    def _end_turn(self, drawn: list[int]) -> None:
        """Note the answer, also one that was cut short."""
        if self._engine.is_busy:  # it was stopped in the middle of a piece
            self._leave()
        if self._renderer is None:
            self._leave()
        elif drawn:
            self.messages.append(self._renderer.parse(drawn))
        else:
            self.messages.pop()
            self._leave()

    def _leave(self) -> None:
        """Let the engine forget the sequence."""
        if self._sequence is not None:
            self._engine.abort([self._sequence])
        self._sequence, self._token_ids, self._given = None, [], None
