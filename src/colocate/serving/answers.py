"""`Answer`: the JSON of OpenAI's answers, whole or in chunks. Further fields have vLLM's names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from colocate.serving.calls import Call, ChatCall
from colocate.serving.choice import Choice, TextPiece
from colocate.serving.texts import Texts

Json = dict[str, Any]


class Answer:
    """The answer to one request.

    Args:
        model: the name by which the service was asked.
    """

    def __init__(self, call: Call, model: str, texts: Texts) -> None:
        self._call = call
        self._is_chat = isinstance(call, ChatCall)
        self._texts = texts
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        self._kind = kind
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer to a request that does not stream."""
        prompt = self._prompt_ids(choices[0]) if self._is_chat else {}
        answers = [self._choice(choice) for choice in choices]
        head = {**self._head, "object": self._kind}
        return {**head, **prompt, "choices": answers, "usage": self._usage(choices)}

    def told(self, choice: Choice, piece: TextPiece | None) -> list[Json]:
        """The chunks for the new piece of a choice; None: for its beginning."""
        if piece is not None:
            return self._chunks(choice, piece)
        opening = self._opening(choice)
        return [] if opening is None else [opening]

    def _chunks(self, choice: Choice, piece: TextPiece) -> list[Json]:
        """The chunks for tokens that were drawn; the last one tells why the choice has ended."""
        extra: Json = {}
        if self._call.logprobs:
            extra["logprobs"] = self._logprobs(piece.token_ids, piece.logprobs, piece.offsets)
        if self._call.return_token_ids:
            extra["token_ids"] = list(piece.token_ids)
        if self._is_chat:
            told: list[Json] = [{"delta": delta} for delta in piece.deltas]
            told = told or ([{"delta": {}}] if piece.token_ids and extra else [])
        else:
            told = [{"text": piece.text}] if piece.text or (piece.token_ids and extra) else []
        chunks = [self._chunk(choice, part) for part in told]
        if chunks:
            chunks[0]["choices"][0].update(extra)
        if choice.is_over:
            last: Json = {"delta": {}} if self._is_chat else {"text": ""}
            chunks.append(self._chunk(choice, {**last, "finish_reason": choice.finish_reason}))
        return chunks

    def _opening(self, choice: Choice) -> Json | None:
        """The chunk before a choice's first token; None: there is nothing to tell."""
        prompt = self._prompt_ids(choice)
        if self._is_chat:
            delta = {"role": "assistant", "content": ""}
            return {**self._chunk(choice, {"delta": delta}), **prompt}
        return self._chunk(choice, {"text": "", **prompt}) if prompt else None

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """The chunk that counts the tokens, behind all others."""
        return {**self._chunk_head, "choices": [], "usage": self._usage(choices)}

    @property
    def _chunk_head(self) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else self._kind
        head = {**self._head, "object": kind}
        return {**head, "usage": None} if self._call.include_usage else head

    def _chunk(self, choice: Choice, part: Json) -> Json:
        told = {"index": choice.index, "logprobs": None, "finish_reason": None, **part}
        return {**self._chunk_head, "choices": [told]}

    def _choice(self, choice: Choice) -> Json:
        turn, told = choice.turn, {"index": choice.index, "finish_reason": choice.finish_reason}
        wanted = self._call.logprobs
        logprobs = self._logprobs(turn.token_ids, turn.logprobs, choice.offsets) if wanted else None
        told["logprobs"] = logprobs  # type: ignore[assignment]
        ids = {"token_ids": turn.token_ids} if self._call.return_token_ids else {}
        if self._is_chat:
            return {**told, "message": turn.shown, **ids}
        return {**told, "text": choice.text, **ids, **self._prompt_ids(choice)}

    def _prompt_ids(self, choice: Choice) -> Json:
        wanted = self._call.return_token_ids
        return {"prompt_token_ids": list(choice.request.prompt.token_ids)} if wanted else {}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None, offsets: Sequence[int]
    ) -> Json:
        if logprobs is None:
            raise RuntimeError("The engine tells no log-probs of what it has drawn. Ask without logprobs.")
        tokens = [self._texts.token(token_id) for token_id in token_ids]
        if self._is_chat:
            content = [
                {"token": text, "logprob": logprob, "bytes": written, "top_logprobs": []}
                for (text, written), logprob in zip(tokens, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": list(offsets),
        }

    def _usage(self, choices: Sequence[Choice]) -> Json:
        # A prompt is read once for all its choices.
        prompts = {id(choice.request): len(choice.request.prompt.token_ids) for choice in choices}
        num_prompt, num_drawn = sum(prompts.values()), sum(len(choice.turn.token_ids) for choice in choices)
        usage: Json = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
        }
        told = [(id(choice.request), choice.turn.num_cached_tokens) for choice in choices]
        if cached := {request: number for request, number in told if number is not None}:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached.values())}
        return usage
