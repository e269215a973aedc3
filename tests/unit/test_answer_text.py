"""Answers in Chinese, digits of full width and GSM8K's #### count, and English answers count as before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate.rewards import accuracy_reward
from colocate.rewards.answer_text import final_answer, readable

WIDE = str.maketrans("0123456789", "０１２３４５６７８９")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("答案是 $12$。", 1.0),
        ("答案是 12", 1.0),
        ("小明有 5 個蘋果，又買了 7 個，所以答案是12個。", 1.0),
        ("答案：１２個蘋果", 1.0),
        ("因此答案為 \\(12\\)", 1.0),
        ("最终答案是：**12**", 1.0),
        ("答案等于 24/2", 1.0),
        ("答案是 $\\frac{24}{2}$ 元", 1.0),
        ("\\boxed{１２}", 1.0),
        ("答案是 5。不對，答案是 12。", 1.0),
        ("答案是 12。不對，答案是 5。", 0.0),
        ("\\boxed{3}，答案是 12", 0.0),  # what is boxed counts
        ("答案是 -12", 0.0),
        ("他有 12 個", 0.0),  # a number in passing is no answer
        ("答案是十二", 0.0),  # numerals are not read
        ("12", 0.0),
    ],
)
def test_answers_in_chinese(completion, reward):
    assert accuracy_reward([completion], ["12"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        *((f"答案是 {text}", "2", 0.0) for text in (
            "2^10", "2π", "2\\pi", "2√3", "2x", "2:3", "2：30", "2×3", "2 × 3", "2+5", "2-5", "2 * 4",
            "2*(3+4)", "2(3+4)", "2=3", "2e3", "2,5", "2 1/2", "2萬", "2 万元", "2百")),
        *((f"答案是 {text}", "2", 1.0) for text in (
            "2", "2。", "2.", "2, 因為", "**2**", "2 公分", "2 cm", "2m", "2\n3. 下一題",
            "2（個）", "$2$", "4/2", "2；")),
        ("答案是 −2", "-2", 1.0),
        ("答案是 －２", "−2", 1.0),
        ("答案是 $2^{10}$", "1024", 1.0),
        ("答案是 7。以上回答 2 個步驟", "7", 1.0),
        ("每答 2 題得 7 分", "2", 0.0),
    ],
)  # fmt: skip
def test_a_number_that_goes_on_as_something_else_is_no_answer(completion, solution, reward):
    assert accuracy_reward([completion], [solution]) == [reward]


@settings(max_examples=50, deadline=None)
@given(st.integers(-(10**7), 10**7), st.sampled_from(["答案是 {}", "答案：{}。", "答：{} 元", "答案為 ${}$"]))
def test_any_number_is_read_in_any_width(number, sentence):
    for text in (str(number), str(number).translate(WIDE), f"{number:,}".replace(",", "，").translate(WIDE)):
        completion = sentence.format(text)
        assert accuracy_reward([completion] * 2, [str(number), str(number + 1)]) == [1.0, 0.0], completion


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72 in all.\n#### 72", "72"),
        ("It costs 3 * 400 = 1,200 dollars.\n#### 1,200", "1200"),
        ("#### ７２", "72"),
        ("一共有 ４８ + ２４ 個。答案是 ７２", "72"),
        ("72", "72"),
        (72, "72"),
    ],
)
def test_solutions_as_gsm8k_has_them(solution, answer):
    right, wrong = f"\\boxed{{{answer}}}", "\\boxed{24}"
    assert accuracy_reward([right, wrong], [solution, solution]) == [1.0, 0.0]


@given(st.text(alphabet="abc $\\{}0123.,=\n", max_size=40))
def test_text_without_chinese_and_full_width_is_left_as_it_is(text):
    assert readable(text) == text
    assert final_answer(text) == text
