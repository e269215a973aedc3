"""Writes answers as math-verify reads them: full-width digits as ASCII, Chinese answers as English ones."""

from __future__ import annotations

import re

_HALF_WIDTH = {ord(wide): chr(ord(wide) - 0xFEE0) for wide in "０１２３４５６７８９＋－＊／＝％＄．（）＜＞"}
_HALF_WIDTH |= dict.fromkeys(map(ord, "−﹣"), "-")  # the sign of mathematics, and a small hyphen
_THOUSANDS = re.compile(r"(?<=\d)，(?=\d{3}(?!\d))")

_IS = r"\s*(?:就?是|應該是|应该是|為|为|等於|等于)"
_NUMBER = r"-?\d++(?:,\d{3})*+(?:\.\d++)?+(?:\s*/\s*\d++)?+%?+"
_GOES_ON = (
    r"[ \t]*(?:[-+*/×÷·:：=,][ \t]*[\d(√π\\]|[\d√π^_十百千萬万億亿]|[xyz](?![A-Za-z])|[eE][-+]?\d|\(\d"
    r"|\\(?:pi|sqrt|d?frac|times|cdot|div)(?![A-Za-z]))"
)
"""Text that makes a number the beginning of something else: 2^10, 2π, 5萬, 3:4, 1 1/2."""
_ANSWER = re.compile(
    rf"(?:答案(?:{_IS})?\s*[:：=]?|答(?:{_IS}\s*[:：=]?|\s*[:：=]))\s*"
    r"\*{0,2}\s*"
    r"(?:\$(?P<dollars>[^$\n]+)\$|\\\((?P<parentheses>.+?)\\\)"
    rf"|[$¥￥€]?\s*(?P<number>{_NUMBER})(?!{_GOES_ON}))"
)
"""A Chinese answer: 答案是 42, 答案：$\\frac12$, 答：４２ 個. One that is no single number stands in $…$."""
_GSM8K = "####"
"""The mark that GSM8K writes before the answer, at the end of the solution."""


def readable(text: str) -> str:
    """A completion whose last Chinese answer, if it has one, stands at its end as "The final answer is $42$."

    math-verify looks for English words before an answer. A boxed answer needs none, and stays the one that
    counts.
    """
    text = _in_half_width(text)
    answers = list(_ANSWER.finditer(text))
    return f"{text}\nThe final answer is ${_value(answers[-1])}$." if answers else text


def final_answer(solution: str) -> str:
    """The answer of a solution: the text after GSM8K's ####, or the last Chinese answer; else all of it."""
    _, separator, answer = _in_half_width(solution).rpartition(_GSM8K)
    answers = [] if separator else list(_ANSWER.finditer(answer))
    return f"${_value(answers[-1])}$" if answers else answer


def _in_half_width(text: str) -> str:
    return _THOUSANDS.sub(",", text.translate(_HALF_WIDTH))


def _value(answer: re.Match[str]) -> str:
    value = next(group for group in answer.groups() if group is not None)
    return value.replace("%", r"\%") if answer["number"] else value
