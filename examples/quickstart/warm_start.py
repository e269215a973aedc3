"""Make a small language model that adds two numbers, badly: what `recipes/quickstart.yaml` trains with GRPO.

A Qwen3 of 0.2 million random parameters learns from demonstrations until it gets a third of new problems
right, and is stopped there. Writes OUTPUT_DIR/model, a Hugging Face directory, and OUTPUT_DIR/data, the
problems to train on and the held-out ones to evaluate on. Downloads nothing.
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
ENOUGH = 1 / 3  # accuracy to stop at: groups of eight hold right and wrong answers, so there is much to learn
NUM_CHECKED = 256
NUM_EVALUATED = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, a `<bos>` before every prompt."""
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


def encode(batch: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels [B, T], padded on the right; labels are -100 wherever there is nothing to imitate."""
    texts = [as_prompt(*problem) + demonstration(*problem) + tokenizer.eos_token for problem in batch]
    input_ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    labels = input_ids.masked_fill(input_ids == tokenizer.pad_token_id, -100)
    labels[:, : len(tokenizer(as_prompt(*batch[0]))["input_ids"])] = -100  # prompts are equally long
    return input_ids, labels


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, batch: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of problems that one sampled completion solves."""
    rows = [as_row(*problem) for problem in batch]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    generated = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=32)
    completions = tokenizer.batch_decode(generated[:, prompts.shape[1] :], skip_special_tokens=True)
    rewards = correct(completions, [row["answer"] for row in rows])
    return sum(rewards) / len(rewards)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Supervised training, stopped once the model is right on `ENOUGH` of the problems not demonstrated."""
    shuffled = rng.sample(pool := problems(held_out=False), len(pool))
    checked, demonstrated = shuffled[:NUM_CHECKED], shuffled[NUM_CHECKED:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, MAX_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / NUM_WARMUP_STEPS)
        input_ids, labels = encode(rng.sample(demonstrated, BATCH_SIZE), tokenizer)
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % STEPS_PER_CHECK == 0:
            right = accuracy(model, checked, tokenizer)
            print(f"step {step:3}  loss {loss.item():.3f}  right {right:4.0%}", flush=True)
            if right >= ENOUGH:
                return
    raise RuntimeError(f"After {MAX_STEPS} steps the model is right on {right:.0%}, not on {ENOUGH:.0%}.")


def write_data(directory: Path, rng: random.Random) -> None:
    """Write train.jsonl and test.jsonl: the names by which their splits are recognised."""
    directory.mkdir(parents=True, exist_ok=True)
    evaluated = rng.sample(problems(held_out=True), NUM_EVALUATED)
    for name, split in (("train", problems(held_out=False)), ("test", evaluated)):
        lines = [json.dumps(as_row(*problem)) + "\n" for problem in split]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
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
