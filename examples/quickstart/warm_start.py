"""Make a small language model that adds two numbers badly, for `recipes/quickstart.yaml` to train with GRPO.

A Qwen3 of 0.2 million random parameters imitates a careless demonstrator until it gets a third of new
problems right. More imitation could at best make it as good as the demonstrator, who gets 64 % right; reward
for right answers takes it further. Nothing is downloaded. Writes

    OUTPUT_DIR/model   model and tokenizer, as Hugging Face writes them
    OUTPUT_DIR/data    train.jsonl, the problems to train on, and test.jsonl, held-out ones
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from addition import as_prompt, as_row, correct, demonstration, problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Problem = tuple[int, int]

BATCH_SIZE = 128
LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 30
MAX_STEPS = 600
STEPS_PER_CHECK = 10
NUM_CHECKED = 256
ENOUGH = 0.33  # then most groups of completions hold right and wrong ones, which is what GRPO learns from
NUM_EVALUATED = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and `<bos>` before every text."""
    vocabulary = ["<pad>", "<bos>", "<eos>", *"0123456789+=,;"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def encode(
    batch: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [B, T], padded on the right; a label is -100 where nothing is imitated."""
    texts = [as_prompt(*problem) + demonstration(*problem, rng) + tokenizer.eos_token for problem in batch]
    input_ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    labels = input_ids.masked_fill(input_ids == tokenizer.pad_token_id, -100)
    labels[:, : len(tokenizer(as_prompt(*batch[0]))["input_ids"])] = -100  # prompts are equally long
    return input_ids, labels


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, batch: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of the problems that one sampled completion each solves."""
    rows = [as_row(*problem) for problem in batch]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    generated = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=32)
    completions = tokenizer.batch_decode(generated[:, prompts.shape[1] :], skip_special_tokens=True)
    rewards = correct(completions, [row["answer"] for row in rows])
    return sum(rewards) / len(rewards)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Imitate demonstrations until the model solves `ENOUGH` of other problems, none of them held out."""
    pool = problems(held_out=False)
    rng.shuffle(pool)
    checked, demonstrated = pool[:NUM_CHECKED], pool[NUM_CHECKED:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / NUM_WARMUP_STEPS, 1.0, NUM_WARMUP_STEPS)
    for step in range(1, MAX_STEPS + 1):
        input_ids, labels = encode(rng.sample(demonstrated, BATCH_SIZE), tokenizer, rng)
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % STEPS_PER_CHECK == 0:
            solved = accuracy(model, checked, tokenizer)
            print(f"warm start: step {step}, loss {loss.item():.3f}, {solved:.0%} right", flush=True)
            if solved >= ENOUGH:
                return
    raise RuntimeError(
        f"After {MAX_STEPS} steps the model solves {solved:.0%} of the problems, not {ENOUGH:.0%}."
    )


def write_data(directory: Path, rng: random.Random) -> None:
    """Write train.jsonl and test.jsonl, which `colocate.data.loading` takes for the splits of these names."""
    directory.mkdir(parents=True, exist_ok=True)
    evaluated = rng.sample(problems(held_out=True), NUM_EVALUATED)
    for name, split in (("train", problems(held_out=False)), ("test", evaluated)):
        lines = [json.dumps(as_row(*problem)) + "\n" for problem in split]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, rng)
    model.save_pretrained(arguments.output_dir / "model")
    tokenizer.save_pretrained(arguments.output_dir / "model")
    write_data(arguments.output_dir / "data", rng)


if __name__ == "__main__":
    main()
