"""A conversation with `colocate serve` on a CPU, whose turns find what earlier ones have left in the engine's
cache, and one whose turns find nothing: writes `results/conversation-cpu.json`.

    python -m benchmarks.serving.conversation [--rounds 5]

Both have prompts of the same lengths and go by HTTP to one server, turn by turn, in turns with each other.
Those of the second begin with another first token each time, so that they are read from there on.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.random_model import make_tokenizer
from benchmarks.common.results import ROOT, Record, committed, machine, write_result

MODEL = "random"
SHAPE: dict[str, Any] = dict(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, tie_word_embeddings=True, vocab_size=8192,
)  # fmt: skip
NUM_TURNS, FIRST_TOKENS, GIVEN_TOKENS, DRAWN_TOKENS = 6, 256, 64, 32
"""Turns; tokens of the first prompt, and of those added in each later turn; tokens drawn in each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="conversations of each kind that count")
    options = parser.parse_args()
    commit = committed()
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        with served(Path(directory)) as client:
            rows = measured(client, options.rounds)
    claims = claims_of(rows)
    setup = dict(
        shape=SHAPE, dtype="float32", num_turns=NUM_TURNS, first_tokens=FIRST_TOKENS,
        given_tokens=GIVEN_TOKENS, drawn_tokens=DRAWN_TOKENS, machine=machine(),
    )  # fmt: skip
    print(claims)
    print(write_result("conversation", "cpu", claims, rows, commit, **setup))


def make_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    make_tokenizer(config.vocab_size).save_pretrained(directory)


@contextmanager
def served(directory: Path) -> Iterator[OpenAI]:
    """A client of `colocate serve`."""
    words = ["--served_model_name", MODEL, "--use_cpu", "--dtype", "float32", "--port", "0"]
    command = [sys.executable, "-m", "colocate", "serve", directory, *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "is ready at" in line)
        yield OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0, timeout=600.0)
    finally:
        server.terminate()
        server.wait()


def measured(client: OpenAI, num_rounds: int) -> list[Record]:
    """A row for each turn of each conversation. The first round warms the server up, and does not count."""
    numbers, rows = itertools.count(10), []
    for number in range(num_rounds + 1):
        for finds in (True, False):
            turns = converse(client, numbers, finds=finds)
            rows += [{"round": number, "finds": finds, **turn} for turn in turns if number]
    return rows


def converse(client: OpenAI, first_tokens: Iterator[int], *, finds: bool) -> list[Record]:
    """The turns of a conversation.

    Args:
        first_tokens: tokens with which no prompt has begun yet.
        finds: whether all turns begin alike.
    """
    rng = random.Random(0)

    def given(count: int) -> list[int]:
        return [rng.randrange(10, SHAPE["vocab_size"]) for _ in range(count)]

    context, turns = given(FIRST_TOKENS), []
    for turn in range(NUM_TURNS):
        if turn == 0 or not finds:
            context[0] = next(first_tokens)
        record, drawn = complete(client, context)
        turns.append({"turn": turn, **record})
        context += drawn + given(GIVEN_TOKENS)
    return turns


def complete(client: OpenAI, prompt: Sequence[int]) -> tuple[Record, list[int]]:
    """How many tokens of a prompt were found, the seconds until the first token came, and the tokens."""
    begin_s, first_s, drawn, usage = time.perf_counter(), None, [], None
    chunks = client.completions.create(
        model=MODEL, prompt=list(prompt), max_tokens=DRAWN_TOKENS, seed=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
    )  # fmt: skip
    for chunk in chunks:
        usage = chunk.usage or usage
        token_ids = [i for choice in chunk.choices for i in getattr(choice, "token_ids", None) or []]
        if token_ids and first_s is None:
            first_s = time.perf_counter() - begin_s
        drawn += token_ids
    assert usage is not None and usage.prompt_tokens == len(prompt), "the server counts other tokens"
    num_cached = usage.prompt_tokens_details.cached_tokens
    return {"prompt_tokens": len(prompt), "cached_tokens": num_cached, "first_token_s": first_s}, drawn


def claims_of(rows: Sequence[Record]) -> dict[str, float]:
    """The tokens that a conversation of each kind reads in all its turns, the median of the seconds until the
    first token of its last turn comes, and both as ratios."""
    claims: dict[str, float] = {}
    for name, finds in (("found", True), ("anew", False)):
        own = [row for row in rows if row["finds"] == finds]
        num_read = sum(row["prompt_tokens"] - row["cached_tokens"] for row in own)
        claims[f"tokens_read_{name}"] = num_read / len({row["round"] for row in own})
        last = [row["first_token_s"] for row in own if row["turn"] == NUM_TURNS - 1]
        claims[f"last_first_token_s_{name}"] = statistics.median(last)
    claims["tokens_read_ratio"] = claims["tokens_read_anew"] / claims["tokens_read_found"]
    claims["last_first_token_ratio"] = claims["last_first_token_s_anew"] / claims["last_first_token_s_found"]
    return claims


if __name__ == "__main__":
    main()
