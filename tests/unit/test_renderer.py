"""Tokens of later turns, against the chat templates themselves rendering the whole conversation."""

from __future__ import annotations

import json
import time
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl.chat_template_utils import supports_tool_calling

from chat_templates import (
    IM_END,
    STOPS,
    THINKS,
    TOOL,
    TURN,
    WITH_TOOLS,
    make_call,
    make_tokenizer,
    renderer_of,
    sampled,
)
from colocate.episodes.renderer import MAX_PARSED_CHARS, Renderer

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


def as_asked(name: str, message: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A message as templates ask for it: ids of calls in answers (Mistral), arguments as text (DeepSeek)."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": before["tool_calls"][0]["id"]}
    if name.startswith("deepseek") and "tool_calls" in message:
        function = message["tool_calls"][0]["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**message, "tool_calls": [{"function": {**function, "arguments": arguments}}]}
    return message


@pytest.mark.parametrize("name", STOPS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.share(2)
def test_turns_and_bridges_are_the_whole_conversation(name, data):
    """Sampled turns are written as the template writes them: then all tokens together are its own."""
    renderer, has_tools = renderer_of(name), name in WITH_TOOLS
    tools = [TOOL] if has_tools and data.draw(st.booleans()) else None
    messages = [data.draw(users)]
    ids = renderer.render(messages, tools)
    num_bridged = 0
    for _ in range(data.draw(st.integers(1, 4))):
        turn = data.draw(calls if tools and data.draw(st.booleans()) else answers)
        if "tool_calls" in turn:  # as some models write it
            turn["tool_calls"][0]["id"] = f"number{len(messages):03d}"
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
        [
            as_asked(name, message, before)
            for message, before in zip(messages, [{}, *messages[:-1]], strict=True)
        ],
        tools=tools,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )["input_ids"]
    if name not in THINKS:
        assert ids == expected
        # GPT-OSS ends an answer in another way once a message follows, and Mistral's last user has the tools.
        forks = name.startswith(("gptoss", "mistral")) and not any("tool_calls" in turn for turn in messages)
        assert num_bridged or forks
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


texts = words | st.sampled_from(["75001", "true", "null", "[1]", "1e3", "w\nw"])
arguments_of = st.fixed_dictionaries(
    {"a": st.integers(-9, 99), "b": texts},
    optional={
        "c": st.lists(st.integers(0, 9), max_size=2)
        | st.dictionaries(st.sampled_from("kl"), words, max_size=1),
        "d": st.booleans() | st.none(),
    },
)


def readable(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the template writes so that they can be told apart."""
    if name == "lfm2_2_5":  # it writes no escapes, and the lists of other templates' texts
        arguments = {**arguments, "b": arguments["b"].replace("'", "")}
    return {k: v.strip("\n") if isinstance(v, str) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=20)
@given(arguments=arguments_of, num_calls=st.integers(1, 2), data=st.data())
def test_calls_are_read_as_they_are_written(name, arguments, num_calls, data):
    renderer = renderer_of(name)
    message = make_call(readable(name, arguments))
    if not name.startswith(("llama", "gptoss")):  # a turn of theirs has one call
        message["tool_calls"] *= num_calls
    ids = sampled(renderer, message)
    found = renderer.parse(ids, tools=[TOOL])
    assert not (found.pop("reasoning_content", None) or "")
    if name in ("mistral", "mistral_call_id"):  # whose models write ids
        assert [call.pop("id") for call in found["tool_calls"]]
    assert found == message
    # A call cut short is no call, or the whole call where only its end is missing.
    part = renderer.parse(ids[: data.draw(st.integers(0, len(ids) - 1))], tools=[TOOL])
    for call in part.get("tool_calls", []):
        assert call["function"] == message["tool_calls"][0]["function"]


@pytest.mark.parametrize("name", STOPS)
@given(text=words, reasoning=st.none() | words)
def test_answers_are_read_as_they_are_written(name, text, reasoning):
    renderer = renderer_of(name)
    message = {"role": "assistant", "content": text}
    if reasoning is not None and renderer._has_reasoning and name != "gemma4_v3":  # only calls have it there
        message["reasoning_content"] = reasoning
    found = renderer.parse(sampled(renderer, message))
    assert found.pop("reasoning_content", "") == message.pop("reasoning_content", "")
    assert found == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**30) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["k", "", "x y"]), inner),
    max_leaves=3,
)
TANGLE = (
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '{"name": 3}', "null", "{"),
    *("<function=f>", "</function>", "<parameter=a>", "[TOOL_CALLS]", "[ARGS]", "</think>", "x\n"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>", "call:f{a:", '<|"|>', "}"),
    *("<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "[f(a=b'x', *c)]", "f({1}=", "-" * 3000),
    *("<|start|>assistant", " to=functions.f", "<|channel|>analysis", "<|message|>", "<|call|>", "<|end|>"),
    "[" * 2000,
)


@given(
    st.sampled_from(WITH_TOOLS),
    st.lists(st.sampled_from(list(TANGLE)), max_size=8),
    st.lists(st.integers(0, 699), max_size=20),
)
def test_whatever_is_written_is_a_message(name, parts, tokens):
    renderer = renderer_of(name)
    ids = [n for n in renderer._ids("".join(parts)) + tokens if n not in renderer.stop_token_ids]
    text = renderer._tokenizer.decode(ids)
    message = renderer.parse(ids, tools=[TOOL])
    assert message["role"] == "assistant" and isinstance(message["content"], str)
    json.dumps(message)
    for call in message.get("tool_calls", []):
        assert isinstance(call["function"]["name"], str) and isinstance(call["function"]["arguments"], dict)
    if "tool_calls" not in message and "reasoning_content" not in message and "<|message|>" not in text:
        assert message["content"] == text


@pytest.mark.parametrize("name", WITH_TOOLS)
@settings(max_examples=20)
@given(
    arguments=st.dictionaries(st.sampled_from(["a", "b", "x y", "é"]), json_values, max_size=3),
    num_calls=st.sampled_from([1, 2, 10]),
    cut=st.none() | st.tuples(st.integers(0, 400), st.integers(0, 12)),
    put=st.sampled_from(["", *'"{}[],<:\\é', "[CALL_ID]x", "null"]),
)
def test_a_damaged_call_costs_its_episode_at_most(name, arguments, num_calls, cut, put):
    """What is read of it can be answered, and rendered again."""
    renderer = renderer_of(name)
    message = make_call(arguments)
    if not name.startswith(("llama", "gptoss")):
        message["tool_calls"] *= num_calls
    text = renderer._tokenizer.decode(sampled(renderer, message))
    if cut is not None:
        text = text[: cut[0]] + put + text[cut[0] + cut[1] :]
    ids = renderer._ids(text)
    ends = [n + 1 for n, token in enumerate(ids) if token in renderer.stop_token_ids]
    ids = ids[: min(ends, default=len(ids))]
    found = renderer.parse(ids, tools=[TOOL])
    if "tool_calls" in found:
        asked = {"role": "user", "content": "u"}
        answers = [
            {"role": "tool", "name": call["function"]["name"], "content": "w"} for call in found["tool_calls"]
        ]
        if renderer.bridge([asked, found], answers, [TOOL], last_id=ids[-1]) is None:
            renderer.render([asked, found, *answers], [TOOL])
    elif "reasoning_content" not in found and "<|message|>" not in text:
        end = renderer._decoded(ids[-1]) if ids and ids[-1] in renderer.stop_token_ids else ""
        assert found["content"] == renderer._tokenizer.decode(ids).removesuffix(end)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "argu'),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("qwen2_5", '<tool_call>["f", {}]</tool_call>'),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>1</function></tool_call>"),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>1</parameter>1</function></tool_call>"),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>1</parameter></tool_call>"),
        ("glm4moe", "<tool_call>f<arg_key>a</arg_key>1</arg_value></tool_call>"),
        ("glm4moe", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("gemma4_v5", '<|tool_call>call:f{a:<|"|>w}<tool_call|>'),
        ("gemma4_v5", "<|tool_call>call:f[1]<tool_call|>"),
        ("lfm2_v2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>"),
        ("lfm2_v2", "<|tool_call_start|>[f(a=1), f(<|tool_call_end|>"),
        ("gptoss", " to=functions.f<|channel|>commentary json<|message|>[1]"),
        ("llama3_1", '{"name": "f", "parameters": "{}"}'),
        ("llama3_1", '{"name": "f", "parameters": {}} and more'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "x"}]'),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]null"),
        ("mistral_call_id", "[TOOL_CALLS]f[CALL_ID]x[ARGS]{}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>1<｜tool▁call▁end｜>"),
    ],
)
def test_a_call_that_is_none_is_content(name, text):
    assert renderer_of(name).parse(renderer_of(name)._ids(text), tools=[TOOL]) == {
        "role": "assistant",
        "content": text,
    }


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_text_around_calls_is_content(name):
    renderer = renderer_of(name)
    call = make_call({"a": 1})
    text = renderer._tokenizer.decode(sampled(renderer, call))
    text = min((text.removesuffix(stop) for stop in renderer._stops), key=len)
    before = renderer._reasoning_end if name in (*THINKS, "glm4moe") else ""
    written = f"{before}I multiply.\n{text.rpartition(before)[2] if before else text}"
    if name == "gptoss":
        written = f"<|channel|>commentary<|message|>I multiply.<|end|><|start|>assistant{text}"
    nothing_follows = name.startswith(("gptoss", "llama", "mistral"))
    found = renderer.parse(renderer._ids(written + ("" if nothing_follows else "\nWait.")), tools=[TOOL])
    assert found["content"] == "I multiply." + ("" if nothing_follows else "\nWait.")
    assert [made["function"] for made in found["tool_calls"]] == [call["tool_calls"][0]["function"]]


def test_marks_may_stand_in_values():
    values = {"a": 1, "b": "x<parameter=y>z</function><arg_key>w</arg_value>"}
    for name in ("qwen3_5_think", "glm4moe"):
        message = make_call(values)
        renderer = renderer_of(name)
        assert renderer.parse(sampled(renderer, message), tools=[TOOL])["tool_calls"] == message["tool_calls"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4_v5", "<|tool_call>call:f{" + " " * 3000 + "}<tool_call|>"),
        ("glm4moe", "<tool_call>f<arg_key>" + "</arg_key><arg_value>" * 3000 + "</tool_call>"),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>" + "</parameter> " * 3000 + "</tool_call>"),
    ],
    ids=["gemma", "glm", "xml"],
)
def test_the_same_over_and_over_is_read_in_no_time(name, text):
    """Models repeat themselves, and a pattern that goes back and forth takes minutes for this."""
    began_s = time.process_time()
    renderer_of(name).parse(renderer_of(name)._ids(text), tools=[TOOL])
    assert time.process_time() - began_s < 5


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


REFUSED = {"deepseekv3": "schemas", "lfm2": "calls of tools", "muse_glimmer": "cannot be read"}
"""Templates of TRL's that know tools, and what they lack."""


@pytest.mark.parametrize(
    "name", sorted(path.name.removesuffix(".jinja") for path in (files("trl") / "chat_templates").iterdir())
)
def test_every_template_of_trl_is_used_or_refused(name):
    if not name.endswith(("README.md", "_training")):
        stops = TURN if "gemma" in name else STOPS.get(name, IM_END)
        tokenizer = make_tokenizer(name, stops)
        renderer = Renderer(tokenizer, None, tokenizer.convert_tokens_to_ids(list(stops)))
        if supports_tool_calling(tokenizer) and name not in REFUSED:
            renderer.check_tools()
            message = make_call({"a": 1, "b": "w"})
            found = renderer.parse(sampled(renderer, message), tools=[TOOL])
            assert found["tool_calls"] == message["tool_calls"]
        else:
            with pytest.raises(ValueError, match=REFUSED.get(name, "does not carry")):
                renderer.check_tools()


def test_calls_of_deepseek_v3_are_read_where_its_template_tells_of_the_tools():
    tokenizer = make_tokenizer("deepseekv3", STOPS["deepseek_v31"])
    shown = "{{ ns.system_prompt }}{% if tools %}{{ tools | tojson }}{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ ns.system_prompt }}", shown)
    renderer = Renderer(tokenizer, None, [tokenizer.eos_token_id])
    renderer.check_tools()
    message = make_call({"a": 1, "b": "w\n```json\nw"})
    message["tool_calls"] *= 2
    ids = sampled(renderer, message)
    assert renderer.parse(ids) == message
    asked = {"role": "user", "content": "u"}
    answers = [{"role": "tool", "name": "multiply", "content": str(n)} for n in range(2)]
    history = renderer.render([asked, message, *answers], [TOOL])
    added = renderer.bridge([asked, message], answers, [TOOL], last_id=ids[-1])
    assert added == history[-len(added) :]
    assert history[: -len(added)][-len(ids) :] == ids


@pytest.mark.parametrize("name", [n for n in WITH_TOOLS if not n.startswith(("llama", "gptoss"))])
def test_answers_belong_to_calls_in_their_order(name):
    """Neither calls nor answers have ids; Gemma's template needs them to name the tools that answer."""
    renderer = renderer_of(name)
    asked = {"role": "user", "content": "u"}
    turn = {"role": "assistant", "content": "", "tool_calls": []}
    for function in ("left", "right"):
        turn["tool_calls"] += [{"type": "function", "function": {"name": function, "arguments": {"x": "w"}}}]
    answers = [{"role": "tool", "name": f, "content": f"of {f}"} for f in ("left", "right")]
    ids = sampled(renderer, turn)
    added = renderer.bridge([asked, turn], answers, [TOOL], last_id=ids[-1])
    numbers = [f"call{n:05d}" for n in range(2)]
    with_ids = [{**call, "id": n} for call, n in zip(turn["tool_calls"], numbers, strict=True)]
    if name.startswith("deepseek"):
        for call in with_ids:
            call["function"] = {**call["function"], "arguments": '{"x": "w"}'}
    whole = [asked, {**turn, "tool_calls": with_ids}]
    whole += [{**answer, "tool_call_id": n} for answer, n in zip(answers, numbers, strict=True)]
    expected = renderer._tokenizer.apply_chat_template(whole, add_generation_prompt=True, return_dict=True)
    if name in THINKS:
        ids = []
    assert expected["input_ids"][-len(ids) - len(added) :] == ids + added
    if name.startswith("gemma"):
        text = renderer._tokenizer.decode(added)
        assert text.index("response:left") < text.index("of left") < text.index("response:right")


def test_what_gpt_oss_writes_beside_its_template():
    """The recipient behind the channel, a constraint, a preamble, and more than one reasoning."""
    renderer = renderer_of("gptoss")
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>analysis<|message|>not<|end|>"
    )
    text += (
        "<|start|>assistant<|channel|>commentary<|message|>I multiply.<|end|><|start|>assistant<|channel|>"
    )
    text += 'commentary to=functions.multiply <|constrain|>json<|message|>{"a": 1}<|call|>'
    message = {**make_call({"a": 1}), "content": "I multiply.", "reasoning_content": "why\nnot"}
    assert renderer.parse(renderer._ids(text)) == message


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen2_5", "gptoss", "lfm2_v2"])
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


WRITE_JSON = ("llama3_1", "llama3_2", "gptoss", "lfm2_v2")


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
    shown = json.dumps(result) if name in WRITE_JSON else str(result)
    assert shown in renderer._tokenizer.decode(read)
    assert answer["content"] is result  # reward functions look at the list


def test_blocks_of_content_are_the_templates():
    blocks = [{"type": "text", "text": "twelve"}, {"type": "text", "text": " eggs"}]
    asked = {"role": "user", "content": "u"}
    text = renderer_of("qwen3_5_think")._text(
        [asked, {"role": "tool", "content": blocks}], add_generation_prompt=False
    )
    assert "twelve eggs" in text
