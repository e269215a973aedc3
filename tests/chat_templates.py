"""The chat templates that TRL brings, and three more, on a small tokenizer with their special tokens."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from colocate.episodes.renderer import Renderer

IM_END, EOT, TURN = ("<|im_end|>",), ("<|eot_id|>",), ("<turn|>", "<|tool_response>")
STOPS = {
    "qwen2_5": IM_END,
    "qwen3": IM_END,
    "qwen3_instruct_2507": IM_END,
    "qwen3_5_think": IM_END,
    "llama3_1": EOT,
    "llama3_2": EOT,
    "glm4moe": ("<|user|>", "<|observation|>"),  # what begins the next message ends a turn
    "gptoss": ("<|return|>", "<|call|>"),
    "gemma4_v3": TURN,
    "gemma4_v5": TURN,
    "lfm2_v2": IM_END,
    "lfm2_2_5": IM_END,
    "nemotron_3_nano": IM_END,
    "mistral": ("</s>",),
    "mistral_args": ("</s>",),
    "mistral_call_id": ("</s>",),
    "deepseek_v31": ("<｜end▁of▁sentence｜>",),
    "gemma3": ("<end_of_turn>",),
    "llama3": EOT,
}
"""The tokens that end a turn, by TRL's names of chat templates or those of `OWN`."""
WITH_TOOLS = tuple(name for name in STOPS if name not in ("gemma3", "llama3"))
THINKS = ("qwen3", "qwen3_5_think", "nemotron_3_nano")
"""These write an empty reasoning into turns, which the model does not always sample."""
SPECIAL = ["<pad>", "<bos>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"]
SPECIAL += ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|assistant|>", "<|system|>"]
SPECIAL += ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|turn>", "<tool_response|>", '<|"|>']
SPECIAL += ["<|tool_call>", "<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>"]
SPECIAL += ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
SPECIAL += ["<｜Assistant｜>", "<｜User｜>", "<｜tool▁sep｜>"]
SPECIAL += [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "call▁end", "calls▁end")]
SPECIAL += sorted({stop for stops in STOPS.values() for stop in stops})

_MISTRAL = """{{ bos_token }}{% set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and message == users[-1] %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}CALLS
    {%- elif message.role == "assistant" %}{{ message.content + "</s>" }}
    {%- else %}ANSWER
    {%- endif %}
{%- endfor %}"""
_NUMBERED = """[TOOL_CALLS] [
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ "" if loop.last else ", " }}
        {%- endfor %}]</s>"""
_ANSWERS = """{{ '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}"""
_NAMED = """{% for call in message.tool_calls %}
            {{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}
        {%- endfor %}</s>"""
_CHECKED = """[CALL_ID]" + call.id }}
            {%- if call.id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
            {{- "[ARGS]"""
_DEEPSEEK = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}{{ "<｜User｜>" + message.content }}
    {%- elif message.role == "tool" %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
    {%- elif message.role == "assistant" %}
        {%- if messages[loop.index0 - 1].role == "user" %}<｜Assistant｜></think>{% endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "<｜tool▁calls▁begin｜>" if loop.first }}{{ "<｜tool▁call▁begin｜>" + call.function.name }}
            {{- "<｜tool▁sep｜>" + call.function.arguments + "<｜tool▁call▁end｜>" }}
            {{- "<｜tool▁calls▁end｜>" if loop.last }}
        {%- endfor %}<｜end▁of▁sentence｜>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == "user" %}<｜Assistant｜></think>{% endif %}"""
OWN = {
    "mistral": _MISTRAL.replace("CALLS", _NUMBERED, 1).replace("ANSWER", _ANSWERS, 1),
    "mistral_args": _MISTRAL.replace("CALLS", _NAMED, 1).replace(
        "ANSWER", "{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}", 1
    ),
    "mistral_call_id": _MISTRAL.replace("CALLS", _NAMED.replace("[ARGS]", _CHECKED, 1), 1).replace(
        "ANSWER",
        "[TOOL_RESULTS]{{ message.tool_call_id + '[TOOL_CONTENT]' + message.content }}[/TOOL_RESULTS]",
        1,
    ),
    "deepseek_v31": _DEEPSEEK,
}
"""What the templates of Mistral Nemo and Small 3.1, Ministral 3 and Devstral, Mistral Small 3.2, and DeepSeek
V3.1 do with turns and calls."""

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string"},
                "c": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "object"}]},
                "d": {"type": "boolean", "nullable": True},
            },
        },
    },
}


def make_tokenizer(name: str, stops: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
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
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=(stops or STOPS[name])[0], pad_token="<pad>"
    )
    wrapped.chat_template = template_of(name)
    return wrapped


def template_of(name: str) -> str:
    if name in OWN:
        return OWN[name]
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


RENDERERS: dict[str, Renderer] = {}


def renderer_of(name: str) -> Renderer:
    if name not in RENDERERS:
        tokenizer = make_tokenizer(name)
        RENDERERS[name] = Renderer(tokenizer, None, tokenizer.convert_tokens_to_ids(list(STOPS[name])))
    return RENDERERS[name]


def sampled(renderer: Renderer, message: dict[str, Any]) -> list[int]:
    """What the model would sample to be rendered as `message`: the text between the generation prompt and the
    stop token, which it samples too."""
    dummy = {"role": "user", "content": "u"}
    whole = renderer._text([dummy, message], None, add_generation_prompt=False)
    opened = renderer._text([dummy], None, add_generation_prompt=True)
    if not whole.startswith(
        opened
    ):  # the template opens the reasoning only in the generation prompt, or never
        opened = opened.removesuffix("<think>\n")
    assert whole.startswith(opened)
    text = whole[len(opened) :]
    stops = [renderer._decoded(stop) for stop in renderer.stop_token_ids]
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        text += stops[-1 if "tool_calls" in message else 0]
    return renderer._ids(text[: min(ends, default=len(text))])


def make_call(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "multiply", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
