"""The language that a text is taken to be in, and the `lang` that a report gives it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from colocate.reporting.language import language_of
from colocate.reporting.report import write_report

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("小明有三個蘋果,他又買了兩個。請問現在有幾個?", "zh-Hant"),
        ("小明有三个苹果,他又买了两个。请问现在有几个?", "zh-Hans"),
        ("USER\n小明有三個蘋果\n\nASSISTANT\n<think>3+2=5</think><answer>5</answer>", "zh-Hant"),
        ("明日の天気はどうですか。", "ja"),
        ("東京タワーの高さは333メートルです。", "ja"),
        ("ㄅㄆㄇ", "zh-Hant"),
        ("一二三", "zh"),
        ("사과가 세 개 있습니다.", "ko"),
        ("Πόσα μήλα έχει;", "el"),
        ("What is the sum of 3 and 4?", "en"),
        ("Wie viele Äpfel hat sie, wenn er ihr zwei gibt?", ""),
        ("Сколько яблок?", ""),  # Russian, Bulgarian, Ukrainian: the script does not say
        ("12 + 7 = 19", ""),
        ("def f(x): return x", ""),
        ("", ""),
        ("The word 蘋果 is Chinese for what you have here.", "en"),
    ],
)
def test_a_text_has_the_language_of_most_of_its_letters(text, language):
    assert language_of(text) == language


@pytest.mark.parametrize(("folder", "language", "least"), [("zh-Hant", "zh-Hant", 40), (".", "en", 120)])
def test_paragraphs_of_the_documentation_are_recognised(folder, language, least):
    """The pages are others' words: the examples above are not all that is recognised."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / folder).glob("*.md")))
    is_prose = re.compile(r"[^|`#!\-\s\d=]").match
    found = [language_of(part) for part in text.split("\n\n") if len(part) > least and is_prose(part)]
    assert len(found) >= 10 and found.count(language) >= 0.9 * len(found), found


def test_a_report_names_the_language_of_prompts_completions_and_options(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    sample = {
        "step": 1,
        "prompt": "請問 3 + 4 是多少?",
        "completion": "What is that, and how?",
        "rewards": {},
    }
    (tmp_path / "completions.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n")
    info = {"run_name": "加法練習", "options": {"system_prompt": "你是一個會計算的助手,請說明過程。"}}
    (tmp_path / "run.json").write_text(json.dumps(info))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert '<html lang="en">' in page  # its own words are English
    assert re.search(r'<pre class="prompt" lang="zh-Hant"[^>]*>請問', page)
    assert re.search(r'<pre lang="en"[^>]*>What', page)
    assert re.search(r'<td lang="zh-Hant">你是', page) and re.search(r'<h1 lang="zh">加法練習', page)
