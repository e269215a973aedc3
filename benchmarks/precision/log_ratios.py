"""How far rollouts in 8 bits are from the trainer's policy, on a model that is trained first.

    python -m benchmarks.precision.log_ratios --out record.json

For each precision the engine draws long completions at temperature 1; the log-ratio of a token is the
trainer's log-prob, by one forward of the model in bf16, less the engine's. Of the log-ratios of whole
sequences come the weights exp(sum), and the share of the samples that counts under them, (sum of weights)² /
(number · sum of squares). Then what each way of choosing scales would do to this model's numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.results import origin
from benchmarks.precision.cases import PRECISIONS
from benchmarks.precision.scales import scale_errors
from benchmarks.precision.small_model import documents, trained_model
from colocate.engines.native.engine import NativeEngine
from colocate.types import Prompt, SamplingParams


@torch.no_grad()
def policy_logprobs(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    """[C] log-probs of a completion by one forward of the model."""
    tokens = torch.tensor([prompt + completion], device=model.device)
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()


def statistics_of(ratios: Tensor, lengths: list[int]) -> dict[str, Any]:
    """Of log-ratios [sequences, tokens]: per token, and of sums over the first `lengths` tokens."""
    record: dict[str, Any] = {
        "mean": float(ratios.mean()),
        "sd": float(ratios.std()),
        "mean_abs": float(ratios.abs().mean()),
        "max_abs": float(ratios.abs().max()),
        "sums": {},
    }
    for length in lengths:
        sums = ratios[:, :length].double().sum(1)
        weights = sums.exp()
        share = float(weights.sum().square() / (len(weights) * weights.square().sum()))
        record["sums"][str(length)] = {
            "mean": float(sums.mean()),
            "sd": float(sums.std()),
            "max_abs": float(sums.abs().max()),
            "effective_share": share,
            "predicted_share": float(torch.exp(-ratios.double().var() * length)),
        }
    return record


def log_ratios(model: Any, prompts: list[Prompt], precision: str, num_tokens: int) -> Tensor:
    """[prompts, num_tokens] log-ratios of completions that the engine draws."""
    engine = NativeEngine(model, max_num_seqs=len(prompts), rollout_precision=precision)
    engine.wake_up()
    completions = engine.generate(prompts, SamplingParams(num_tokens, temperature=1.0, seed=1))
    engine.close()
    return torch.stack(
        [
            policy_logprobs(model, tuple(prompt.token_ids), tuple(completion.token_ids))
            - torch.tensor(completion.logprobs)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="short training and completions, for a CPU")
    parser.add_argument("--seconds", type=float, default=40.0, help="of training")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, batch, num_sequences, num_tokens = (64, 4, 2, 32) if options.tiny else (4096, 8, 32, 8192)
    lengths = [16, 32] if options.tiny else [1024, 8192]
    model, training = trained_model(device, 1.0 if options.tiny else options.seconds, length, batch)
    print(training, flush=True)
    generator = torch.Generator(device=device).manual_seed(3)
    prompts = documents(num_sequences, length // 4, device, generator)
    requests = [Prompt(tuple(row), key, range(1)) for key, row in enumerate(prompts.tolist())]
    record: dict[str, Any] = {"kind": "log_ratios", **origin(), "training": training, "precisions": {}}
    record |= {"num_sequences": num_sequences, "num_tokens": num_tokens, "prompt_tokens": length // 4}
    for precision in PRECISIONS:
        ratios = log_ratios(model, requests, precision, num_tokens)
        record["precisions"][precision] = statistics_of(ratios, lengths)
        print(precision, json.dumps(record["precisions"][precision]), flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    record["scales"] = scale_errors(model, prompts[:4])
    print(json.dumps(record["scales"]), flush=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
