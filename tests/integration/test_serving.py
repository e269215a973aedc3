"""The service over HTTP, asked by OpenAI's own client and by clients that mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from colocate.engines.native.engine import NativeEngine
from colocate.engines.requests import derived_seed
from colocate.rollout_server.trainer.client import RequestRefused
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.serving import engine_thread
from colocate.serving.server import Limits, bound_socket
from colocate.types import Prompt
from native_replica import NativeReplica
from serving_case import (
    ANSWER,
    KEY,
    MODEL,
    QUESTION,
    TOKENIZER,
    TOOL,
    Served,
    calling_model,
    random_model,
    sampling_of,
    serving,
    tokens_of,
)
from tiny import StubEngine

SMALL = Limits(max_requests=12, max_connections=24, max_header_bytes=4096, max_body_bytes=20_000)
SHORT = replace(SMALL, header_s=0.4, body_s=0.4, reader_s=0.4, max_wait_s=0.5)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def pool_of(model: Any) -> EnginePool:
    return EnginePool([NativeReplica(model, max_num_seqs=4) for _ in range(2)])


ENGINES = {"native": lambda model: NativeEngine(model, max_num_seqs=8), "pool": pool_of}


@pytest.fixture(scope="module", params=sorted(ENGINES))
def calling(request) -> Iterator[Served]:
    """A model that calls a tool, served by each engine."""
    with serving(ENGINES[request.param](calling_model()), key=KEY) as served:
        yield served


@pytest.fixture(scope="module", params=sorted(ENGINES))
def plain(request) -> Iterator[Served]:
    """A model that writes at random, served by each engine to whoever asks."""
    with serving(ENGINES[request.param](random_model())) as served:
        yield served


@pytest.fixture(scope="module")
def bounded() -> Iterator[Served]:
    """A service that takes little."""
    with serving(NativeEngine(random_model(), max_num_seqs=40), limits=SMALL, stops=()) as served:
        yield served


@pytest.fixture(scope="module")
def hurried() -> Iterator[Served]:
    """A service that waits so shortly that a busy machine may be too slow for it."""
    with serving(NativeEngine(random_model(), max_num_seqs=40), limits=SHORT, stops=()) as served:
        yield served


# ── OpenAI's client ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_tool(calling, stream):
    client = calling.client()

    def reply(messages: list[Any]) -> Any:
        options = dict(model=MODEL, messages=messages, tools=[TOOL], temperature=0, max_completion_tokens=200)
        if not stream:
            return client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0]

    first = reply(QUESTION)
    assert first.finish_reason == "tool_calls" and first.message.content == "Let me see."
    (call,) = first.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 17, "b": 25}
    result = {"role": "tool", "tool_call_id": call.id, "content": str(17 + 25)}
    second = reply([*QUESTION, first.message.model_dump(exclude={"parsed"}), result])
    assert (second.message.content, second.finish_reason) == (ANSWER, "stop")


def test_without_tools_a_call_is_text(calling):
    prompt = TOKENIZER.apply_chat_template(QUESTION, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    answer = calling.client().completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=200)
    assert "Let me see." in answer.choices[0].text
    chat = calling.client().chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="none", max_tokens=5
    )
    assert chat.choices[0].message.tool_calls is None


def test_a_stream_tells_the_answer_while_it_grows(plain):
    client = plain.client()
    options: dict[str, Any] = dict(model=MODEL, prompt="abc", max_tokens=60, seed=5, logprobs=0)
    whole = client.completions.create(**options, extra_body={"return_token_ids": True})
    chunks = list(
        client.completions.create(
            **options, stream=True, stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )  # fmt: skip
    *parts, usage = chunks
    assert usage.usage == whole.usage and whole.usage.completion_tokens > 20
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    ids = [i for part in parts for i in getattr(part.choices[0], "token_ids", None) or []]
    assert ids == whole.choices[0].token_ids and whole.choices[0].prompt_token_ids == list(tokens_of("abc"))
    told = [x for part in parts if part.choices[0].logprobs for x in part.choices[0].logprobs.token_logprobs]
    assert told == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-5)
    assert len(parts) > 5, "it came in one piece"
    logprobs = whole.choices[0].logprobs
    for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert len(token) > 1 or whole.choices[0].text[at] == token  # special ones are not shown


def test_choices_and_prompts_are_those_of_the_engine(plain):
    """Several prompts with several choices each, against the engine asked directly."""
    prompts = ["abc", "xy"]
    answer = plain.client().completions.create(model=MODEL, prompt=prompts, n=3, seed=9, max_tokens=12)
    engine = NativeEngine(random_model())
    engine.wake_up()
    asked = [
        Prompt(tokens_of(text), derived_seed(9, number, num_bits=63), range(3), (12,) * 3)
        for number, text in enumerate(prompts)
    ]
    expected = engine.generate(asked, sampling_of(engine.max_len))
    texts = [TOKENIZER.decode(c.token_ids, skip_special_tokens=True) for c in expected]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_found_in_the_cache_is_told(stream):
    """OpenAI's client is told how much of each prompt of a conversation the engine had read before."""
    engine = NativeEngine(random_model(), max_num_seqs=8, page_size=4, kv_cache_tokens=2048)
    with serving(engine, stops=()) as served:
        client, prompt, told = served.client(), "a question of some length", []
        for _ in range(3):
            options: dict[str, Any] = dict(model=MODEL, prompt=prompt, max_tokens=9, temperature=0, n=2)
            answer = client.completions.create(**options)
            if stream:
                chunks = client.completions.create(
                    **options, stream=True, stream_options={"include_usage": True}
                )
                answer = [answer, *chunks][-1]
            usage = answer.usage
            told.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
            prompt += " and more"
    whole = [(length - 1) // 4 * 4 for length, _ in told]  # of the same prompt, asked a second time
    before = [0, *((length // 4 * 4) for length, _ in told[:-1])]
    assert [cached for _, cached in told] == (whole if stream else before)


def test_of_an_answer_that_a_stop_text_has_cut_it_is_told_too():
    engine = NativeEngine(random_model(), max_num_seqs=8, page_size=4, kv_cache_tokens=2048)
    with serving(engine, stops=()) as served:
        client, options = served.client(), dict(model=MODEL, prompt="a question", max_tokens=30, seed=5)
        text = client.completions.create(**options).choices[0].text
        usage = client.completions.create(**options, stop=text[9:12]).usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 4 * 4
    assert usage.completion_tokens < 30


def test_token_ids_in_and_out_of_a_chat(plain):
    client = plain.client()
    chat = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=9,
        seed=1,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    ids = TOKENIZER.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert chat.prompt_token_ids == ids
    text = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=9, seed=1, logprobs=0, extra_body={"return_token_ids": True}
    )
    assert text.choices[0].token_ids == chat.choices[0].token_ids
    told = [token.logprob for token in chat.choices[0].logprobs.content]
    assert told == pytest.approx(text.choices[0].logprobs.token_logprobs, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_before_it(plain, stream):
    client = plain.client()
    options: dict[str, Any] = dict(model=MODEL, prompt="abc", max_tokens=60, seed=5)
    text = client.completions.create(**options).choices[0].text
    stop = text[20:23]
    answer = client.completions.create(**options, stop=["never", stop], stream=stream)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_models_are_listed_and_others_are_not_there(plain):
    client = plain.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match=f"no model 'gpt-5' here. The service has '{MODEL}'"):
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty=1.0 is not supported"),
        ({"max_tokens": 5000}, "max_tokens=5000 make 5025, and the context has 1024"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is not supported by this service"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "the context has 1024"),
    ],
)
def test_what_cannot_be_had_is_told_to_the_client(plain, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        plain.client().chat.completions.create(**{"model": MODEL, "messages": QUESTION, **options})


def test_token_ids_outside_the_vocabulary_are_refused(plain):
    with pytest.raises(openai.BadRequestError, match="token ids from 5 to 100000"):
        plain.client().completions.create(model=MODEL, prompt=[5, 100_000])


# ── Many at once ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_answer_is_the_one_given_alone_whoever_else_asks_or_leaves(plain):
    """Requests of all kinds at random, of which some are given up in the middle."""
    draw = random.Random(11)
    asked = [
        {
            "model": MODEL, "prompt": "".join(draw.choices("abcdef", k=draw.randint(1, 20))),
            "seed": draw.randint(0, 99), "max_tokens": draw.randint(1, 60), "n": draw.randint(1, 2),
            "temperature": draw.choice([0, 0.7, 1]), "stream": draw.random() < 0.5,
        }
        for _ in range(24)
    ]  # fmt: skip
    leaving = set(draw.sample(range(24), 8))

    async def all_at_once() -> list[list[str] | None]:
        async with AsyncOpenAI(base_url=plain.base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    async def one(client: AsyncOpenAI, number: int) -> list[str] | None:
        await asyncio.sleep(draw.random() * 0.3)
        answer = client.completions.create(**asked[number])
        if number in leaving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answer, 0.05)
            return None
        return await texts_of(await answer, asked[number]["n"])

    async def texts_of(answer: Any, n: int) -> list[str]:
        if not hasattr(answer, "__aiter__"):
            return [choice.text for choice in answer.choices]
        texts = [""] * n
        async for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        return texts

    answers = asyncio.run(all_at_once())
    client = plain.client()
    for number, texts in enumerate(answers):
        if texts is not None:
            alone = client.completions.create(**{**asked[number], "stream": False})
            assert texts == [choice.text for choice in alone.choices]
    assert_is_idle(plain)


def assert_is_idle(served: Served, within_s: float = 60.0) -> None:
    """Nothing is left of any request, in the engine or in the service."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if not (served.engine.is_busy or served.driver._batches or served.service._num_requests):
            return
        time.sleep(0.02)
    raise AssertionError(f"{served.service._num_requests} requests and {served.driver._batches} are left")


def test_an_engine_of_a_pool_that_is_lost_costs_no_answer():
    options: dict[str, Any] = dict(model=MODEL, prompt="abc", max_tokens=200, temperature=0.9)
    with serving(pool_of(random_model())) as served:
        client = served.client()
        alone = [client.completions.create(**options, seed=seed).choices[0].text for seed in range(4)]
        streams = [client.completions.create(**options, seed=seed, stream=True) for seed in range(4)]
        texts = [next(iter(stream)).choices[0].text for stream in streams]
        served.engine._members[0].replica.is_lost = True  # type: ignore[attr-defined]
        for number, stream in enumerate(streams):
            texts[number] += "".join(chunk.choices[0].text for chunk in stream)
        assert texts == alone


def test_an_engine_that_fails_is_an_error_and_the_next_request_is_answered(monkeypatch):
    with serving(NativeEngine(random_model())) as served:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
        poll, errors = served.engine.poll, [1]

        def fail_once() -> Any:
            return 1 / 0 if errors and errors.pop() else poll()

        monkeypatch.setattr(served.engine, "poll", fail_once)
        status, answer = served.ask(body)
        assert status == 500 and "division by zero" in answer["error"]["message"]
        assert served.ask(body)[0] == 200 and health(served)[0] == 200


def test_an_engine_that_is_broken_is_no_healthy_one_until_it_draws_again(monkeypatch):
    monkeypatch.setattr(engine_thread, "_PROBE_S", 0.01)
    with serving(NativeEngine(random_model())) as served:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "poll", lambda: 1 / 0)
            assert served.ask(body)[0] == 500
            wait_until(lambda: health(served)[0] == 503)
            assert "cannot draw a single token (ZeroDivisionError)" in health(served)[1]["error"]["message"]
            assert served.ask(body) == health(served)
        wait_until(lambda: health(served)[0] == 200)
        assert served.ask(body)[0] == 200


def test_an_engine_whose_thread_has_ended_answers_nobody_any_more(monkeypatch):
    with serving(NativeEngine(random_model())) as served:
        monkeypatch.setattr(served.driver, "advance", lambda wait_s: sys.exit("the end"))
        served.driver.wake()
        wait_until(lambda: health(served)[0] == 503)
        message = health(served)[1]["error"]["message"]
        assert "has ended by an error (SystemExit)" in message
        assert served.ask({"model": MODEL, "prompt": "abc"})[1]["error"]["message"] == message


def health(served: Served) -> tuple[int, Any]:
    """Status and JSON of the answer to who asks without a key."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# ── Who may ask, and how much ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}]
)
def test_without_the_key_only_health_is_told(calling, headers):
    status, answer = calling.ask({"model": MODEL, "prompt": "a"}, headers=headers)
    assert status == 401 and answer["error"]["code"] == "invalid_api_key"
    assert raw(calling, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")
    with pytest.raises(openai.AuthenticationError):
        calling.client(key="wrong").models.list()


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"Origin": "http://evil.example"}, 403, "web pages"),
        ({"Host": "evil.example"}, 403, "Host"),
        ({"Content-Type": "text/plain"}, 415, "application/json"),
    ],
)
def test_web_pages_are_not_answered(plain, headers, status, words):
    found, answer = plain.ask({"model": MODEL, "prompt": "a"}, headers=headers)
    assert found == status and words in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions/", "/v1//completions"])
@pytest.mark.parametrize("host", ["localhost", "localhost:[", "[::1"])
def test_a_path_that_is_not_there_is_an_error_of_the_same_shape(plain, path, host):
    status, answer = plain.ask({}, path, {"Host": host})
    assert status == 404 and f"{path!r} is not served here" in answer["error"]["message"]


STRANGE = st.sampled_from(
    [0, -1, 1, 2, 3, 10**400, 2**63, 1e300, 0.5, True, False, "", "a", "\x00", "\ud800", "1", [], [[]], [0],
     ["a"], [None], {}, {"type": "text", "text": "a"}, [{"type": "text", "text": "b"}], [QUESTION[0]] * 2,
     QUESTION, [{"role": "assistant", "content": None}], [{"role": "tool", "content": "5"}], [TOOL], "auto",
     [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]}]]
)  # fmt: skip
FIELDS = st.sampled_from(
    ["messages", "prompt", "tools", "tool_choice", "stop", "n", "seed", "temperature", "top_p", "top_k",
     "min_p", "max_tokens", "max_completion_tokens", "repetition_penalty", "stream", "stream_options",
     "logprobs", "return_token_ids", "user", "metadata", "model", "echo", "\ud800"]
)  # fmt: skip


@settings(max_examples=120)
@given(st.dictionaries(FIELDS, STRANGE, max_size=3), st.booleans())
def test_whatever_is_asked_is_answered_or_refused_by_the_name_of_a_field(bounded, content, is_chat):
    """Whatever a body has: there is no error of the server's, and no answer that never ends."""
    usual = {"messages": QUESTION} if is_chat else {"prompt": "ab"}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = {"model": MODEL, "max_tokens": 2, **usual, **content}
    answer = raw(bounded, posted(json.dumps(body).encode(), path))
    head, _, told = answer.partition(b"\r\n\r\n")
    if b"text/event-stream" in head:
        assert told.rstrip(b"0\r\n").endswith(b"data: [DONE]") and b'"error"' not in told
    elif head.startswith(b"HTTP/1.1 200"):
        assert json.loads(told)["usage"]["completion_tokens"] >= 1
    else:
        error = json.loads(told)["error"]
        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404")) and error["param"], told
    assert_is_idle(bounded)  # the last byte comes a moment before the request is counted as over


def posted(body: bytes, path: str = "/v1/completions", *, closes: bool = True) -> bytes:
    closing = b"Connection: close\r\n" if closes else b""
    head = HEAD.replace(b"/v1/completions", path.encode())
    return head + closing + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_requests_that_are_sent_before_the_answers_are_answered_in_order(bounded):
    bodies = [{"model": MODEL, "prompt": "ab", "max_tokens": n, "seed": 1} for n in (3, 1, 0, 2)]
    asked = [posted(json.dumps(body).encode(), closes=n == 3) for n, body in enumerate(bodies)]
    answers = raw(bounded, b"".join(asked), is_kept=True).split(b"HTTP/1.1 ")[1:]
    told = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert [answer.get("usage", {}).get("completion_tokens") for answer in told] == [3, 1, None, 2]
    assert told[2]["error"]["param"] == "max_tokens"


def test_prompts_that_are_never_read_are_told_and_do_not_keep_others_from_being_read(monkeypatch):
    """A chat template may not come to an end: others are read, until all readers are at such a one."""
    limits = Limits(max_wait_s=60, num_readers=3, late_s=0.05)
    end, body = threading.Event(), {"model": MODEL, "prompt": "ab", "max_tokens": 1}
    with serving(NativeEngine(random_model()), limits=limits) as served:
        context = served.texts.context

        def stuck_at(call: Any, *arguments: Any) -> Any:
            assert call.prompts[0] == "ab" or end.wait(100)
            return context(call, *arguments)

        monkeypatch.setattr(served.texts, "context", stuck_at)
        asking = []
        for _ in range(2):
            asking.append(threading.Thread(target=served.ask, args=({**body, "prompt": "stuck"},)))
            asking[-1].start()
            assert [served.ask(body)[0] for _ in range(3)] == [200] * 3
        assert health(served)[0] == 200
        asking.append(threading.Thread(target=served.ask, args=({**body, "prompt": "stuck"},)))
        asking[-1].start()
        wait_until(lambda: health(served)[0] == 503)
        assert "have not been read" in health(served)[1]["error"]["message"]
        end.set()
        wait_until(lambda: health(served)[0] == 200)
        for thread in asking:
            thread.join(60)


def test_a_prompt_behind_one_that_takes_long_to_read_is_not_waited_for_for_ever(hurried, monkeypatch):
    is_read = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(hurried.texts, "context", lambda *_: is_read.wait(100) and tokens_of("ab"))
        body = {"model": MODEL, "prompt": "ab", "max_tokens": 1}
        assert [hurried.ask(body)[0] for _ in range(2)] == [503, 503]
        is_read.set()
    until_s = time.monotonic() + 60
    while hurried.ask(body)[0] != 200:
        assert time.monotonic() < until_s


def test_a_trainer_that_takes_it_for_its_server_is_told(plain, monkeypatch):
    monkeypatch.setenv("COLOCATE_SERVER_KEY", KEY)
    with pytest.raises(RequestRefused, match=r"/version was refused.*started by `colocate rollout-serve`"):
        RolloutServerEngine(random_model(), base_url=f"http://127.0.0.1:{plain.port}")


def raw(
    served: Served, request: bytes, *, wait_s: float = 60.0, goes_on: bytes = b"", is_kept: bool = False
) -> bytes:
    """What comes back for bytes on a connection until the server closes it or `wait_s` are over, or, unless
    it `is_kept`, until there is an answer's head that does not say that the connection is closed."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=wait_s) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
                if goes_on:
                    connection.sendall(goes_on)
                elif not is_kept and b"\r\n\r\n" in answer and b"connection: close" not in answer.lower():
                    break
        except TimeoutError:
            return answer + b"(still open)"
        return answer


def test_a_body_that_is_too_large_is_refused(bounded):
    status, answer = bounded.ask({"model": MODEL, "prompt": "a" * 30_000})
    assert status == 413 and "more than 20000 bytes" in answer["error"]["message"]


def test_half_a_body_is_waited_for_until_the_time_is_over(hurried):
    start_s = time.monotonic()
    answer = raw(hurried, HEAD + b"Content-Length: 1000\r\n\r\n" + b'{"model"')
    assert answer.startswith(b"HTTP/1.1 408") and b"within 0.4 s" in answer
    assert time.monotonic() - start_s < 30


def test_a_header_that_is_too_large_is_refused(bounded):
    answer = raw(bounded, HEAD + b"X-Filler: " + b"a" * 2 * SHORT.max_header_bytes + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


def test_headers_that_never_end_are_not_waited_for(hurried):
    start_s = time.monotonic()
    assert raw(hurried, HEAD) == b""  # closed without an answer
    assert raw(hurried, b"") == b""
    assert time.monotonic() - start_s < 30


def test_a_client_that_reads_nothing_is_let_go(hurried):
    """The answer is larger than what the system buffers, and nobody reads it."""
    body = json.dumps(
        {"model": MODEL, "prompt": "a", "max_tokens": 900, "n": 40, "stream": True, "logprobs": 0,
         "return_token_ids": True}
    ).encode()  # fmt: skip
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", hurried.port))
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until_s = time.monotonic() + 20
        while hurried.service._num_requests == 0 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert_is_idle(hurried)


def test_a_client_that_leaves_has_its_sequences_aborted(bounded):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1000, "n": 128, "stream": True}  # takes many seconds
    for stream in (True, False):
        content = json.dumps({**body, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", bounded.port)) as connection:
            connection.sendall(HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
            while not bounded.engine.is_busy:
                time.sleep(0.01)
        assert_is_idle(bounded, within_s=10)


class Gated(StubEngine):
    """An engine that draws nothing until it may."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, member: [20, 21])
        self.may_draw = threading.Event()

    def generate(self, prompts: Any, sampling: Any) -> Any:
        self.may_draw.wait(200)
        return super().generate(prompts, sampling)


def test_too_many_requests_get_429_and_those_that_wait_too_long_503():
    """The engine is busy with one request, as with a trainer's turn: others wait for it within a bound."""
    engine = Gated()
    with serving(engine, limits=replace(SMALL, max_requests=2, max_wait_s=2.0)) as served:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        answers: list[Any] = []
        asked = [threading.Thread(target=lambda: answers.append(served.ask(body))) for _ in range(2)]
        asked[0].start()
        while not engine.is_busy:
            time.sleep(0.01)
        asked[1].start()  # the engine's thread does not come to it
        while served.service._num_requests < 2:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as refused:
            served.client().completions.create(**body)
        assert refused.value.response.headers["retry-after"] == "1"
        asked[1].join(60)
        ((status, answer),) = answers
        assert status == 503 and "no time for this request within 2 s" in answer["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="no time for this request") as refused:
            served.client().completions.create(**body, stream=True)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        engine.may_draw.set()
        asked[0].join(60)
        assert answers[1][0] == 200 and served.ask(body)[0] == 200


def test_a_port_that_is_taken_is_told(plain):
    with pytest.raises(
        ValueError, match=rf"Port {plain.port} of 127.0.0.1 cannot be had .*choose another --port"
    ):
        bound_socket("127.0.0.1", plain.port)
