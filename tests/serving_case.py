"""A service with a tiny model behind a real port, for tests that speak HTTP to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from openai import OpenAI
from transformers import PreTrainedTokenizerBase

from colocate.engines.base import RolloutEngine
from colocate.http.key import ServerKey
from colocate.serving.app import Service
from colocate.serving.driver import Driver
from colocate.serving.engine_thread import EngineThread
from colocate.serving.gate import with_key
from colocate.serving.handlers import StatelessHandler
from colocate.serving.server import HttpServer, Limits, bound_socket
from colocate.serving.texts import Texts
from colocate.types import SamplingParams
from tiny import make_model
from tool_chat import add, call, make_chat_tokenizer, user

MODEL = "tiny/chat"
KEY = "0123456789abcdef-the-key"
TOKENIZER = make_chat_tokenizer()
STOP = TOKENIZER.eos_token_id
QUESTION = user("17+25?")
ANSWER = "It is 42."
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@cache
def random_model() -> Any:
    return make_model(vocab_size=len(TOKENIZER), eos_token_id=STOP)


@cache
def calling_model() -> Any:
    """A model that has learnt one conversation by heart: it calls `add`, and then says the sum."""
    assert add(17, 25) == 42
    model = make_model(vocab_size=len(TOKENIZER), eos_token_id=STOP, initializer_range=0.1)
    said = {"role": "assistant", "content": "Let me see."}
    said["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}]  # type: ignore[assignment]
    whole = [*QUESTION, said, {"role": "tool", "content": "42"}, {"role": "assistant", "content": ANSWER}]
    ids = torch.tensor([TOKENIZER.apply_chat_template(whole, tools=[TOOL], return_dict=False)])
    assert call("add", a=17, b=25) in TOKENIZER.decode(ids[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    assert loss < 0.05, "the model has not learnt its one conversation"
    return model


class Served:
    """A service and its clients."""

    def __init__(
        self, engine: RolloutEngine, limits: Limits, key: str | None, slice_s: float, stops: Sequence[int]
    ) -> None:
        self.engine, self.limits = engine, limits
        engine.wake_up()
        self.driver = Driver(engine, slice_s=slice_s)
        self.texts = Texts(TOKENIZER, stops)
        handler = StatelessHandler(self.texts, max_len=engine.max_len, vocab_size=engine.vocab_size)
        check = with_key(None if key is None else ServerKey(key, "the test"), handler)
        self.thread = EngineThread(self.driver, math.inf)
        self.service = Service(
            self.driver, self.texts, model=MODEL, check_key=check, limits=limits,
            check_engine=self.thread.check,
        )  # fmt: skip
        self.server = HttpServer(self.service.app, bound_socket("127.0.0.1", 0), limits)
        self.thread.start()
        self.server.start()
        self.port = self.server.port

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str = KEY, **options: Any) -> OpenAI:
        return OpenAI(base_url=self.base_url, api_key=key, max_retries=0, **options)

    def ask(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of the answer to a POST of `body`, bytes or what is made into JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("POST", path, content, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def close(self) -> None:
        self.server.close()
        self.thread.close()
        self.service.close()
        self.engine.close()


@contextlib.contextmanager
def serving(
    engine: RolloutEngine,
    *,
    limits: Limits | None = None,
    key: str | None = None,
    slice_s: float = 0.05,
    stops: Sequence[int] = (STOP,),
) -> Iterator[Served]:
    """A service over an engine, with short turns for requests whose sampling parameters differ.

    Args:
        stops: what ends a completion; without any, each has as many tokens as were asked for.
    """
    served = Served(engine, limits or Limits(), key, slice_s, stops)
    try:
        yield served
    finally:
        served.close()


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> tuple[int, ...]:
    return tuple(tokenizer(text)["input_ids"])


def sampling_of(max_len: int, **fields: Any) -> SamplingParams:
    """The parameters by which the service draws a request with these fields."""
    return SamplingParams(max_tokens=max_len, stop_token_ids=(STOP,), seed=0, **fields)
