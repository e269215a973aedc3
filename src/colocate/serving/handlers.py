"""`RequestHandler`: turns a client's calls into requests to the engine. `StatelessHandler` serves clients of
`colocate serve`, and an agent's session those of a run."""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from colocate.engines.requests import check_token_ids, derived_seed
from colocate.episodes.renderer import Message
from colocate.serving.calls import Call, prompt_field
from colocate.serving.refusal import Refusal, too_long
from colocate.serving.texts import Texts
from colocate.types import Prompt, SamplingParams

_SEED = 0
"""`SamplingParams.seed` of all requests. A request's own seed is in its prompt's key, so that requests with
different seeds are drawn together."""


@dataclass(frozen=True)
class DrawRequest:
    """A request to the engine for the turns that a call asks for; the fields are those of `driver.Job`."""

    prompt: Prompt
    """The whole context, with one sample for each choice."""
    sampling: SamplingParams
    keep: bool = False
    extends: int | None = None
    given_ids: tuple[int, ...] = ()
    note: Any = None
    """The handler's own notes."""


@dataclass
class DrawnTurn:
    """The tokens and the message that were drawn for a choice."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens up to the one that ends the turn, or completes a stop text."""
    logprobs: list[float] | None = field(default_factory=list)
    """The log-probs of these tokens; None: the engine cannot tell."""
    finish_reason: Literal["stop", "length"] | None = None
    num_cached_tokens: int | None = None
    """The number that `Completion.num_cached_tokens` explains."""
    shown: Message | None = None
    """The message as the caller gets it; None: the call was for text."""
    parsed: Message | None = None
    """The message as `Renderer.parse` has read it."""
    sequence: int | None = None
    """The number of the engine's sequence, if it was kept and can go on."""


class RequestHandler(Protocol):
    """Makes requests to the engine from a caller's calls."""

    max_len: int
    """Tokens that a prompt and its completion may have together."""
    reading: AbstractAsyncContextManager[Any]
    """Held while a call is read. A handler whose calls depend on their order has a lock here."""

    def draw_request(self, call: Call, number: int) -> DrawRequest:
        """The request by which a call's turns are drawn.

        Args:
            number: which of the call's prompts.

        Raises:
            Refusal: they cannot be drawn.
        """
        ...

    def note(self, call: Call, request: DrawRequest, turn: DrawnTurn) -> None:
        """Take notice of a turn that has ended."""
        ...


class StatelessHandler:
    """The handler of a service: every call stands alone.

    A completion depends on the request's seed, the number of its prompt and of its choice, and not on other
    requests.

    Args:
        max_len: tokens that a prompt and its completion may have together.
        vocab_size: number of token ids of the model.
    """

    def __init__(self, texts: Texts, *, max_len: int, vocab_size: int) -> None:
        self._texts = texts
        self.max_len = max_len
        self.reading: AbstractAsyncContextManager[Any] = nullcontext()
        self._vocab_size = vocab_size

    def draw_request(self, call: Call, number: int) -> DrawRequest:
        context = self._texts.context(call, number, self.max_len)
        check_context(context, self._vocab_size)
        room = self.max_len - len(context)
        limit = room if call.max_tokens is None else call.max_tokens
        if not 1 <= limit <= room:
            wanted = "" if call.max_tokens is None else f" and max_tokens={limit} make {len(context) + limit}"
            raise too_long(
                prompt_field(call),
                f"The prompt's {len(context)} tokens{wanted}, and the context has {self.max_len}.",
            )
        seed = secrets.randbits(63) if call.seed is None else call.seed
        key = derived_seed(seed, number, num_bits=63)
        prompt = Prompt(context, key, range(call.n), (limit,) * call.n)
        return DrawRequest(prompt, self.sampling(call))

    def sampling(self, call: Call) -> SamplingParams:
        """The sampling parameters of a call."""
        stops = self._texts.stop_token_ids
        most = min(self.max_len, 2**31 - 1)
        return SamplingParams(max_tokens=most, stop_token_ids=stops, seed=_SEED, **call.sampling)  # type: ignore[arg-type]

    def note(self, call: Call, request: DrawRequest, turn: DrawnTurn) -> None:
        """Remember nothing."""


def check_context(context: tuple[int, ...], vocab_size: int) -> None:
    """Raises Refusal if a token is outside the vocabulary."""
    try:
        check_token_ids("The prompt has", context, vocab_size)
    except ValueError as error:
        raise Refusal(400, str(error), param="prompt") from error
