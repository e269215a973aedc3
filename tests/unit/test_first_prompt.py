"""What the first prompt shows is said at the start, once; prompts may end with the beginning of an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from colocate.data.prompts import tokenize_prompts
from colocate.rewards.format import think_format_reward
from colocate.rewards.models import RewardModel
from tiny import CHAT_TEMPLATE, make_config, make_model, make_reward_model, make_tokenizer, make_trainer
from tool_chat import add

ASKED = [{"role": "user", "content": "1+1="}]
BEGUN = [*ASKED, {"role": "assistant", "content": "it is"}]
CONTINUE = {"continue_final_message": True}


def plain(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None


def marks_both_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<unk>", "<eos>")]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<unk> $A <eos>", special_tokens=ids)


def has_special_tags(tokenizer: PreTrainedTokenizerFast) -> None:
    tags = ["<think>", "</think>", "<fim>", "<s>", "</s>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})


def opens_think(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def unchanged(tokenizer: PreTrainedTokenizerFast) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "prompt", "options", "told"),
    [
        (plain, "1+1=", {}, []),
        (unchanged, ASKED, {}, []),
        (marks_both_ends, "<unk>1+1=", {}, ["Prompts begin with '<unk>' twice", "puts '<eos>' behind every"]),
        (marks_both_ends, "1+1=", {}, ["puts '<eos>' behind every prompt"]),
        (has_special_tags, ASKED, {}, ["<think> and </think> are special tokens"]),
        (opens_think, ASKED, {}, []),
        (opens_think, ASKED, {"reward_funcs": think_format_reward}, ["think_format_reward, which looks for"]),
        (unchanged, BEGUN, {}, ["Prompts end with a message of the assistant"]),
        (unchanged, BEGUN, {"chat_template_kwargs": CONTINUE}, []),
    ],
)
def test_a_fault_of_all_prompts_is_told_from_the_first(tmp_path, caplog, change, prompt, options, told):
    tokenizer = make_tokenizer()
    change(tokenizer)
    rows = Dataset.from_dict({"prompt": [prompt] * 4})
    with caplog.at_level(logging.WARNING, "colocate"):
        model = make_model(vocab_size=len(tokenizer))
        make_trainer(tmp_path, model=model, processing_class=tokenizer, train_dataset=rows, **options)
    said = [r.getMessage() for r in caplog.records if r.name == "colocate.data.first_prompt"]
    assert len(said) == len(told) and all(words in text for words, text in zip(told, said, strict=True))


@pytest.mark.parametrize("is_own", [False, True], ids=["of the run", "of a row"])
def test_a_completion_continues_the_last_message(is_own):
    tokenizer = make_tokenizer()
    rows: list[dict[str, Any]] = [{"prompt": BEGUN}, {"prompt": ASKED}]
    if is_own:
        rows = [{**row, "chat_template_kwargs": CONTINUE} for row in rows]
    begun, asked = tokenize_prompts(rows, tokenizer, chat_template_kwargs=None if is_own else CONTINUE)
    assert tokenizer.decode(begun).endswith("assistant\nit is")
    expected = tokenizer.apply_chat_template(BEGUN, tokenize=True, return_dict=True, **CONTINUE)
    assert list(begun) == expected["input_ids"]
    assert tokenizer.decode(asked).endswith("<|im_start|>assistant\n"), "there is nothing to continue"


def test_a_reward_model_reads_a_continued_message_as_one():
    tokenizer = make_tokenizer()
    reads = RewardModel(make_reward_model(), tokenizer, chat_template_kwargs=CONTINUE)
    whole = [*ASKED, {"role": "assistant", "content": "it is 2"}]
    assert reads._text(BEGUN, [{"role": "assistant", "content": " 2"}]) == tokenizer.apply_chat_template(
        whole, tokenize=False
    )


def in_options(tmp_path: Any, arguments: dict[str, Any]) -> None:
    make_config(tmp_path, chat_template_kwargs=arguments)


def in_a_row(tmp_path: Any, arguments: dict[str, Any]) -> None:
    tokenize_prompts([{"prompt": ASKED, "chat_template_kwargs": arguments}], make_tokenizer())


@pytest.mark.parametrize("place", [in_options, in_a_row])
@pytest.mark.parametrize("name", ["add_generation_prompt", "tools", "tokenize"])
def test_what_is_set_for_every_prompt_is_refused_by_name(tmp_path, place: Callable[..., None], name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs cannot set '{name}': .*Leave it out"):
        place(tmp_path, {name: True})


def test_turns_are_whole_messages(tmp_path):
    rows = Dataset.from_dict({"prompt": [BEGUN] * 4})
    with pytest.raises(ValueError, match="with tools, environments or an agent a turn is a whole message"):
        make_trainer(tmp_path, train_dataset=rows, tools=[add], chat_template_kwargs=CONTINUE)


@pytest.mark.parametrize(("options", "is_said"), [({}, True), ({"log_level": "error"}, False)])
def test_who_silences_transformers_still_reads_what_the_run_warns_of(tmp_path, capfd, options, is_said):
    rows, before = Dataset.from_dict({"prompt": [BEGUN] * 4}), transformers_logging.get_verbosity()
    handler = logging.StreamHandler()  # to stderr as it is now, as where nothing is configured
    logging.getLogger("colocate").addHandler(handler)
    transformers_logging.set_verbosity_error()  # as by TRANSFORMERS_VERBOSITY=error
    try:
        make_trainer(tmp_path, train_dataset=rows, **options)
    finally:
        transformers_logging.set_verbosity(before)
        logging.getLogger("colocate").removeHandler(handler)
        logging.getLogger("colocate").setLevel(logging.NOTSET)
    assert ("Prompts end with a message" in capfd.readouterr().err) == is_said
