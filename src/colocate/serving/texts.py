"""`Texts`: requests as tokens and tokens as messages, by the model's tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from colocate.data.encoding import TooManyTokens, encoded, encoded_up_to
from colocate.episodes.renderer import Message, Renderer
from colocate.serving.calls import Call, ChatCall, CompletionCall, prompt_field
from colocate.serving.message_stream import MessageStream
from colocate.serving.refusal import Refusal, too_long
from colocate.serving.text_stream import HALF_A_CHARACTER

_NUM_OPENING = 32
"""Tokens at the end of a prompt that may open an answer's reasoning."""


class Texts:
    """`Texts`: a request as tokens, and tokens as a message.

    Args:
        stop_token_ids: the tokens that end a turn.
        chat_template_kwargs: arguments for the chat template.
        template_remedy: how to set another chat template, for messages to clients; None: how a training
            program sets it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        template_remedy: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self._renderer: Renderer | None = None
        self._no_chat, self._no_tools = "", ""
        try:
            remedy = {} if template_remedy is None else {"remedy": template_remedy}
            self._renderer = Renderer(tokenizer, chat_template_kwargs, stop_token_ids, **remedy)
            self._renderer.check_tools()
        except ValueError as error:
            if self._renderer is None:
                self._no_chat = f"{error} Or ask /v1/completions, which takes text as it is."
            self._no_tools = str(error)
        with suppress(ValueError):  # it has no "a"
            encoded(tokenizer, "a", "The text")  # sets truncation and padding, which no two threads may do

    @property
    def are_read_in_parallel(self) -> bool:
        """Whether several threads may encode at the same time: tokenizers in Python may keep a state."""
        return bool(self.tokenizer.is_fast)

    @property
    def renderer(self) -> Renderer:
        """The renderer of conversations.

        Raises:
            Refusal: there is no chat template.
        """
        if self._renderer is None:
            raise Refusal(400, self._no_chat, param="messages", code="no_chat_template")
        return self._renderer

    def context(self, call: Call, number: int, max_len: int) -> tuple[int, ...]:
        """The tokens of a request's prompt.

        Args:
            number: which of the request's prompts.
            max_len: tokens that can be used; of a text with clearly more only a beginning is encoded.

        Raises:
            Refusal: the prompt has no token, far too many, or characters that are none, or there is no chat
                template, or none that carries tools, or one that refuses the conversation.
        """
        with refusing_length(call, max_len):
            if isinstance(call, ChatCall):
                return self._conversation(call, max_len)
            assert isinstance(call, CompletionCall), "there are two kinds"
            prompt = call.prompts[number]
            ids = self._encoded(prompt, max_len) if isinstance(prompt, str) else prompt
            if not ids:
                raise Refusal(400, "The prompt has no token to start from.", param="prompt")
            return ids

    def _encoded(self, prompt: str, max_len: int) -> tuple[int, ...]:
        def encode(text: str) -> list[int]:
            return encoded(self.tokenizer, text, "The prompt")

        try:
            return tuple(encoded_up_to(encode, prompt, max_len))
        except TooManyTokens:
            raise
        except ValueError as error:
            raise Refusal(400, str(error), param="prompt") from error

    def token(self, token_id: int) -> tuple[str, list[int] | None]:
        """A token's text, and its bytes, which may be a part of a character's; None: they are not known."""
        once, twice = (str(self.tokenizer.decode([token_id] * times)) for times in (1, 2))
        if HALF_A_CHARACTER not in once:
            text = twice[len(once) :]  # sentencepiece leaves the space before a first token out
            return text, list(text.encode())
        name = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return once, [int(byte[1], 16)]
        known = {letter: number for number, letter in bytes_to_unicode().items()}
        return once, [known[letter] for letter in name] if known.keys() >= set(name) else None

    def parse(self, token_ids: Sequence[int], context: Sequence[int], call: ChatCall) -> Message:
        """Parse a whole turn into a message, for `Renderer.bridge`."""
        return self.renderer.parse(token_ids, context[-_NUM_OPENING:], call.tools)

    def message_stream(self, context: Sequence[int], call: ChatCall) -> MessageStream:
        """The stream that divides the text of an answer to a call into its parts."""
        opened = str(self.tokenizer.decode(list(context[-_NUM_OPENING:])))
        return MessageStream(self.renderer, call.tools, opened)

    def _conversation(self, call: ChatCall, max_len: int) -> tuple[int, ...]:
        self.check_tools(call)
        try:
            return tuple(self.renderer.render(call.messages, call.tools, most=max_len))
        except TooManyTokens:
            raise
        except ValueError as error:
            raise Refusal(400, str(error), param="messages") from error

    def check_tools(self, call: ChatCall) -> None:
        """Raises Refusal if a call has tools and the chat template does not carry them."""
        has_tools = call.tools or any(message.get("tool_calls") for message in call.messages)
        if has_tools and self._no_tools:
            raise Refusal(400, self._no_tools, param="tools", code="unsupported_parameter")


@contextmanager
def refusing_length(call: Call, max_len: int) -> Iterator[None]:
    """Refuse a request whose prompt `encoded_up_to` did not encode to its end."""
    try:
        yield
    except TooManyTokens as error:
        why = f"The prompt has more than {max_len} tokens, which the context has."
        raise too_long(prompt_field(call), why) from error
