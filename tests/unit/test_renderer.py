"""Tokens of later turns, against the chat templates themselves rendering the whole conversation."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from colocate.episodes.renderer import Renderer
from colocate.episodes.tool_syntax import MAX_PARSED_CHARS

STOPS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "llama3": "<|eot_id|>",
}
WITH_TOOLS = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "llama3_1", "llama3_2")
SPECIAL = ["<pad>", "<bos>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += [
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges, so that tokens could join over the ends of turns."""
    tokenizer = Tokenizer(BPE())
    # Line ends are tokens of their own, as in the tokenizers of Qwen and Llama.
    lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|[^\r\n]+"), "isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    texts = [
        "the user said\n\nassistant multiply 12 by 7 \n tool_call name arguments parameters",
        "a\n\n\nb {}\"'",
    ]
    tokenizer.train_from_iterator(texts * 5, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=STOPS[name], pad_token="<pad>"
    )
    wrapped.chat_template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    return wrapped


RENDERERS: dict[str, Renderer] = {}


def renderer_of(name: str) -> Renderer:
    if name not in RENDERERS:
        tokenizer = make_tokenizer(name)
        RENDERERS[name] = Renderer(tokenizer, None, (tokenizer.eos_token_id,))
    return RENDERERS[name]


def sampled(renderer: Renderer, message: dict[str, Any]) -> list[int]:
    """What the model would sample to be rendered as `message`: the text between the generation prompt and the
    stop token, which it samples too."""
    dummy = {"role": "user", "content": "u"}
    whole = renderer._text([dummy, message], None, add_generation_prompt=False)
    opened = renderer._text([dummy], None, add_generation_prompt=True)
    stop = renderer._tokenizer.eos_token
    if not whole.startswith(
        opened
    ):  # the template opens the reasoning only in the generation prompt, or never
        opened = opened.removesuffix("<think>\n")
    assert whole.startswith(opened)
    text = whole[len(opened) :]
    return renderer._ids(text[: text.index(stop) + len(stop)])


words = st.text(st.sampled_from("ab 12\n.é漢{}\"'"), min_size=1, max_size=12).map(
    lambda text: "w" + text + "w"
)
users = words.map(lambda text: {"role": "user", "content": text})
answers = words.map(lambda text: {"role": "assistant", "content": text})
calls = st.tuples(st.integers(-5, 99), words).map(
    lambda pair: {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "multiply", "arguments": {"a": pair[0], "b": pair[1]}}}
        ],
    }
)
results = words.map(lambda text: {"role": "tool", "name": "multiply", "content": text})
systems = words.map(lambda text: {"role": "system", "content": text})


def history_ids(renderer: Renderer, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    return renderer.render(messages, tools, add_generation_prompt=True)


@pytest.mark.parametrize("name", STOPS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_turns_and_bridges_are_the_whole_conversation(name, data):
    """Sampled turns are written as the template writes them: then all tokens together are its own."""
    renderer, has_tools = renderer_of(name), name in WITH_TOOLS
    tools = [TOOL] if has_tools and data.draw(st.booleans()) else None
    messages = [data.draw(users)]
    ids = renderer.render(messages, tools)
    num_bridged = 0
    for _ in range(data.draw(st.integers(1, 4))):
        turn = data.draw(calls if tools and data.draw(st.booleans()) else answers)
        new = [data.draw(results if "tool_calls" in turn else users)]
        written = sampled(renderer, turn)
        added = renderer.bridge([*messages, turn], new, tools, last_id=written[-1])
        messages += [turn, *new]
        if added is None:
            ids = renderer.render(messages, tools)
            continue
        num_bridged += 1
        ids += written + added
    expected = renderer._tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    if name not in ("qwen3", "qwen3_5_think"):  # these write an empty reasoning into the last turn alone
        assert ids == expected
        assert num_bridged
    tail = ids[-len(added) :] if added is not None else ids
    assert tail == expected[-len(tail) :]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_a_stripped_reasoning_forks_and_one_that_stays_does_not(name):
    renderer = renderer_of(name)
    opening = [{"role": "user", "content": "u"}]
    answer = {"role": "assistant", "content": "a", "reasoning_content": "because"}
    call = {"role": "assistant", "content": "", "reasoning_content": "because"}
    call["tool_calls"] = [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 1}}}]
    assert renderer.bridge([*opening, answer], [{"role": "user", "content": "v"}], [TOOL]) is None
    result = {"role": "tool", "name": "multiply", "content": "3"}
    added = renderer.bridge([*opening, call], [result], [TOOL])
    assert added is not None
    text = renderer._tokenizer.decode(added)
    assert text.startswith("\n") and "because" not in text and "<|im_end|>\n<|im_start|>assistant" in text
    whole = renderer.render([*opening, call, result], [TOOL])
    assert whole[-len(added) :] == added


@pytest.mark.parametrize("name", WITH_TOOLS)
@given(number=st.integers(-9, 99), text=words)
def test_calls_are_read_as_they_are_written(name, number, text):
    renderer = renderer_of(name)
    arguments = {"a": number, "b": text.strip("\n")}
    call = {"type": "function", "function": {"name": "multiply", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = renderer.parse(sampled(renderer, message))
    found.pop("reasoning_content", None)
    assert found == message


TANGLE = (
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '{"name": 3}', "null", "{"),
    *("<function=f>", "</function>", "<parameter=a>", "[TOOL_CALLS]", "[ARGS]", "</think>", "x\n"),
    "[" * 2000,
)


@given(
    st.sampled_from(WITH_TOOLS),
    st.lists(
        st.sampled_from(list(TANGLE)),
        max_size=6,
    ),
)
def test_whatever_is_written_is_a_message(name, parts):
    renderer = renderer_of(name)
    text = "".join(parts)
    message = renderer.parse(renderer._ids(text))
    assert message["role"] == "assistant" and isinstance(message["content"], str)
    json.dumps(message)
    for call in message.get("tool_calls", []):
        assert isinstance(call["function"]["name"], str) and isinstance(call["function"]["arguments"], dict)
    if "tool_calls" not in message and "reasoning_content" not in message:
        assert message["content"] == text


def test_a_text_of_megabytes_is_content():
    renderer = renderer_of("qwen3")
    text = "<tool_call>" * (MAX_PARSED_CHARS // 11 + 1)
    assert renderer.parse(renderer._ids(text))["content"] == text


@pytest.mark.parametrize("name", STOPS)
def test_a_template_that_cannot_carry_tools_is_refused_and_says_which_can(name):
    if name in WITH_TOOLS:
        renderer_of(name).check_tools()
    else:
        with pytest.raises(ValueError, match=r"does not carry the tools' schemas.*Qwen 2.5, 3"):
            renderer_of(name).check_tools()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen2_5"])
def test_what_follows_a_call_is_what_trl_puts_there(name):
    from trl import GRPOTrainer

    renderer = renderer_of(name)
    trainer: Any = object.__new__(GRPOTrainer)
    trainer.processing_class = trainer._tokenizer = renderer._tokenizer
    trainer.chat_template = (files("trl") / "chat_templates" / f"{name}_training.jinja").read_text()
    trainer.chat_template_kwargs, trainer._is_vlm = {}, False
    answers = [{"role": "tool", "name": "multiply", "content": str(n)} for n in range(3)]
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {}}}],
    }
    messages = [{"role": "user", "content": "u"}, turn]
    assert renderer.bridge(messages, answers, [TOOL]) == trainer._get_tool_suffix_ids(answers)


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("result", [[("P53", 3)], [], ["a", {"b": 1}]], ids=["rows", "none", "mixed"])
def test_a_list_that_a_tool_returns_is_read_as_text(name, result):
    renderer = renderer_of(name)
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {}}}],
    }
    messages = [{"role": "user", "content": "u"}, turn]
    answer = {"role": "tool", "name": "multiply", "content": result}
    read = renderer.bridge(messages, [answer], [TOOL])
    assert read is not None
    shown = json.dumps(result) if name.startswith("llama") else str(result)  # these templates write JSON
    assert shown in renderer._tokenizer.decode(read)
    assert answer["content"] is result  # reward functions look at the list


def test_blocks_of_content_are_the_templates():
    blocks = [{"type": "text", "text": "twelve"}, {"type": "text", "text": " eggs"}]
    asked = {"role": "user", "content": "u"}
    text = renderer_of("qwen3_5_think")._text(
        [asked, {"role": "tool", "content": blocks}], add_generation_prompt=False
    )
    assert "twelve eggs" in text
