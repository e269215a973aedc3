"""The built-in rewards give TRL's values, on conversational and on standard completions."""

import math
import threading

import pytest
import trl.rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate import rewards

ANSWERS = [
    r"\boxed{\frac{1}{3}}",
    r"My answer is \boxed{0.5}",
    r"\boxed{\frac{2}{4}}",
    r"$x = 3$",
    r"The final answer is $3$.",
    "3",
    "no answer",
    "",
    r"\boxed{}",
    r"\boxed{1} or \boxed{2}",
    r"\boxed{10\text{ cm}}",
    r"\boxed{\sqrt{2",
    r"<think>\boxed{3}</think> so \boxed{4}",
    r"<think>\boxed{3}</think>\boxed{1}<answer>\boxed{3}</answer>\boxed{3}",
    r"<think>it is \boxed{3}",
    r"<think>a</think> \boxed{3} </think> \boxed{10}",
    r"The final answer is $10$. I hope it is correct. \boxed{3}",
    r"\boxed{3} and then the final answer is $10$. I hope it is correct.",
    r"$\notacommand{$ or $3$ or $10$",
    r"</think> $10$ or $3$",
    r"</think> \boxed{((} and the final answer is $3$",
    r"<think>is it \boxed{2}?</think> It is \boxed{3}.",
]
SOLUTIONS = ["3", r"\frac{1}{3}", r"\frac12", "10", "", "not mathematics", r"$\{1, 2\}$"]
PAIRS = [(answer, solution) for answer in ANSWERS for solution in SOLUTIONS]


def messages(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


class Log(dict):
    def __call__(self, column, values):
        self[column] = list(values)


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward"])
def test_accuracy(name):
    texts, solutions = map(list, zip(*PAIRS, strict=True))
    their_log, our_log = Log(), Log()
    theirs = getattr(trl.rewards, name)(messages(texts), solutions, log_extra=their_log)
    ours = getattr(rewards, name)(messages(texts), solutions, log_extra=our_log)
    assert ours == theirs
    assert our_log == their_log
    assert getattr(rewards, name)(texts, solutions) == theirs
    assert {0.0, 1.0, None} <= set(theirs)  # the pairs above do tell the cases apart


def test_reasoning_accuracy_with_other_delimiters():
    texts = ["a </r> \\boxed{3}", "</think> \\boxed{3}", "</r> \\boxed{1} </think> \\boxed{3}", "\\boxed{3}"]
    for delimiters in (["</r>"], ["</think>", "</r>"], ["</r>", "</think>"], []):
        theirs = trl.rewards.reasoning_accuracy_reward(messages(texts), ["3"] * 4, delimiters)
        assert rewards.reasoning_accuracy_reward(texts, ["3"] * 4, delimiters) == theirs


def test_accuracy_outside_the_main_thread():
    results = []
    arguments = (messages([r"\boxed{3}", r"\boxed{4}", "3"]), ["3", "3", "3"])
    thread = threading.Thread(target=lambda: results.extend(rewards.accuracy_reward(*arguments)))
    thread.start()
    thread.join()
    assert results == trl.rewards.accuracy_reward(*arguments) == [1.0, 0.0, 0.0]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", " ", "<answer>"]), max_size=7))
def test_think_format(pieces):
    text = "".join(pieces)
    theirs = trl.rewards.think_format_reward(messages([text]))
    assert rewards.think_format_reward(messages([text])) == theirs
    assert rewards.think_format_reward([text]) == theirs


@settings(max_examples=200)
@given(
    ids=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4),
    ngram_size=st.integers(1, 5),
    max_penalty=st.floats(-3, -0.01),
)
def test_repetition_penalty(ids, ngram_size, max_penalty):
    theirs = trl.rewards.get_repetition_penalty_reward(ngram_size, max_penalty)(ids)
    ours = rewards.get_repetition_penalty_reward(ngram_size, max_penalty)(ids)
    assert ours == pytest.approx(theirs, abs=0)


@settings(max_examples=200)
@given(length=st.integers(0, 60), max_completion_len=st.integers(1, 50), soft_punish_cache=st.integers(0, 50))
def test_soft_overlong_punishment(length, max_completion_len, soft_punish_cache):
    ids = [[1] * length]
    theirs = trl.rewards.get_soft_overlong_punishment(max_completion_len, soft_punish_cache)(ids)
    assert rewards.get_soft_overlong_punishment(max_completion_len, soft_punish_cache)(ids) == theirs


@pytest.mark.parametrize("bounds", [(), (-2.0, -0.1, 0.25, 3.0)])
def test_cosine_scaled(bounds):
    lengths = [0, 1, 5, 10, 15, 20, 21, 100]
    texts = [r"\boxed{3}", r"\boxed{4}", "3"] * len(lengths)
    solutions = ["3", "3", ""] * len(lengths)
    ids = [[7] * length for length in lengths for _ in range(3)]
    theirs = trl.rewards.get_cosine_scaled_reward(20, *bounds)(messages(texts), solutions, ids)
    ours = rewards.get_cosine_scaled_reward(20, *bounds)(texts, solutions, ids)
    assert [math.nan if r is None else r for r in ours] == pytest.approx(
        [math.nan if r is None else r for r in theirs], abs=1e-15, nan_ok=True
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.get_cosine_scaled_reward(10),
        lambda m: m.get_repetition_penalty_reward(),
        lambda m: m.get_soft_overlong_punishment(10, 2),
    ],
)
def test_names_for_metrics_are_trls(make):
    assert make(rewards).__name__ == make(trl.rewards).__name__
