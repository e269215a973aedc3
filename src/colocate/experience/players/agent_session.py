"""`Session`: the calls of one agent, each of which becomes a node of its episode.

The service knows a session by its key, which the agent's client sends as API key. Tokens are noted as they
were given and drawn. If the next messages go on from a noted call, `Renderer.bridge` gives their tokens. If
the agent has rewritten its history, the conversation is rendered anew and the episode forks.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from colocate.engines.requests import turn_key
from colocate.episodes.episode import Episode
from colocate.episodes.renderer import Message
from colocate.serving.calls import Call, ChatCall, prompt_field
from colocate.serving.handlers import DrawnTurn, DrawRequest, check_context
from colocate.serving.refusal import Refusal, too_long
from colocate.serving.texts import Texts, refusing_length
from colocate.types import Completion, Prompt, SamplingParams

_CHOICES_BITS = 16
"""Choices of one call have numbers of their own, far from those of the group's members."""


@dataclass(frozen=True)
class DrawOptions:
    """The options by which the calls of a run's sessions are drawn.

    Args:
        sampling: the run's. Its `max_tokens` bound all tokens of a history after the episode's prompt.
        context_length: tokens that a prompt and what follows may have together.
        vocab_size: number of token ids of the model.
        version: the version of the weights now.
    """

    sampling: SamplingParams
    context_length: int
    vocab_size: int
    version: Callable[[], int]


class _Continuation(NamedTuple):
    """The node and the tokens with which a call goes on."""

    parent: int | None
    """The node that it goes on from; None: it begins a history."""
    given_ids: tuple[int, ...]
    context: tuple[int, ...]


class _KnownConversation(NamedTuple):
    """A conversation up to a node's message."""

    messages: tuple[str, ...]
    """The comparison key of each message, the node's included."""
    tools: str
    parsed: Message
    """The node's message as `Renderer.parse` has read it."""
    shown: list[Message]
    """The whole conversation as reward functions see it."""


class Session:
    """The handler of one agent's calls: each of them lets its episode grow.

    Args:
        prompt: the request for this member alone.
    """

    def __init__(self, prompt: Prompt, texts: Texts, options: DrawOptions) -> None:
        self.key = secrets.token_urlsafe(32)
        self.episode = Episode()
        self._prompt, self._texts, self._options = prompt, texts, options
        self._num_calls = 0
        self._conversations: dict[int, _KnownConversation] = {}
        """Conversations by their last nodes."""
        self._resting: dict[int, int] = {}
        """Sequences that rest, by the nodes that they ended with."""
        self.max_len = options.context_length
        self.reading: AbstractAsyncContextManager[Any] = asyncio.Lock()  # draws depend on the calls' order
        # Requests are read by one thread and answered by another, which must not wait while long prompts are
        # encoded: no such work is done under this lock.
        self._lock = threading.Lock()
        self._is_over = False

    def close(self) -> None:
        """Take no more calls, and note no more turns."""
        with self._lock:
            self._is_over = True

    # ── Calls ────────────────────────────────────────────────────────────────────────────────────────────

    def draw_request(self, call: Call, number: int) -> DrawRequest:
        """The request by which a call's turns are drawn.

        Raises:
            Refusal: the session is over, the call asks for other draws than the run's, or there is no room.
        """
        self._check_draws(call)
        with self._lock:
            self._check_open()
            said = dict(self._conversations)
        start = self._bridged(call, said) if isinstance(call, ChatCall) else None
        context = self._texts.context(call, number, self.max_len) if start is None else start.context
        check_context(context, self._options.vocab_size)
        with self._lock:
            self._check_open()
            if start is None:
                start = _Continuation(*self.episode.find_parent(context), context)
            limit = self._room(call, start)
            limit = limit if call.max_tokens is None else min(limit, call.max_tokens)
            return self._request_for(call, start, limit)

    def _check_open(self) -> None:
        if self._is_over:
            raise Refusal(403, "This session is over: its episode has ended.", code="session_over")

    def _request_for(self, call: Call, start: _Continuation, limit: int) -> DrawRequest:
        sampling, is_single = self._options.sampling, call.n == 1
        resting = self._resting.pop(start.parent, None) if is_single and start.parent is not None else None
        key, self._num_calls = turn_key(self._prompt.key, self._num_calls), self._num_calls + 1
        samples = self._prompt.samples
        if not is_single:
            first = (samples.start + 1) << _CHOICES_BITS
            samples = range(first, first + call.n)
        prompt = Prompt(start.context, key, samples, (limit,) * call.n)
        return DrawRequest(prompt, sampling, is_single, resting, start.given_ids, note=start)

    def note(self, call: Call, request: DrawRequest, turn: DrawnTurn) -> None:
        """Add a turn to the episode."""
        assert turn.finish_reason is not None, "it has ended"
        start: _Continuation = request.note
        logprobs = None if turn.logprobs is None else tuple(turn.logprobs)
        version = self._options.version()
        completion = Completion(
            tuple(turn.token_ids), logprobs, turn.finish_reason, version,
            num_cached_tokens=turn.num_cached_tokens,
        )  # fmt: skip
        with self._lock:
            if self._is_over:
                return
            node = self.episode.add(start.parent, start.given_ids, completion)
            if turn.sequence is not None:
                self._resting[node] = turn.sequence
            if isinstance(call, ChatCall):
                assert turn.parsed is not None and turn.shown is not None, "it is a message"
                self._note_messages(node, call, turn.parsed, turn.shown)

    def _note_messages(self, node: int, call: ChatCall, parsed: Message, shown: Message) -> None:
        conversation = [*call.messages, parsed]
        self._conversations[node] = _KnownConversation(
            tuple(_comparison_key(message) for message in [*call.messages, shown]),
            _tools_of(call),
            parsed,
            conversation,
        )
        episode = self.episode
        if episode.prompt is None:
            episode.prompt = list(call.messages)
        num_prompt = len(episode.prompt)
        if conversation[:num_prompt] != episode.prompt:
            roles = [message["role"] for message in conversation]
            num_prompt = roles.index("assistant")
        episode.messages = conversation[num_prompt:]

    # ── Where a call goes on ─────────────────────────────────────────────────────────────────────────────

    def _bridged(self, call: ChatCall, known: Mapping[int, _KnownConversation]) -> _Continuation | None:
        """A continuation of the longest known conversation that the call's begins with; None: there is none,
        or the chat template rewrites it.

        Args:
            known: the conversations that may go on, by their last nodes.
        """
        self._texts.check_tools(call)
        keys, tools = tuple(_comparison_key(message) for message in call.messages), _tools_of(call)
        best: tuple[int, int] | None = None
        for node, said in known.items():
            length = len(said.messages)
            is_known = length < len(keys) and keys[:length] == said.messages and said.tools == tools
            if is_known and (best is None or length >= best[0]):
                best = length, node
        if best is None:
            return None
        length, node = best
        messages = [*call.messages[: length - 1], known[node].parsed]
        last_id = self.episode.nodes[node].sampled_ids[-1]
        try:
            with refusing_length(call, self.max_len):
                given = self._texts.renderer.bridge(
                    messages, call.messages[length:], call.tools, last_id=last_id, most=self.max_len
                )
        except ValueError as error:  # the template refuses the conversation
            raise Refusal(400, str(error), param="messages") from error
        if given is None:
            return None
        return _Continuation(node, tuple(given), (*self._tokens_to(node), *given))

    def _tokens_to(self, node: int | None) -> tuple[int, ...]:
        """All tokens from a history's beginning to the end of a node."""
        tokens: tuple[int, ...] = ()
        while node is not None:
            call = self.episode.nodes[node]
            tokens, node = call.given_ids + call.sampled_ids + tokens, call.parent
        return tokens

    def _room(self, call: Call, start: _Continuation) -> int:
        """How many tokens may be drawn within the limits of a training row.

        Raises:
            Refusal: there is no room.
        """
        options, nodes = self._options, self.episode.nodes
        own = nodes[0].given_ids if nodes else start.context
        if start.context[: len(own)] != own:  # a row of its own, with the whole context of its root as prompt
            root = start.parent
            while root is not None and (parent := nodes[root].parent) is not None:
                root = parent
            own = start.context if root is None else nodes[root].given_ids
        most = min(options.sampling.max_tokens, options.context_length - len(own))
        num_after = len(start.context) - len(own)
        if num_after >= most:
            raise too_long(
                prompt_field(call),
                f"The conversation has {num_after} tokens after a prompt of {len(own)}, and {max(0, most)} "
                f"may follow it (max_completion_length={options.sampling.max_tokens}, context of "
                f"{options.context_length}).",
            )
        return most - num_after

    def _check_draws(self, call: Call) -> None:
        """Refuse a call whose tokens would be drawn in another way than the run trains on."""
        own = self._options.sampling
        for name, value in call.sampling.items():
            if value != getattr(own, name):
                raise Refusal(
                    400,
                    f"{name}={value:g} is not how this run draws its completions, {name}="
                    f"{getattr(own, name):g} is. Leave it out, or set it in the run's options.",
                    param=name,
                    code="unsupported_parameter",
                )
        if call.seed is not None:
            raise Refusal(
                400,
                "seed is not supported here: the run's seed, the prompt and the member of its group "
                "determine the draws, or all members with one seed would be alike. Leave it out.",
                param="seed",
                code="unsupported_parameter",
            )


def _comparison_key(message: Message) -> str:
    """The parts of a message that count when conversations are compared. Clients write empty content in
    several ways, calls of tools as text or as mappings, and leave the reasoning out."""
    calls = [
        (call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    name = message.get("name") if message["role"] != "tool" else None
    return json.dumps([message["role"], message.get("content") or "", name, calls], sort_keys=True)


def _arguments(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _tools_of(call: ChatCall) -> str:
    return json.dumps(call.tools, sort_keys=True)
