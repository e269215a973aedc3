"""Requests that no well-meaning client sends, to the service of a model and to a native rollout server.

The tables here are OpenAI's and vLLM's documentation in numbers. A request that means something is answered;
any other is refused with a 4xx status and the field's name; and afterwards requests are answered as before.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_cases import Case, judge

from colocate.engines.native.engine import NativeEngine
from colocate.http.lease import LeaseHolder
from colocate.rollout_server.trainer.client import HttpClient, RequestRefused
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from serving_case import MODEL, QUESTION, Served, random_model, serving

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from engine_models import make_model
from native_server_case import NativeServer

SEED = 20_263

VALUES = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, 1.5, -0.5, 1e-3, 1e-40, 5e-324, 1e30, -1e30, 1e308),
    *(2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70, 10**400, math.nan, math.inf),
    *("", "a", "1", "\0", "\ud800", "x" * 5000, [], [1], [-1], [2**70], ["a"], ["a", 1], [[1]], [None]),
    *({}, {"a": 1}, {"type": "text"}, {"include_usage": True}, {"include_usage": 1}, [[[[]]]], [{}]),
)

Means = Callable[[Any], bool]


def whole(low: int, high: int) -> Means:
    return lambda v: type(v) is int and low <= v <= high


def real(low: float, high: float, *, above: bool = False) -> Means:
    def means(v: Any) -> bool:
        is_number = isinstance(v, int | float) and not isinstance(v, bool) and v == v
        return is_number and (low < v if above else low <= v) and v <= high

    return means


def one_of(*values: Any) -> Means:
    return lambda v: any(type(v) is type(x) and v == x for x in values)


def text(v: Any) -> bool:
    return isinstance(v, str) and "\ud800" not in v


def stops(v: Any) -> bool:
    listed = v if isinstance(v, list) else [v]
    return len(listed) <= 16 and all(text(s) and 0 < len(s) <= 256 for s in listed)


def anything(v: Any) -> bool:
    return not (isinstance(v, str) and "\ud800" in v) and v == v and v != math.inf


COMMON: dict[str, Means] = {
    "temperature": lambda v: real(0, 2)(v) and (v == 0 or v >= 1e-3),
    "top_p": real(0, 1, above=True),
    "top_k": whole(-1, 2**31 - 1),
    "min_p": real(0, 1),
    "repetition_penalty": real(0.01, 100),
    "max_tokens": whole(1, 2**31 - 1),
    "n": whole(1, 128),
    "seed": whole(-(2**63), 2**63 - 1),
    "stop": stops,
    "stream": one_of(False),  # streams are asked for elsewhere
    "return_token_ids": one_of(True, False),
    "frequency_penalty": one_of(0),
    "presence_penalty": one_of(0),
    "logit_bias": one_of({}),
    "best_of": one_of(1),
    "echo": one_of(False),
    "suffix": one_of(""),
    "store": one_of(False),
    "response_format": one_of({"type": "text"}),
    "parallel_tool_calls": one_of(True),
    "top_logprobs": one_of(0),
    "user": anything,
    "metadata": anything,
    "model": lambda v: False,
    "unheard_of": lambda v: False,
}
COMPLETIONS: dict[str, Means] = {
    **COMMON,
    "logprobs": one_of(0),
    "prompt": lambda v: (text(v) and 0 < len(v) < 1000) or v in ([1], ["a"], [[1]]),
}
CHAT: dict[str, Means] = {
    **COMMON,
    "logprobs": one_of(True, False),
    "max_completion_tokens": whole(1, 2**31 - 1),
    "messages": lambda v: False,
    "tools": one_of([]),
    "tool_choice": lambda v: False,
}
NOT_MISSED = ("model", "messages", "prompt")
"""What must be there; any other field may be null."""


def asked(served: Served, path: str, body: Any) -> Any:
    """The answer.

    Raises:
        ValueError: it was refused as the client's fault.
        RuntimeError: it was not answered for any other reason.
    """
    status, answer = served.ask(json.dumps(body).encode(), path)
    if status == 200:
        return answer
    message = json.dumps(answer)
    raise (ValueError if status in (400, 404, 413, 422) else RuntimeError)(f"{status}: {message}")


def is_answer(answer: Any) -> bool:
    """Whether an answer is whole: of numbers that JSON has, with a reason for each end."""
    json.dumps(answer, allow_nan=False)
    return all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])


def service_cases(served: Served) -> Iterator[Case]:
    chat = {"model": MODEL, "messages": QUESTION, "max_tokens": 2}
    completion = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
    for path, fields, body in (
        ("/v1/completions", COMPLETIONS, completion),
        ("/v1/chat/completions", CHAT, chat),
    ):
        for (name, means), value in itertools.product(fields.items(), VALUES):
            is_right = (name not in NOT_MISSED) if value is None else means(value)
            if name == "max_completion_tokens" and is_right and value is not None:
                body = {name: content for name, content in chat.items() if name != "max_tokens"}
            if name == "tool_choice":
                is_right = value is None
            if name == "stream" and value is True:
                continue
            is_json = not (isinstance(value, float) and not math.isfinite(value)) and value != "\ud800"
            yield Case(
                f"field of {path.removeprefix('/v1/')}",
                f"{name}={value!r:.40}",
                lambda path=path, body=body, name=name, value=value: asked(
                    served, path, {**body, name: value}
                ),
                ("max_tokens|max_completion_tokens" if "max_" in name else name,) if is_json else ("",),
                lambda answer: is_answer(answer),
                must_fail=not is_right,
                errors=(ValueError,) if not is_right or _is_too_long(name, value) else (ZeroDivisionError,),
            )


def _is_too_long(name: str, value: Any) -> bool:
    """Whether a value that means something asks for more than the context holds."""
    return name in ("max_tokens", "max_completion_tokens") and value is not None and value > 900


MESSAGES: dict[str, Any] = {
    "no role": {"content": "a"},
    "odd role": {"role": "robot", "content": "a"},
    "number": {"role": "user", "content": 3},
    "image": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
    "audio": {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]},
    "part without text": {"role": "user", "content": [{"type": "text"}]},
    "part of number": {"role": "user", "content": [{"type": "text", "text": 3}]},
    "surrogate": {"role": "user", "content": "\ud800"},
    "extra field": {"role": "user", "content": "a", "colour": "red"},
    "null": None,
    "text": "hello",
    "list": [1],
    "call without name": {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
    "call of bad JSON": {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
    "call of NaN": {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "a", "arguments": '{"x": NaN}'}}],
    },
    "call of infinity": {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "a", "arguments": '{"x": 1e999}'}}],
    },
    "call of a key twice": {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "a", "arguments": '{"x": 1, "x": 2}'}}],
    },
    "call of a list": {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]},
    "calls of text": {"role": "assistant", "tool_calls": "a"},
    "name of number": {"role": "user", "content": "a", "name": 3},
}
TOOLS: dict[str, Any] = {
    "text": "add",
    "object": {},
    "list of text": ["add"],
    "no function": [{"type": "function"}],
    "no name": [{"type": "function", "function": {}}],
    "name of number": [{"type": "function", "function": {"name": 3}}],
    "odd type": [{"type": "retrieval"}],
    "parameters of text": [{"type": "function", "function": {"name": "a", "parameters": "x"}}],
    "null": [None],
}


def chat_cases(served: Served) -> Iterator[Case]:
    for (what, message), before in itertools.product(MESSAGES.items(), (0, 1, 3)):
        messages = [*QUESTION * before, message]
        yield Case(
            "message",
            f"{what} after {before}",
            lambda messages=messages: asked(
                served, "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 2}
            ),
            (f"messages[{before}]|messages.|x twice",),
            must_fail=True,
            errors=(ValueError,),
        )
    for what, tools in TOOLS.items():
        yield Case(
            "tool's schema",
            what,
            lambda tools=tools: asked(
                served,
                "/v1/chat/completions",
                {"model": MODEL, "messages": QUESTION, "tools": tools, "max_tokens": 2},
            ),
            ("tools",),
            must_fail=True,
            errors=(ValueError,),
        )


def bodies(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    good = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 2})
    yield "empty", b""
    yield "no JSON", b"\x00\xff"
    yield "list", b"[]"
    yield "text", b'"a"'
    yield "deep list", b"[" * 100_000
    yield "deep object", b'{"a":' * 50_000
    yield "key twice", good[:-1].encode() + b', "model": "x"}'
    yield "NaN", good[:-1].encode() + b', "temperature": NaN}'
    yield "latin", good.replace("abc", "é").encode("latin-1")
    yield "long number", good[:-1].encode() + b', "seed": ' + b"9" * 10_000 + b"}"
    yield "many keys", json.dumps({f"k{n}": n for n in range(5000)}).encode()
    for number in range(30):
        cut = rng.randrange(1, len(good))
        yield f"cut {number}", good[:cut].encode()
    for number in range(30):
        flipped = bytearray(good.encode())
        flipped[rng.randrange(len(flipped))] ^= 0x80
        yield f"flipped {number}", bytes(flipped)


def body_cases(served: Served, rng: random.Random) -> Iterator[Case]:
    def send(path: str, body: bytes) -> Any:
        status, answer = served.ask(body, path)
        raise (ValueError if 400 <= status < 500 else RuntimeError)(f"{status}: {answer}")

    for path in ("/v1/completions", "/v1/chat/completions"):
        for what, body in bodies(rng):
            yield Case(
                "body",
                f"{path}: {what}",
                lambda path=path, body=body: send(path, body),
                (),
                must_fail=True,
                errors=(ValueError,),
            )


def signed_cases(client: HttpClient, name: str, vocab_size: int, max_len: int) -> Iterator[Case]:
    """Requests that have the server's key, as another version of the trainer might send them."""
    fields: dict[str, Means] = {
        "prompt": lambda v: isinstance(v, list) and v == [1],
        "n": whole(1, 128),
        "max_tokens": whole(1, max_len - 1),
        "seed": whole(0, 2**63 - 1),
        "draws": lambda v: v == [],
        "stop_token_ids": lambda v: v in ([], [1]),
        "temperature": lambda v: real(0, math.inf)(v) and (v == 0 or v >= 1e-3) and v < 1e309,
        "top_p": real(0, 1, above=True),
        "top_k": whole(-1, 2**31 - 1),
        "min_p": real(0, 1),
        "repetition_penalty": lambda v: real(0, math.inf, above=True)(v) and v < 1e309,
        "model": lambda v: False,
        "cache_salt": lambda v: False,
    }
    body = {"model": name, "prompt": [1, 2], "max_tokens": 2}
    triples = ([0, 0], [0, 0, -1], [2**70, 0, 0], [0, 2**70, 0], [0, 0, 2**70], [0, 0, 0, 0], [-1, 0, 0])
    drawn: list[tuple[str, Any, bool | None]] = [
        (field, value, None if value is None else means(value))
        for (field, means), value in itertools.product(fields.items(), VALUES)
        if not (isinstance(value, float) and not math.isfinite(value))
    ]
    drawn += [("draws", value, value == [-1, 0, 0]) for value in triples]  # seeds have 64 bits and a sign
    drawn += [("prompt", value, False) for value in ([vocab_size], [2**31], [1] * max_len, [1, -5])]
    drawn += [("stop_token_ids", value, False) for value in ([-1], [2**31], [2**63], ["a"])]
    for field, value, is_right in drawn:

        def send(field: str = field, value: Any = value) -> Any:
            try:
                return client.call(
                    "POST", "/v1/completions", {**body, field: value}, deadline_s=60, parse=lambda x: x,
                    max_attempts=2,  # a connection may have been closed since
                )  # fmt: skip
            except RequestRefused as error:
                raise ValueError(str(error)) from None

        yield Case(
            "signed field",
            f"{field}={value!r:.40}",
            send,
            ("cache_salt|weights" if field == "cache_salt" else field,),
            lambda answer, is_right=is_right: is_right is not False and is_answer(answer),
            errors=(ValueError,),
        )


@pytest.fixture(name="served", scope="module")
def served_model() -> Iterator[Served]:
    with serving(NativeEngine(random_model(), max_num_seqs=128)) as served:
        yield served


@pytest.fixture(name="native", scope="module")
def native_server() -> Iterator[NativeServer]:
    """A server with a trainer's weights, which goes on holding it."""
    model = make_model("qwen3")
    server = NativeServer(model)
    engine = RolloutServerEngine(model, base_url=server.base_url, run_id="run", bucket_bytes=2**15)
    engine.wake_up()
    engine.update_weights(1)
    yield server
    engine.close()
    server.close()


def run_cases(seed: int, share: float, served: Served, native: NativeServer, capsys: Any) -> None:
    rng = random.Random(seed)
    client = HttpClient(native.base_url, run=LeaseHolder("run"))
    client.read_key()
    (offered,) = client.call("GET", "/v1/models", deadline_s=60, parse=lambda x: x)["data"]
    name, max_len = offered["id"], offered["max_model_len"]
    vocab_size = make_model("qwen3").config.vocab_size
    drawn = [*service_cases(served), *chat_cases(served), *body_cases(served, rng)]
    drawn += signed_cases(client, name, vocab_size, max_len)
    drawn = rng.sample(drawn, int(share * len(drawn)))
    good = {"model": MODEL, "prompt": "abc", "max_tokens": 5, "seed": 1, "temperature": 1}
    signed = {"model": name, "prompt": [1, 2], "max_tokens": 5, "seed": 1}

    def answers() -> list[Any]:
        """What both say to requests that mean well."""
        ours = client.call("POST", "/v1/completions", signed, deadline_s=60, parse=lambda x: x)
        return [c["choices"] for c in (asked(served, "/v1/completions", good), ours)]

    before = answers()
    total, report = judge(drawn, f"Requests, seed {seed}", capsys)
    assert answers() == before, report
    assert total["wrong"] == total["hang"] == total["raw"] == 0, report


def test_requests_drawn(served, native, capsys):
    run_cases(SEED, 0.1, served, native, capsys)


@pytest.mark.slow
def test_all_requests(served, native, capsys):
    run_cases(random.randrange(10**6), 1.0, served, native, capsys)
