"""How far rollouts of a real model are from its trainer, at each precision; on a GPU where there is one.

    python -m benchmarks.precision.real MODEL_DIR QUESTIONS.jsonl [--hardware h100]

The engine answers questions (rows with `question`, as GSM8K has) at temperature 1, beyond stop tokens, so
that all completions are equally long. A log-ratio is a token's log-prob by one forward of the model, less the
engine's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.results import committed, origin, write_result
from benchmarks.precision.cases import PRECISIONS
from benchmarks.precision.log_ratios import log_ratios, statistics_of
from colocate.types import Prompt


def compute_claims(precisions: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Figures of a token's log-ratio, and the deviation of its sum over a sequence, by precision."""
    claims = {}
    for precision, figures in precisions.items():
        for name in ("mean_abs", "sd", "max_abs"):
            claims[f"log_ratio_{name}_{precision}"] = figures[name]
        for length, sums in figures["sums"].items():
            claims[f"log_ratio_sum_sd_{precision}_{length}"] = sums["sd"]
            claims[f"effective_share_{precision}_{length}"] = sums["effective_share"]
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--sequences", type=int, default=8, help="questions that are answered")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each completion")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--hardware", default="cpu")
    options = parser.parse_args()
    commit = committed()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model = model.eval().to(device)
    rows = [json.loads(line) for line in options.questions.read_text().splitlines()[: options.sequences]]
    prompts = []
    for key, row in enumerate(rows):
        chat = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(tuple(tokenizer(text)["input_ids"]), key, range(1)))
    lengths = sorted({min(256, options.tokens), options.tokens})
    record: dict[str, Any] = {**origin(), "precisions": {}}
    for precision in options.precisions:
        ratios = log_ratios(model, prompts, precision, options.tokens)
        record["precisions"][precision] = statistics_of(ratios, lengths)
        print(precision, json.dumps(record["precisions"][precision]), flush=True)
    setup = dict(
        model=options.model.name, questions=options.questions.name, sequences=len(rows),
        tokens=options.tokens, dtype=options.dtype,
    )  # fmt: skip
    claims = compute_claims(record["precisions"])
    print(write_result("real-precision", options.hardware, claims, [record], commit, **setup))


if __name__ == "__main__":
    main()
