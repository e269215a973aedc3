"""Prompts made of a dataset's columns, rows left out by their prompts' lengths, and what is refused."""

from __future__ import annotations

import json
import logging

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.data_utils import maybe_apply_chat_template

from colocate.data.prompt_format import PromptFormat
from colocate.data.prompt_lengths import within_lengths
from colocate.data.prompts import as_conversations, tell_bare_strings, tokenize_prompts
from tiny import make_tokenizer, make_trainer, sums

GSM8K = datasets.Dataset.from_list(
    [
        {"question": "tom has 2 eggs and buys 3. how many?", "answer": "2+3=5\n#### 5"},
        {"question": "ann has 9 eggs and eats 1. how many?", "answer": "9-1=8\n#### 8"},
    ]
)


def first(dataset):
    return next(iter(dataset))


@pytest.mark.parametrize("as_stream", [False, True])
def test_columns_become_prompts_and_what_rewards_look_for(as_stream):
    data = GSM8K.to_iterable_dataset() if as_stream else GSM8K
    plain = PromptFormat(prompt_column="question", columns={"answer": "solution"}).apply(data, "gsm8k")
    assert first(plain) == {"prompt": GSM8K[0]["question"], "solution": "2+3=5\n#### 5"}
    system = PromptFormat(prompt_column="question", system_prompt="Box it.", columns={"answer": None})
    assert first(system.apply(data, "gsm8k")) == {
        "prompt": [
            {"role": "system", "content": "Box it."},
            {"role": "user", "content": GSM8K[0]["question"]},
        ]
    }
    template = PromptFormat(prompt_template=r"{question} Put it into \boxed{{}}, {answer:.3}")
    assert first(template.apply(data, "gsm8k")) == {
        **GSM8K[0],
        "prompt": GSM8K[0]["question"] + r" Put it into \boxed{}, 2+3",
    }


def test_a_prompt_column_may_hold_conversations_and_replaces_another_prompt():
    messages = [{"role": "user", "content": "why?"}]
    data = datasets.Dataset.from_list([{"messages": messages, "prompt": "old", "solution": "1"}])
    format = PromptFormat(prompt_column="messages", system_prompt="Be brief.")
    assert first(format.apply(data, "d")) == {
        "prompt": [{"role": "system", "content": "Be brief."}, *messages],
        "solution": "1",
    }
    again = datasets.Dataset.from_list([first(format.apply(data, "d"))])
    with pytest.raises(ValueError, match=r"Row 0 \(from 0\) begins with a system message"):
        PromptFormat(system_prompt="Be long.").apply(again, "d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_column": "problem"},
            "names the column 'problem', which gsm8k does not have; it has 'question', 'answer'",
        ),
        ({"prompt_column": "questoin"}, r"it has .question., .answer.; did you mean .question.\?"),
        ({}, "gsm8k has no column 'prompt'; it has 'question', 'answer'. Set prompt_column"),
        (
            {"prompt_template": "{problem}?"},
            "'{problem}\\?' names the column 'problem', which gsm8k does not have; it has 'question', "
            "'answer'",
        ),
        ({"prompt_template": r"{question} \boxed{42}"}, r"column '42'.*written twice, as in \\boxed{{}}"),
        (
            {"prompt_template": "{question:d}"},
            r"Row 0 \(from 0\) does not fit prompt_template=.*format code 'd'",
        ),
        (
            {"prompt_column": "question", "columns": {"solution": "answer"}},
            "columns names the column 'solution'",
        ),
        (
            {"prompt_column": "question", "columns": {"answer": "prompt"}},
            "would give two columns of gsm8k the name 'prompt'",
        ),
    ],
)
def test_columns_that_are_not_there_are_refused_with_those_that_are(options, message):
    with pytest.raises(ValueError, match=message):
        first(PromptFormat(**options).apply(GSM8K, "gsm8k"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_column": "q", "prompt_template": "{q}"},
            "prompt_column='q' and prompt_template='{q}' both say",
        ),
        ({"prompt_template": "Think."}, "has no column in braces, so all prompts would be the same"),
        (
            {"prompt_template": r"{q} \boxed{}"},
            r"has '{}', which is no column's name. A brace of the text itself",
        ),
        (
            {"prompt_template": "{q"},
            "no text with columns in braces: expected '}'.*A brace of the text itself",
        ),
        ({"prompt_template": "{q.__class__}"}, "'{q.__class__}', which is no column's name"),
        ({"prompt_template": "{q[0]}"}, r"'{q\[0\]}', which is no column's name"),
        ({"columns": {"answer": 3}}, "renames 'answer' to 3: write {old: new}"),
        ({"columns": {"answer": ""}}, "renames 'answer' to ''"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        PromptFormat(**options)


def test_a_row_without_a_value_for_the_template_is_named():
    data = datasets.Dataset.from_list([{"q": "a"}, {"q": None}])
    with pytest.raises(ValueError, match=r"Row 1 \(from 0\) has no value in the column 'q'"):
        PromptFormat(prompt_template="{q}?").apply(data, "d")


@given(st.lists(st.text(alphabet="abc {}\n%é中", max_size=12), min_size=1, max_size=5))
def test_a_column_is_put_in_as_it_is_whatever_braces_it_has(texts):
    data = datasets.Dataset.from_dict({"q": texts})
    prompts = PromptFormat(prompt_template="<{q}> {{}}").apply(data, "d")["prompt"][:]
    assert prompts == [f"<{text}> {{}}" for text in texts]


@pytest.mark.parametrize("system_prompt", [None, "think."])
def test_the_model_reads_what_trls_chat_template_writes(system_prompt):
    tokenizer = make_tokenizer()
    format = PromptFormat(prompt_column="question", system_prompt=system_prompt)
    rows = as_conversations(format.apply(GSM8K, "gsm8k")).to_list()
    theirs = [
        tokenizer(maybe_apply_chat_template({"prompt": row["prompt"]}, tokenizer)["prompt"])["input_ids"]
        for row in rows
    ]
    assert [list(ids) for ids in tokenize_prompts(rows, tokenizer)] == theirs


# ── Lengths ──────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
)
def test_the_rows_within_the_lengths_stay_in_their_order_and_the_others_are_counted(lengths, low, high):
    tokenizer = make_tokenizer()
    data = datasets.Dataset.from_dict({"prompt": ["a" * length for length in lengths]})
    expected = [n for n in lengths if (low is None or n >= low) and (high is None or n <= high)]
    if not expected:
        with pytest.raises(ValueError, match=r"no prompt has at least|leaves no row of d"):
            within_lengths(data, tokenizer, name="d", min_tokens=low, max_tokens=high)
        return
    kept, left_out = within_lengths(data, tokenizer, name="d", min_tokens=low, max_tokens=high)
    assert [len(prompt) for prompt in kept["prompt"]] == expected
    num_short = sum(low is not None and n < low for n in lengths)
    num_long = sum(high is not None and n > high for n in lengths)
    reasons = [f"{num_short} with fewer than {low} tokens"] if num_short else []
    reasons += [f"{num_long} with more than {high} tokens"] if num_long else []
    sentence = f"{num_short + num_long} of {len(lengths)} prompts of d: {' and '.join(reasons)}"
    assert left_out == (sentence if reasons else None)


def test_an_empty_result_says_how_long_prompts_are():
    tokenizer = make_tokenizer()
    data = datasets.Dataset.from_dict({"prompt": ["aaaa", "bb", "ccccccc"]})
    with pytest.raises(
        ValueError, match="max_prompt_tokens=1 leaves no row of d: its 3 prompts have 2 to 7 tokens"
    ):
        within_lengths(data, tokenizer, name="d", max_tokens=1)
    with pytest.raises(ValueError, match="no prompt has at least 5 and at most 3 tokens"):
        within_lengths(data, tokenizer, name="d", min_tokens=5, max_tokens=3)
    with pytest.raises(ValueError, match="d is a stream, whose rows are not known"):
        within_lengths(data.to_iterable_dataset(), tokenizer, name="d", max_tokens=3)


def test_the_chat_template_counts():
    tokenizer = make_tokenizer()
    data = as_conversations(datasets.Dataset.from_dict({"prompt": ["a", "aaa"]}))
    (short, _) = (len(tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"])
                  for p in data["prompt"])  # fmt: skip
    kept, _ = within_lengths(data, tokenizer, name="d", max_tokens=short)
    assert json.loads(json.dumps(kept["prompt"][:])) == [[{"role": "user", "content": "a"}]]


# ── Strings and chat models ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "has_template", "asked", "warns"),
    [
        ("why?", True, None, True),
        ("why?", True, False, False),
        ("why?", False, None, False),
        ([{"role": "user", "content": "why?"}], True, None, False),
    ],
)
def test_strings_to_a_chat_model_are_warned_of(prompt, has_template, asked, warns, caplog):
    tokenizer = make_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    with caplog.at_level(logging.WARNING, logger="colocate"):
        tell_bare_strings(prompt, tokenizer, asked)
    assert ("Set apply_chat_template=True" in caplog.text) == warns


def test_a_run_warns_of_strings_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="colocate"):
        make_trainer(tmp_path, eval_dataset=sums(), eval_strategy="steps", eval_steps=1, max_steps=2).train()
    assert caplog.text.count("Set apply_chat_template=True") == 1
