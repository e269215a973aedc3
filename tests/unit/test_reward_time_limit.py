"""`reward_timeout_s`: whatever a reward function does, it ends, and the error says where it was."""

import asyncio
import os
import re
import signal
import sys
import threading
import time

import pytest
from test_rewards import COMPLETIONS, IDS, PROMPTS

from colocate.rewards.base import RewardFunctions
from colocate.users_code import time_limit
from colocate.users_code.errors import RewardError

LIMIT_S = 0.5

pytestmark = pytest.mark.usefixtures("nothing_is_collected")


def score(funcs, timeout_s=LIMIT_S, completions=COMPLETIONS):
    functions = RewardFunctions(funcs, timeout_s=timeout_s)
    try:
        return functions.score(PROMPTS, completions, IDS, {}, None).rewards.tolist()
    finally:
        functions.close()


def loop():
    while True:
        pass


def loop_that_excepts():
    while True:
        try:
            loop()
        except Exception:
            continue


def wait_for_nobody():
    threading.Event().wait()


def backtrack():
    re.match(r"(a+)+$", "a" * 50 + "b")


@pytest.mark.parametrize(
    "hang", [loop, loop_that_excepts, wait_for_nobody, backtrack, lambda: time.sleep(60), lambda: 7**10**9]
)
def test_a_function_that_hangs_is_interrupted_and_named_with_its_completion(hang):
    def judge(completions, **kwargs):
        for completion in completions:
            if completion.startswith("it"):
                hang()
        return [0, 0, 0]

    with pytest.raises(
        RewardError, match=r"'judge' took longer than reward_timeout_s=0\.5, at .*\.py:\d+ in"
    ) as caught:
        score(judge)
    assert "working on completion 1 ('it is four' to the prompt 'what is two')" in str(caught.value)
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert "reward_timeout_s" not in {thread.name for thread in threading.enumerate()}


def test_without_a_completion_at_hand_the_whole_batch_is_named():
    def judge(completions, **kwargs):
        time.sleep(60)

    with pytest.raises(RewardError, match=r"completions 0 to 2, first completion 0 \('two and no more'"):
        score(judge)


def test_late_is_late_whatever_became_of_the_interruption():
    def deaf(**kwargs):
        try:
            time.sleep(60)
        except BaseException:
            return [0, 0, 0]

    def lazy(**kwargs):
        return (time.sleep(0.3) for _ in range(3))

    for func in (deaf, lazy):
        with pytest.raises(RewardError, match=f"'{func.__name__}' took longer"):
            score(func)


def test_functions_in_time_are_left_alone():
    def with_an_alarm_of_its_own(**kwargs):
        """As math-verify has."""

        class Alarm(Exception):
            pass

        def ring(*_):
            raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            time.sleep(60)
        signal.signal(signal.SIGALRM, before)
        return [1, 2, 3]

    async def judge(**kwargs):
        await asyncio.sleep(0.01)
        return [4, 5, 6]

    assert score([with_an_alarm_of_its_own, judge], timeout_s=30) == [[1, 4], [2, 5], [3, 6]]


def test_async_functions_are_cancelled_and_named():
    async def ask(completion):
        await asyncio.sleep(60 if "it is" in completion else 0)
        return 0

    async def one_by_one(completions, **kwargs):
        return [await ask(completion) for completion in completions]

    async def together(completions, **kwargs):
        return await asyncio.gather(*map(ask, completions))

    async def deaf(completions, **kwargs):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return [0, 0, 0]

    for func in (one_by_one, together):
        with pytest.raises(RewardError, match=rf"'{func.__name__}' took .* in ask\. .*on completion 1 \('it"):
            score(func)
    with pytest.raises(RewardError, match=r"'deaf' took longer .*completions 0 to 2"):
        score(deaf)


def test_async_function_that_blocks_the_loop():
    release = threading.Event()

    async def judge(completions, **kwargs):
        for message in completions:
            if "it is" in message[0]["content"]:
                release.wait(100)

    messages = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    with pytest.raises(RewardError, match=r"in judge, which blocks the one loop.*\n?.*on completion 1 \("):
        score(judge, completions=messages)
    release.set()


def test_outside_the_main_thread_a_limit_warns_that_nothing_can_be_interrupted(caplog):
    rewards = []
    thread = threading.Thread(target=lambda: rewards.extend(score(lambda **kwargs: [0, 1, 2])), name="worker")
    thread.start()
    thread.join()
    assert rewards == [[0.0], [1.0], [2.0]]
    assert "runs in the thread 'worker', and only the main thread can be interrupted" in caplog.text
    assert "reward_timeout_s=0.5 s ends the process 10 s later" in caplog.text


def hold_the_interpreter(**kwargs):
    return [sum(range(10**13))]


async def hold_the_interpreter_in_the_loop(**kwargs):
    return [sum(range(10**13))]


def swallow_everything(**kwargs):
    while True:
        try:
            loop()
        except BaseException:
            continue


def sleep_long(**kwargs):
    time.sleep(100)


def score_in_a_thread(func):
    thread = threading.Thread(target=score, args=(func,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("score_it", "func"),
    [
        (score, hold_the_interpreter),
        (score, hold_the_interpreter_in_the_loop),
        (score, swallow_everything),
        (score_in_a_thread, sleep_long),
    ],
)
def test_what_cannot_be_interrupted_ends_the_process(score_it, func, monkeypatch, tmp_path):
    monkeypatch.setattr(time_limit, "GRACE_S", 0.5)
    monkeypatch.setattr(time_limit, "REPEAT_S", 0.2)
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, 120)  # of a test that fails
            os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)
            score_it(func)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert f"in {func.__name__}" in (tmp_path / "stderr").read_text()


def test_an_interrupt_from_the_keyboard_ends_the_waiting():
    main = threading.get_ident()

    async def judge(**kwargs):
        while sys._current_frames()[main].f_code.co_name != "wait":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # a signal at the moment at which the main thread lies down waits, too
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    def slow(**kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    for func, timeout_s in ((judge, None), (judge, 30), (slow, None), (slow, 30)):
        with pytest.raises(KeyboardInterrupt):
            score(func, timeout_s)
