"""A model that is trained in a minute, on a language whose long texts need what was said far before.

A document has a table of its own: which of 4 tokens follow each of its 64 tokens, and how often. Half of
the time the next token comes from it, otherwise from a table that all documents share. So the document's own
table has to be read from the context.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 512
NUM_OWN_TOKENS = 64
NUM_SUCCESSORS = 4
SHAPES = {
    "cuda": dict(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=16384,
    ),
    "cpu": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024,
    ),
}  # fmt: skip
LEARNING_RATE = 1e-3


def documents(count: int, length: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """[count, length] token ids."""
    options = dict(device=device, generator=generator)
    fixed = torch.Generator(device=device).manual_seed(1)
    shared = torch.randint(VOCAB_SIZE, (VOCAB_SIZE, NUM_SUCCESSORS), device=device, generator=fixed)
    words = torch.rand(count, VOCAB_SIZE, **options).argsort(1)[:, :NUM_OWN_TOKENS]
    own = torch.randint(NUM_OWN_TOKENS, (count, VOCAB_SIZE, NUM_SUCCESSORS), **options)
    own = words.gather(1, own.flatten(1)).view(own.shape)
    rows, token = torch.arange(count, device=device), words[:, 0]
    # The first of the successors comes half of the time, the second a quarter of it, …
    halvings = torch.rand(length, count, **options).clamp(min=2.0**-20).log2().neg()
    which = halvings.long().clamp(max=NUM_SUCCESSORS - 1)
    from_own = torch.rand(length, count, **options) < 0.5
    tokens = []
    for choice, is_own in zip(which, from_own, strict=True):
        token = torch.where(is_own, own[rows, token, choice], shared[token, choice])
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def trained_model(
    device: torch.device, seconds: float, length: int, batch: int
) -> tuple[Any, dict[str, Any]]:
    """A model in bf16, trained in float32 for so many seconds, and how its loss fell."""
    config = Qwen2Config(
        **SHAPES[device.type], vocab_size=VOCAB_SIZE, rope_theta=1e6, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator, losses = torch.Generator(device=device).manual_seed(2), []
    pool = documents(8 * batch, length, device, generator)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        if len(losses) % 8 == 0:
            pool = documents(8 * batch, length, device, generator)
        tokens = pool[len(losses) % 8 :: 8]
        share = min(1.0, (time.perf_counter() - start_s) / seconds)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (len(losses) + 1) / 50) * (1 - 0.9 * share)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    return model.to(torch.bfloat16).eval(), {
        "num_steps": len(values),
        "first_loss": values[0],
        "last_loss": sum(values[-10:]) / len(values[-10:]),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": batch * length,
    }
