"""Write a model of random weights in bf16, in the shape of a Qwen2.5, and a word-level tokenizer.

    python -m benchmarks.common.random_model 1.5b DIRECTORY

Speed and memory do not depend on the values.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.rollout.cases import SHAPES

# Special tokens are found anywhere in a text, so none of them may be the beginning of a word.
SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with four special tokens and the words `w4`, `w5`, …, whose ids are these numbers."""
    words = {f"w{i}" if i >= len(SPECIAL) else SPECIAL[i]: i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def config_of(size: str) -> Qwen2Config:
    """The configuration of a Qwen2.5 of this size."""
    return Qwen2Config(
        **SHAPES[size],
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="bfloat16",
    )


def make_model(size: str, directory: Path) -> None:
    config = config_of(size)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    # The padding's embedding is made 0, and a norm multiplies the gradient of a 0 by a thousand, layer after
    # layer: where such a token is sampled, no gradient is finite.
    with torch.no_grad():
        model.model.embed_tokens.weight[config.pad_token_id].normal_(std=config.initializer_range)
    # Under another name until it is whole: a model cut short by a time limit must not be taken for one.
    partial = directory.with_name(directory.name + ".partial")
    model.save_pretrained(partial)
    make_tokenizer(config.vocab_size).save_pretrained(partial)
    partial.rename(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    make_model(**vars(parser.parse_args()))
