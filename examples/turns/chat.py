"""A chat model small enough for two CPU cores, and how it learns to write calls by imitation."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

START, END, CALL, CALLED = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ["system\n", "user\n", "assistant\n", "tool\n"]
BATCH_SIZE, LEARNING_RATE = 64, 3e-3

Message = dict[str, Any]


def build_tokenizer(phrases: list[str]) -> PreTrainedTokenizerFast:
    """Each of `phrases` is one token, and each digit; a call then has about as many tokens as digits."""
    marks = [START, END, CALL, CALLED]
    vocabulary = ["<pad>", "<unk>", *marks, *ROLES, *phrases, *"0123456789", "\n"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary)}, unk_token="<unk>"))
    words = "|".join(escaped(word) for word in [*ROLES, *sorted(phrases, key=len, reverse=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token=END
    )
    wrapped.add_special_tokens({"additional_special_tokens": [START, CALL, CALLED]})
    wrapped.chat_template = TEMPLATE
    return wrapped


def escaped(word: str) -> str:
    return "".join(f"\\{c}" if c in r'{}[]()+*.?"\\' else c for c in word)


def build_model(tokenizer: PreTrainedTokenizerFast, **sizes: int) -> Qwen3ForCausalLM:
    """A Qwen3 of random parameters, 0.2 million of them but for what `sizes` says of its configuration."""
    smallest = dict(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **(smallest | sizes),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def called(name: str, **arguments: Any) -> Message:
    """The message of an assistant that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Callable[[random.Random], list[Message]],
    tools: list[Any],
    *,
    num_steps: int,
    rng: random.Random,
    learning_rate: float = LEARNING_RATE,
) -> list[float]:
    """Train on demonstrated conversations, on what the assistant says in them.

    Returns:
        The loss of each step, in nats per token.
    """
    losses: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 30, 1.0, 30)
    for step in range(1, num_steps + 1):
        texts = [
            tokenizer.apply_chat_template(demonstrate(rng), tools=tools, tokenize=False)
            for _ in range(BATCH_SIZE)
        ]
        ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        labels = said_by_the_assistant(ids, tokenizer)
        # On a GPU products in bfloat16 take a fraction of the time; the weights stay in float32.
        with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = model(ids.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"imitation: step {step}, loss {fmean(losses[-100:]):.3f}", flush=True)
    return losses


def said_by_the_assistant(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Labels [B, T] of token ids [B, T]: -100 but for the assistant's turns and their ends."""
    header, end = (tokenizer.convert_tokens_to_ids(token) for token in ("assistant\n", END))
    labels = torch.full_like(ids, -100)
    for row, tokens in enumerate(ids.tolist()):
        is_said = False
        for place, token in enumerate(tokens):
            if is_said:
                labels[row, place] = token
            is_said = (is_said and token != end) or token == header
    return labels
