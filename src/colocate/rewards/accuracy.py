"""Rewards an answer that is mathematically equal to the solution, as math-verify judges it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from colocate.rewards.answer_size import is_too_large
from colocate.rewards.answer_text import final_answer, readable
from colocate.rewards.completions import Completions, completion_text

_WRITING_S = 2
"""Seconds in which an answer must be written as text."""


def accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 if the LaTeX answer in the completion equals the solution, else 0.0; None if the solution is
    unreadable.

    A Chinese answer (答案是 42) needs no LaTeX, and digits may have full width (４２).

    Args:
        completions: N completions, standard or conversational.
        solution: N solutions as text (a dataset column), or as GSM8K has them, with the answer after ####.
        log_extra: Receives the columns `solution`, `gold_parsed` and `answer_parsed` of the completions
            table.

    Raises:
        ImportError: math-verify is not installed.
    """
    judged = [_judge(completion_text(c), s) for c, s in zip(completions, solution, strict=True)]
    return _report(judged, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of the text after the reasoning; 0.0 if the reasoning does not end.

    Args:
        reasoning_delimiters: The texts that may end the reasoning, in order of preference; `["</think>"]` by
            default. The answer is the text after the last occurrence of the first delimiter that occurs.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    judged: list[tuple[float | None, str, str]] = []
    for completion, gold in zip(completions, solution, strict=True):
        text = completion_text(completion)
        delimiter = next((d for d in delimiters if d in text), None)
        if delimiter is None:
            # Not None, which would excuse it: endless reasoning is to be unlearnt.
            judged.append((0.0, "[incomplete reasoning]", "[incomplete reasoning]"))
        else:
            judged.append(_judge(text.split(delimiter)[-1], gold))
    return _report(judged, solution, log_extra)


def _report(
    judged: list[tuple[float | None, str, str]],
    solution: Sequence[str],
    log_extra: Callable[[str, list], None] | None,
) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in judged])
        log_extra("answer_parsed", [answer for _, _, answer in judged])
    return [reward for reward, _, _ in judged]


def _judge(text: str, solution: str) -> tuple[float | None, str, str]:
    """Judge one answer; returns (reward, the parsed solution, the parsed answer)."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ImportError('Judging answers needs math-verify: pip install "math-verify>=0.8"') from error

    # math-verify's timeouts are signals, which only the main thread can receive.
    in_main_thread = threading.current_thread() is threading.main_thread()
    parsing_timeout, verify_timeout = (10, 5) if in_main_thread else (None, None)
    if not in_main_thread:
        for name in ("math_verify.parser", "math_verify.grader"):  # they warn about it on every call
            logging.getLogger(name).setLevel(logging.ERROR)

    gold = parse(final_answer(str(solution)), parsing_timeout=parsing_timeout)
    if not gold:
        return None, "[unparseable]", "[skipped]"
    # The answer has to be given as LaTeX, boxed if anything is: a number in passing is no answer.
    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = parse(
        readable(text),
        extraction_config=[extraction],
        extraction_mode="first_match",
        parsing_timeout=parsing_timeout,
    )
    if is_too_large(answer) != is_too_large(gold):  # sympy would work on all digits to tell them apart
        reward = 0.0
    else:
        reward = float(verify(gold, answer, timeout_seconds=verify_timeout))
    return reward, _words(gold, in_main_thread), _words(answer, in_main_thread)


def _words(parsed: Sequence[Any], in_main_thread: bool) -> str:
    """Write the parsed answer for the completions table; sympy evaluates numbers in order to sort terms."""
    if not parsed:
        return "[unparseable]"
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    if not is_too_large(parsed):
        try:
            return timeout(_WRITING_S if in_main_thread else None)(str)(parsed)
        except (Exception, TimeoutException):  # such as more digits than Python writes
            pass
    return next((item for item in parsed if isinstance(item, str)), "[too large]")
