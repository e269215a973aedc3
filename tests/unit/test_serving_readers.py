"""Bodies are read by several threads, none of which others wait for, and no text is encoded for nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate.data.encoding import TooManyTokens, encoded_up_to
from colocate.experience.players.agent_session import DrawOptions, Session
from colocate.serving import calls, readers
from colocate.serving.calls import chat_call, completion_call
from colocate.serving.fields import Fields
from colocate.serving.handlers import StatelessHandler
from colocate.serving.readers import Readers
from colocate.serving.refusal import Refusal
from colocate.serving.texts import Texts
from colocate.types import Prompt, SamplingParams
from serving_case import QUESTION, STOP, TOKENIZER

MAX_LEN = 100
LONG = "a b" * 1_000_000


def read(reading: Readers, *work: Any, limits_s: Sequence[float] = ()) -> list[Any]:
    """What several bodies' work returns, or the class of what it raises, all read at the same time.

    Args:
        limits_s: for how long the first ones are awaited.
    """

    async def main() -> list[Any]:
        limits = zip_longest(work, limits_s, fillvalue=60.0)
        jobs = (asyncio.wait_for(reading.read(one), limit_s) for one, limit_s in limits)
        return await asyncio.gather(*jobs, return_exceptions=True)

    return [type(value) if isinstance(value, Exception) else value for value in asyncio.run(main())]


def test_nobody_waits_for_a_body_that_does_not_come_to_an_end():
    reading, end = Readers(2, late_s=1000), threading.Event()
    results = read(reading, lambda: end.wait(100) and "stuck", *([lambda: 1] * 20), limits_s=[0.5])
    assert results == [TimeoutError, *([1] * 20)]
    assert read(reading, lambda: 1 / 0, lambda: 2) == [ZeroDivisionError, 2]
    end.set()
    reading.close()


def test_what_nobody_waits_for_any_more_is_not_done():
    reading, end, done = Readers(1, late_s=1000), threading.Event(), []
    work = (lambda: end.wait(100), lambda: done.append(1))
    assert read(reading, *work, limits_s=[0.2, 0.2]) == [TimeoutError] * 2
    end.set()
    assert read(reading, lambda: 3) == [3] and done == []
    reading.close()


class Stuck:
    """Work that has begun, and ends when it is let."""

    def __init__(self) -> None:
        self.has_begun, self.end = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.has_begun.set()
        return self.end.wait(100)

    async def begin(self, reading: Readers) -> asyncio.Task[bool]:
        task = asyncio.create_task(reading.read(self))
        while not self.has_begun.is_set():
            await asyncio.sleep(0.001)
        return task


def test_bodies_are_late_while_no_reader_is_free(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(readers, "time", SimpleNamespace(monotonic=lambda: now_s[0]))  # not asyncio's
    reading, first, second = Readers(2, late_s=10), Stuck(), Stuck()

    async def main() -> None:
        tasks = [await first.begin(reading)]
        now_s[0] += 50
        assert reading.delay_s == 0, "the other one is free"
        tasks.append(await second.begin(reading))
        now_s[0] += 9
        assert reading.delay_s == 0
        now_s[0] += 2
        assert reading.delay_s == 11
        waiting = asyncio.create_task(reading.read(lambda: 3))
        await asyncio.sleep(0)
        now_s[0] += 20
        assert reading.delay_s == 31
        for stuck in (first, second):
            stuck.end.set()
        assert await asyncio.gather(*tasks, waiting) == [True, True, 3]
        assert reading.delay_s == 0

    asyncio.run(main())
    reading.close()


def test_a_reader_that_is_stuck_does_not_keep_the_process_from_ending():
    program = (
        "import asyncio, time\n"
        "from colocate.serving.readers import Readers\n"
        "async def main():\n"
        "    task = asyncio.create_task(Readers(2, 10).read(lambda: time.sleep(1000)))\n"
        "    await asyncio.wait([task], timeout=0.1)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ── How much of a text is encoded ────────────────────────────────────────────────────────────────────────


@given(st.lists(st.sampled_from(["a", "b ", " " * 40, "abcdefgh" * 9]), max_size=60), st.integers(1, 90))
def test_a_text_is_encoded_as_ever_or_has_too_many_tokens(parts, most):
    text = "".join(parts)
    expected = TOKENIZER(text)["input_ids"]
    try:
        assert encoded_up_to(lambda part: TOKENIZER(part)["input_ids"], text, most) == expected
    except TooManyTokens:
        assert len(expected) > most


class Counting:
    """A tokenizer that counts the characters that it is given to encode."""

    def __init__(self) -> None:
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_chars += len(text)
        return TOKENIZER(text, **options)


def session_of(texts: Texts) -> Session:
    prompt = Prompt(tuple(texts.renderer.render(QUESTION)), 0, range(1))
    return Session(prompt, texts, DrawOptions(SamplingParams(max_tokens=50), MAX_LEN, 1 << 20, lambda: 0))


@pytest.mark.parametrize("handler", ["stateless", "agent"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_of_a_text_that_is_far_too_long_a_beginning_is_encoded(handler, is_chat):
    texts = Texts(Counting(), [STOP])  # type: ignore[arg-type]
    handle = (
        session_of(texts)
        if handler == "agent"
        else StatelessHandler(texts, max_len=MAX_LEN, vocab_size=1 << 20)
    ).draw_request
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    call = chat_call(Fields(body)) if is_chat else completion_call(Fields({"model": "m", "prompt": LONG}))
    texts.tokenizer.num_chars = 0  # type: ignore[attr-defined]
    with pytest.raises(Refusal, match="more than 100 tokens") as refused:
        handle(call, 0)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == ("messages" if is_chat else "prompt")
    assert texts.tokenizer.num_chars < 20 * MAX_LEN < len(LONG) / 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ({"prompt": [5] * 500}, "prompt"),
        ({"prompt": [[1], [5] * 500]}, "prompt"),
        ({"messages": [{"role": "user"}] * 500}, "messages"),
        ({"messages": QUESTION, "tools": [{}] * 500}, "tools"),
    ],
)
def test_ids_messages_and_tools_beyond_the_context_are_not_looked_at(content, param, monkeypatch):
    """There may be millions of them in a body: their number is enough."""
    looked_at: list[Any] = []
    monkeypatch.setattr(calls, "_tool", lambda *arguments: looked_at.append(arguments))
    if param == "messages":
        monkeypatch.setattr(calls, "_message", lambda *arguments: looked_at.append(arguments))
    read_body = completion_call if param == "prompt" else chat_call
    with pytest.raises(Refusal, match="500") as refused:
        read_body(Fields({"model": "m", **content}), MAX_LEN)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
    assert not looked_at


def test_an_episode_ends_while_a_prompt_of_its_agent_is_read(monkeypatch):
    """What reads does not hold what the answers of other calls, and the trainer, need."""
    texts = Texts(TOKENIZER, [STOP])
    session = session_of(texts)
    is_reading, end = threading.Event(), threading.Event()

    def context(*_: Any) -> tuple[int, ...]:
        is_reading.set()
        end.wait(100)
        return (5,)

    monkeypatch.setattr(texts, "context", context)
    errors: list[Exception] = []

    def read_call() -> None:
        try:
            session.draw_request(chat_call(Fields({"model": "m", "messages": QUESTION})), 0)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read_call, daemon=True)
    reader.start()
    assert is_reading.wait(60)
    began_s = time.monotonic()
    session.close()
    assert time.monotonic() - began_s < 50
    end.set()
    reader.join(60)
    assert "This session is over" in str(errors[0])
