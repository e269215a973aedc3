"""Chat templates that lose prompts, draw lots or read the clock; prompts that take long or cannot fit."""

import re
import time

import pytest
from datasets import Dataset

from colocate.data import slow_prompts
from colocate.data.prompts import tokenize_prompts
from colocate.data.template_check import check_template
from tiny import make_model, make_tokenizer, make_trainer
from tool_chat import TEMPLATE, make_chat_tokenizer, user

ROWS = [{"prompt": user(text)} for text in ("one", "two", "three")]
ENDING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SAYS = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}" + ENDING


def check(template, rows=ROWS, **arguments):
    tokenizer = make_chat_tokenizer(template)

    def tokenize(some):
        return tokenize_prompts(some, tokenizer, chat_template_kwargs=arguments)

    check_template(rows, tokenize, tokenizer)


def chat_trainer(directory, rows, template=TEMPLATE):
    tokenizer = make_chat_tokenizer(template)
    model = make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return make_trainer(
        directory, model=model, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.text }}<|im_end|>{% endfor %}" + ENDING, "prompts alike"),
        ("<|im_start|>Hello." + ENDING, "prompts alike, though 3 of them say different things"),
        (SAYS + "{{ ['a', 'b'] | random }}", "differently each time"),
    ],
)
def test_templates_that_lose_prompts_or_draw_lots_are_refused(template, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        check(template)
    with pytest.raises(ValueError, match=words):
        chat_trainer(tmp_path, ROWS, template)


@pytest.mark.parametrize(
    ("format_", "words"),
    [("%d %b %Y", "writes today's date into"), ("%H:%M:%S", "writes the time of day into"), ("%%", None)],
)
def test_templates_that_read_the_clock_are_warned_of(format_, words, caplog):
    dated = "{% if not date_string %}{% set date_string = strftime_now('" + format_ + "') %}{% endif %}"
    check(dated + "{{ date_string }}" + SAYS)
    assert (
        caplog.text.count("The chat template writes") == (words is not None) and (words or "") in caplog.text
    )
    caplog.clear()
    check(dated + "{{ date_string }}" + SAYS, date_string="26 Jul 2024")
    assert not caplog.text


def test_prompts_that_are_alike_are_rendered_alike():
    check(SAYS, [ROWS[0]] * 3)
    check("<|im_start|>Hello." + ENDING, [ROWS[0]] * 3)
    check(SAYS, [{"prompt": "text"}, {"prompt": "other text"}])


def test_a_template_that_does_not_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_prompts, "START_S", 0.5)
    loops = "{% for a in range(9000) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ValueError, match=r"took longer than 0.5 s, .* loops in loops in the chat "):
        chat_trainer(tmp_path, ROWS, loops + SAYS)


@pytest.mark.parametrize("prompt", ["a " * 5_000_000, user("b" * 10_000_000)], ids=["text", "messages"])
def test_text_that_cannot_fit_is_refused_before_it_is_encoded(prompt, tmp_path):
    """Every token of a tokenizer has at most as many characters as its longest one."""
    rows = [{"prompt": "a" if isinstance(prompt, str) else user("a")}, {"prompt": prompt}]
    start_s = time.process_time()
    with pytest.raises(
        ValueError, match=r"Row \d \(from 0\): The prompt has 10,000,000 characters, .* or more, and no"
    ):
        chat_trainer(tmp_path, rows)
    assert time.process_time() - start_s < 60  # encoding takes minutes
    cut = tokenize_prompts(
        [{"prompt": "a b " * 50_000}], make_tokenizer(), max_prompt_length=3, context_length=9
    )
    assert len(cut[0]) == 3


def test_a_prompt_that_takes_long_is_named_meanwhile(monkeypatch, caplog):
    monkeypatch.setattr(slow_prompts, "SLOW_S", 0.01)
    loops = (
        "{% for a in range(900) %}{% for b in range(900) %}{% for m in messages %}{% endfor %}{% endfor %}"
    )
    tokenizer = make_chat_tokenizer(loops + "{% endfor %}" + SAYS)
    tokenize_prompts(ROWS, tokenizer, names=["Row 7", "Row 8", "Row 9"])
    assert (
        re.search(r"Row [789]: making its", caplog.text)
        and "A chat template with loops in loops" in caplog.text
    )
    caplog.clear()
    monkeypatch.setattr(slow_prompts, "SLOW_S", 30.0)
    tokenize_prompts(ROWS, make_chat_tokenizer())
    assert not caplog.text
