"""A chat template without tools, wrapped: what carries tools is read back, and all else is as before."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils

from colocate.episodes.renderer import Renderer
from colocate.episodes.tool_template import add_tool_template
from tool_chat import MARKS, call, make_chat_tokenizer, user

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": "\n"}}} for a in (1, 2)]
ANSWERS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "four"}]
TEMPLATES = ("gemma", "gemma3", "llama3", "phi3", "cohere", "deepseek_r1_distill")


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    tokenizer = make_chat_tokenizer(getattr(chat_template_utils, f"{name}_chat_template"))
    tokenizer.bos_token = MARKS[0]
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_schemas_calls_and_answers_are_shown_and_calls_are_read(name):
    tokenizer = make_tokenizer(name)
    with pytest.raises(ValueError, match="chat template"):
        Renderer(tokenizer).check_tools()
    assert add_tool_template(tokenizer) is tokenizer
    renderer = Renderer(tokenizer)
    renderer.check_tools()
    turn = {"role": "assistant", "content": "So:", "tool_calls": CALLS}
    conversation = [*user("Add."), turn, *ANSWERS]
    text = tokenizer.decode(renderer.render(conversation, [SCHEMA]))
    assert json.dumps(SCHEMA) in text
    for answer in ANSWERS:
        assert text.count(f"<tool_response>\n{answer['content']}\n</tool_response>") == 1
    written = [json.loads(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>\n")[2:]]
    assert written == [one["function"] for one in CALLS]
    sampled = tokenizer(call("add", a=7), add_special_tokens=False)["input_ids"]
    (read,) = renderer.parse(sampled, (), [SCHEMA])["tool_calls"]
    assert read["function"] == {"name": "add", "arguments": {"a": 7}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_without_tools_is_as_before(name):
    own, wrapped = make_tokenizer(name), add_tool_template(make_tokenizer(name))
    conversation = [*user("Hi"), {"role": "assistant", "content": "Hello"}, *user("Bye")]
    for messages in (conversation[:1], conversation):
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for tokenizer in (own, wrapped)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_system_message_keeps_its_text(name):
    tokenizer = add_tool_template(make_tokenizer(name))
    messages = [{"role": "system", "content": "Be short."}, *user("Add.")]
    text = tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)
    assert text.index("Be short.") < text.index("Add.") and text.count("<tools>") == 1


def test_templates_that_need_no_other_or_are_none_are_refused():
    with pytest.raises(ValueError, match="carries tools already"):
        add_tool_template(make_chat_tokenizer(chat_template_utils.qwen3_chat_template))
    tokenizer = make_tokenizer("gemma")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match="does not carry"):
        add_tool_template(tokenizer)
    assert tokenizer.chat_template == "{{ raise_exception('no') }}"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        add_tool_template(tokenizer)
