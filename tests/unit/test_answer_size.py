"""Answers whose numbers nobody could write out: `accuracy_reward` neither computes nor prints them."""

import math
import threading

import pytest
from math_verify import parse

from colocate.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
from colocate.rewards.answer_size import MAX_BITS, is_too_large
from colocate.users_code.time_limit import TimeLimit

TOWERS = [
    r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
    r"10^{10^{10}}",
    r"\frac{x}{9^{9^9}}",
    r"(10^{100})! - 3",
    r"\binom{10^{9}}{10^{8}}",
    r"\sqrt{2}^{2^{40}}",
    r"-2^{2^{2^{100}}} + \sqrt{7}",
]

pytestmark = pytest.mark.usefixtures("nothing_is_collected")


@pytest.mark.parametrize("function", [accuracy_reward, reasoning_accuracy_reward])
@pytest.mark.parametrize("logs", [False, True])
def test_towers_of_powers_earn_nothing_and_take_no_time(function, logs):
    columns = {}
    texts = [f"<think></think> \\boxed{{{tower}}}" for tower in TOWERS] + [r"<think></think> \boxed{4}"]
    log_extra = columns.__setitem__ if logs else None

    # One comparison of math-verify's that waits for its own limit takes 5 s.
    rewards = TimeLimit(60).call(
        "judge", lambda: function(completions=texts, solution=["4"] * len(texts), log_extra=log_extra)
    )

    assert rewards == [0.0] * len(TOWERS) + [1.0]
    if logs:
        assert columns["answer_parsed"][-1] == "[4, '4']"
        assert columns["answer_parsed"][1] == "10^{10^{10}}"  # as it was found


def test_towers_end_outside_the_main_thread_too():
    rewards = []
    texts = [f"\\boxed{{{tower}}}" for tower in TOWERS]
    judge = threading.Thread(
        target=lambda: rewards.extend(accuracy_reward(texts, ["4"] * len(texts), print)), daemon=True
    )
    judge.start()
    judge.join(60)
    assert rewards == [0.0] * len(TOWERS)


def test_a_tower_equals_itself_and_only_itself():
    gold = ["$10^{10^{10}}$"] * 2
    assert accuracy_reward([r"\boxed{10^{10^{10}}}", r"\boxed{7}"], gold) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^{1000}", 2**1000),
        ("3^{2^{10}} + 1", 3**1024 + 1),
        ("7^{300} \\cdot 11^{200}", 7**300 * 11**200),
        ("300!", math.factorial(300)),
        ("\\binom{200}{70}", math.comb(200, 70)),
    ],
)
def test_the_bound_is_above_the_number_and_near_it(text, value):
    few, many = (f"$({text})^{{{int(MAX_BITS / math.log2(value) * factor)}}}$" for factor in (1 / 3, 1.01))
    assert not is_too_large(parse(few))
    assert is_too_large(parse(many))


@pytest.mark.parametrize(
    "text",
    ["x^{2n}", "a^{b^{c}}", "2^{n+1}", "(-1)^{10^{12}}", "e^{e^{x}}", "\\{1, 2^{30}\\}", "x = 10^{99}", "n!"],
)
def test_ordinary_answers_are_not_too_large(text):
    assert not is_too_large(parse(f"${text}$"))
