"""Whatever a tool does, its own message gets a result, and no other message waits for longer than it must."""

import asyncio
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.episodes.tool_runner import ToolRunner
from colocate.episodes.tools import ToolCall
from colocate.users_code import time_limit
from colocate.users_code.exits import EXIT_CODE

LIMIT_S = 1.0
PATIENCE_S = 60.0


@pytest.fixture
def make():
    runners = []

    def make(*args, **kwargs):
        runners.append(ToolRunner(*args, **kwargs))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def call(function, **arguments):
    return ToolCall(function, getattr(function, "__name__", "?"), arguments)


def run(runner, calls, patience_s=PATIENCE_S):
    """The results of one message's calls."""
    runner.start("key", calls)
    return run_all(runner, patience_s)["key"]


def run_all(runner, patience_s=PATIENCE_S):
    finished, end = {}, time.monotonic() + patience_s
    while runner.has_work:
        assert time.monotonic() < end, "the runner does not come to an end"
        finished.update(runner.poll())
        runner.wait(patience_s)
    return finished


def contents(results):
    return [result.content for result in results]


def returns(value):
    def tool():
        return value

    return tool


def raises(error):
    def tool():
        raise error

    return tool


def sleeps(seconds):
    def tool():
        time.sleep(seconds)
        return f"slept {seconds}"

    return tool


def awaits(seconds, value="awaited"):
    async def tool():
        await asyncio.sleep(seconds)
        return value

    return tool


def as_async(tool):
    async def wrapper(**arguments):
        return tool(**arguments)

    wrapper.__name__ = tool.__name__
    return wrapper


class Odd:
    def __str__(self):
        raise RuntimeError("no words")


EVERYWHERE = [
    pytest.param(0, lambda tool: tool, id="main thread"),
    pytest.param(2, lambda tool: tool, id="workers"),
    pytest.param(0, as_async, id="loop"),
    pytest.param(0, lambda tool: lambda **arguments: as_async(tool)(**arguments), id="awaitable"),
]


@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE)
def test_results_and_errors_are_text_as_in_trl(make, num_workers, wrap):
    blocks = [{"type": "text", "text": "a"}, ("rows", 1)]
    seen = []

    def mutate(numbers, table):
        seen.append((list(numbers), dict(table)))
        numbers.append(4)
        table["x"] = 1
        return numbers

    arguments = {"numbers": [1], "table": {}}
    calls = [
        call(wrap(returns("text"))),
        call(wrap(returns(None))),
        call(wrap(returns({"a": 1.5}))),
        call(wrap(returns(b"\x00\xff"))),
        call(wrap(returns(blocks))),
        call(wrap(returns("\ud800 lone"))),
        ToolCall(wrap(mutate), "mutate", arguments),
        call(wrap(raises(ValueError("Game over.")))),
        call(wrap(raises(AssertionError()))),
        call(wrap(raises(SystemExit(3)))),
        call(wrap(returns(Odd()))),
        call(wrap(raises(asyncio.CancelledError()))),
        ToolCall(None, "sub", {}, "Tool sub not found."),
    ]
    results = run(make(LIMIT_S, num_workers), calls)
    assert contents(results)[:11] == [
        "text",
        "None",
        "{'a': 1.5}",
        "b'\\x00\\xff'",
        blocks,
        "? lone",
        [1, 4],
        "{'error': 'Game over.'}",
        "{'error': ''}",
        "{'error': 'SystemExit: 3'}",
        "{'error': 'no words'}",
    ]
    assert "ancelled" in results[11].content
    assert results[12].content == "{'error': 'Tool sub not found.'}"
    assert [result.is_failure for result in results] == [False] * 7 + [True] * 6
    assert arguments == {"numbers": [1], "table": {}} and seen == [([1], {})]
    blocks.append("later")  # what the tool returned is its own to change
    assert len(results[4].content) == 2
    assert results[12].message == {"role": "tool", "name": "sub", "content": results[12].content}


@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE[:3])
def test_wrong_arguments_are_for_the_model_to_read(make, num_workers, wrap):
    def add(a: int) -> int:
        return a

    tool = add
    if wrap is as_async:

        async def tool(a: int) -> int:
            return a

    calls = [ToolCall(tool, "add", arguments) for arguments in ({}, {"b": 1}, "a=1", None, {1: 2}, {"a": 1})]
    results = run(make(None, num_workers), calls)
    assert [result.is_failure for result in results] == [True] * 5 + [False]
    assert "missing 1 required positional argument: 'a'" in results[0].content
    assert "unexpected keyword argument 'b'" in results[1].content


@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE[:3])
def test_ten_megabytes_are_an_error_that_costs_little(make, num_workers, wrap):
    huge = "x" * 10_000_000
    calls = [call(wrap(returns(huge))), call(wrap(returns([huge]))), call(wrap(raises(ValueError(huge))))]
    results = run(make(5.0, num_workers, max_result_chars=1000), calls)
    assert all(result.is_failure and len(result.content) < 1100 for result in results)
    assert "The result has 10000000 characters, more than the 1000" in results[0].content


def loop_for_ever():
    while True:
        try:
            while True:
                pass
        except Exception:
            continue


HANGS = [
    (0, loop_for_ever),
    *((n, hang) for n in (0, 2) for hang in (sleeps(4 * PATIENCE_S), threading.Event().wait)),
]


@pytest.mark.parametrize(("num_workers", "hang"), HANGS)  # nothing would end a loop in a worker
def test_a_sync_tool_that_hangs_ends_with_its_time(make, num_workers, hang):
    results = run(make(LIMIT_S, num_workers), [call(hang), call(returns("next"))])
    assert results[0].is_failure and f"took longer than {LIMIT_S:g} s" in results[0].content
    assert results[0].is_timeout and not results[1].is_timeout
    assert results[1].content == "next"


def test_async_tools_that_hang_block_or_swallow_cost_their_own_message_only(make):
    cancelled = []

    async def hang():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def swallow():
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                continue

    is_over = threading.Event()

    async def block():
        is_over.wait(4 * PATIENCE_S)

    runner = make(LIMIT_S)
    runner.start("hang", [call(hang)])
    runner.start("swallow", [call(swallow)])
    finished = run_all(runner)
    assert all(r[0].is_timeout and "took longer" in r[0].content for r in finished.values()) and cancelled
    assert [finished[key][0].is_left_running for key in ("hang", "swallow")] == [False, True]
    runner.start("block", [call(block)])
    assert run_all(runner)["block"][0].is_failure
    time.sleep(0.6)
    runner.poll()  # has seen by now that the loop does not answer
    runner.start("after", [call(awaits(0.01))])
    assert run_all(runner)["after"][0].content == "awaited"
    assert not is_over.is_set()
    is_over.set()


def test_workers_that_hang_are_replaced(make):
    def num_workers():
        return sum(thread.name == "tool_workers" for thread in threading.enumerate())

    before, is_over = num_workers(), threading.Event()
    runner = make(LIMIT_S, num_workers=2)
    for number in range(4):
        runner.start(f"hang {number}", [call(is_over.wait)])
    runner.start("after", [call(returns("done")), call(returns("too"))])
    finished = run_all(runner)  # without other threads it would have no end
    assert contents(finished["after"]) == ["done", "too"]
    hung = [finished[f"hang {number}"][0] for number in range(4)]
    assert all(result.is_failure and result.is_left_running for result in hung)
    is_over.set()
    end = time.monotonic() + PATIENCE_S
    while num_workers() - before > 2:  # those that hung end, and two are left
        assert time.monotonic() < end
        time.sleep(0.05)


def test_many_async_sleeps_take_as_long_as_the_longest(make):
    runner = make(PATIENCE_S)
    start = time.monotonic()
    for key in range(100):
        runner.start(key, [call(awaits(0.4 * (key + 1) / 100, key)), call(awaits(0.1))])
    finished = run_all(runner)
    took_s = time.monotonic() - start
    assert {key: contents(results) for key, results in finished.items()} == {
        key: [str(key), "awaited"] for key in range(100)
    }
    slept_s = sum(result.latency_s for results in finished.values() for result in results)
    assert 0.4 <= took_s < slept_s / 2  # one after the other would take as long as all of them
    assert 0.1 <= finished[99][1].latency_s < finished[99][0].latency_s <= took_s


@settings(max_examples=40, deadline=None)
@given(
    messages=st.lists(
        st.lists(
            st.tuples(st.sampled_from(["sync", "async", "raise", "none"]), st.integers(0, 3)), max_size=5
        ),
        max_size=6,
    ),
    num_workers=st.sampled_from([0, 1, 3]),
    budget_s=st.sampled_from([0.0, 0.001]),
)
def test_results_stand_in_the_order_of_the_calls(messages, num_workers, budget_s):
    running = {}

    def tool(kind, key, value):
        def work():
            assert running.setdefault(key, threading.get_ident()) == threading.get_ident()  # one at a time
            time.sleep(value / 2000)
            del running[key]
            if kind == "raise":
                raise ValueError(value)
            return value

        async def work_async():
            await asyncio.sleep(value / 1000)
            return value

        return {"none": None, "async": work_async}.get(kind, work)

    runner = ToolRunner(PATIENCE_S, num_workers)
    try:
        for key, message in enumerate(messages):
            calls = [ToolCall(tool(kind, key, value), f"{value}", {}, f"{value}") for kind, value in message]
            runner.start(key, calls)
        finished = {}
        while runner.has_work:
            finished.update(runner.poll(budget_s))
            runner.wait(0.5)
    finally:
        runner.close()
    assert set(finished) == set(range(len(messages)))
    for key, message in enumerate(messages):
        assert [result.name for result in finished[key]] == [str(value) for _, value in message]
        for result, (kind, value) in zip(finished[key], message, strict=True):
            is_failure = kind in ("raise", "none")
            assert (result.is_failure, result.content) == (
                is_failure,
                str({"error": str(value)}) if is_failure else str(value),
            )


def test_a_runner_that_rests_ends_what_is_under_way_and_keeps_what_tools_have_on_the_loop(make):
    kept, event, begun, ended = [], threading.Event(), threading.Event(), threading.Event()
    before = set(threading.enumerate())

    async def beat(event):
        while True:
            await asyncio.sleep(0.001)
            event.set()

    async def connect():
        kept.append(asyncio.create_task(beat(event)))

    async def hang():
        begun.set()
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    runner = make(60.0)
    with runner:
        with runner:
            run(runner, [call(connect)])
        assert event.wait(PATIENCE_S)  # the inner end is none
        runner.start("late", [call(hang)])
        assert begun.wait(PATIENCE_S)
    assert ended.is_set() and not runner.has_work
    assert set(threading.enumerate()) <= before
    event.clear()
    assert not event.wait(0.05)
    with runner:
        run(runner, [call(connect)])
        assert event.wait(PATIENCE_S) and not any(task.done() for task in kept)
    runner.close()
    assert all(task.cancelled() for task in kept)


def test_sync_tools_come_first_in_the_main_thread_and_polls_keep_to_their_budget(make):
    events = []

    def sync():
        events.append(("sync", threading.current_thread() is threading.main_thread()))
        time.sleep(0.05)

    async def later():
        events.append(("async", threading.current_thread() is threading.main_thread()))

    runner = make(PATIENCE_S)
    runner.start("a", [call(later), call(sync), call(sync)])
    runner.start("b", [call(sync)])
    assert not events and runner.poll(0.0) == {}
    assert events == [("sync", True)]  # one in any case
    finished = runner.poll(0.01)
    runner.wait(PATIENCE_S)  # "b" waits for the main thread: at once
    finished |= {**runner.poll(PATIENCE_S), **run_all(runner)}
    assert sorted(finished) == ["a", "b"] and events[:2] == [("sync", True)] * 2
    assert ("async", False) in events[2:]


@pytest.mark.usefixtures("nothing_is_collected")
def test_a_tool_may_use_signals_of_its_own(make):
    """TRL's example of an agent limits its queries by SIGALRM, which exists in the main thread alone."""

    def query():
        previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(OSError("too slow")))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(2 * PATIENCE_S)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    [result] = run(make(PATIENCE_S), [call(query)])
    assert result.content == "{'error': 'too slow'}"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("leave", [returns("child"), raises(SystemExit(0))], ids=["returns", "exits"])
@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE)
def test_a_copy_of_the_process_that_a_tool_lets_go_on_is_ended(make, num_workers, wrap, leave, capfd):
    def forks():
        child = os.fork()
        return leave() if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    (result,) = run(make(num_workers=num_workers), [call(wrap(forks))])
    assert result.content == str(EXIT_CODE) and not result.is_failure
    told = capfd.readouterr().err
    assert "has forked, and the child process returned from it" in told
    assert f"the run goes on in process {os.getpid()}" in told


@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE[:3])
def test_keyboard_interrupt_passes_through(make, num_workers, wrap):
    runner = make(PATIENCE_S, num_workers)
    with pytest.raises(KeyboardInterrupt):
        run(runner, [call(wrap(raises(KeyboardInterrupt())))])


@pytest.mark.usefixtures("nothing_is_collected")
def test_ctrl_c_during_a_tool_passes_through(make):
    def press():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2 * PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        run(make(PATIENCE_S), [call(press)])


def test_what_is_cancelled_is_forgotten(make):
    runner = make(None, num_workers=1)
    runner.start("async", [call(awaits(30))])
    begun, may_end = threading.Event(), threading.Event()
    runner.start("running", [call(lambda: begun.set() or may_end.wait(PATIENCE_S))])
    runner.start("waiting", [call(sleeps(30))])
    assert begun.wait(PATIENCE_S)
    cancelled = [runner.cancel(key) for key in ("async", "waiting", "running", "unknown")]
    assert cancelled == [True, False, True, False]  # what was running may not have stopped yet
    assert not runner.has_work and runner.poll() == {}
    may_end.set()
    runner.start("async", [call(returns("again"))])
    assert contents(run_all(runner)["async"]) == ["again"]


def test_calls_are_not_started_twice_and_none_are_finished_at_once(make):
    runner = make()
    runner.start("none", [])
    runner.wait()
    assert runner.poll() == {"none": []}
    runner.wait()  # nothing is under way: no sleep without end
    runner.start("key", [call(returns(1))])
    with pytest.raises(ValueError, match="'key' are under way"):
        runner.start("key", [])


def test_a_limit_needs_the_main_thread(make):
    runner, errors = make(5.0), []

    def elsewhere():
        try:
            run(runner, [call(returns(1))])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "tool_timeout_s=5" in errors[0] and "tool_timeout_s=None" in errors[0]


def hold_the_interpreter():
    return sum(range(10**13))


@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE)
@pytest.mark.share(2)
def test_a_tool_that_nothing_interrupts_ends_the_process_and_names_itself(
    monkeypatch, tmp_path, num_workers, wrap
):
    monkeypatch.setattr(time_limit, "GRACE_S", 0.5)
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, 120)  # of a test that fails
            os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)
            run(ToolRunner(LIMIT_S, num_workers), [call(wrap(hold_the_interpreter))])
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert "in hold_the_interpreter" in (tmp_path / "stderr").read_text()


def test_tools_that_only_wait_may_wait_longer_than_the_last_resort(monkeypatch):
    """In threads that can be given up: only what stops all threads ends the process."""
    monkeypatch.setattr(time_limit, "GRACE_S", 0.2)
    is_over = threading.Event()
    with ToolRunner(0.2, 2) as runner:
        [result] = run(runner, [call(is_over.wait)])
        assert result.is_left_running
        assert not is_over.wait(1.5)  # the process is still here
        [result] = run(runner, [call(returns("a"))])
        is_over.set()
    assert result.content == "a"


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE)
def test_a_list_that_json_cannot_write_is_text(make, num_workers, wrap):
    values = [[{"a": {1}}], [object], [{("a", 1): 2}], LOOP, [np.int64(3)], [{"a": [1.5, None, "b"]}]]
    results = run(make(num_workers=num_workers), [call(wrap(returns(value))) for value in values])
    assert contents(results) == [*map(str, values[:-1]), values[-1]]
    json.dumps(contents(results))
    assert not any(result.is_failure for result in results)


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "input_audio"])
@pytest.mark.parametrize(("num_workers", "wrap"), EVERYWHERE)
def test_a_block_that_is_no_text_ends_the_run_by_the_tools_name(make, num_workers, wrap, kind):
    def look():
        return [{"type": "text", "text": "here:"}, {"type": kind, kind: object()}]

    with pytest.raises(ValueError, match=f"The tool 'look' has returned a block of the type '{kind}'"):
        run(make(num_workers=num_workers), [ToolCall(wrap(look), "look", {})])
    rows = [{"type": kind, "title": "a film", "price": 3}, {"type": "image"}]  # rows of a table
    [result] = run(make(num_workers=num_workers), [call(wrap(returns(rows)))])
    assert result.content == rows
