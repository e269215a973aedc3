"""How far an engine's log-probs are from the trainer's, in bf16: the native engine's and vLLM's.

    python -m benchmarks.rollout.logprobs native  MODEL_DIR RECORDS  # completes, and asks the trainer
    python -m benchmarks.rollout.logprobs vllm    MODEL_DIR RECORDS  # completes; scores native's completions
    python -m benchmarks.rollout.logprobs trainer MODEL_DIR RECORDS  # asks the trainer of vLLM's completions

The trainer's log-probs are those of colocate's packed forward. The gap is the mean of |engine - trainer| over
all completion tokens. vLLM's is measured twice: on its own completions with the log-probs it sampled with,
and on the very completions of the native engine, which it reads as prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.results import origin
from benchmarks.rollout.cases import LOGPROBS_CASE, Case, tiny

TRAINER_TOKENS = 16384
"""Prompt and completion tokens in one forward of the trainer."""

Scored = list[dict[str, Any]]
"""`prompt`, `completion`: token ids; `engine`, and once the trainer was asked `trainer`: log-probs [C]."""


def gap(scored: Scored, engine: str = "engine") -> float:
    """Mean absolute difference to the trainer's log-probs, in nats."""
    return statistics.fmean(
        abs(ours - theirs) for one in scored for ours, theirs in zip(one[engine], one["trainer"], strict=True)
    )


def complete_natively(model: Any, case: Case) -> Scored:
    from colocate.engines.native.engine import NativeEngine
    from colocate.types import Prompt, SamplingParams

    engine = NativeEngine(model, max_num_seqs=case.num_seqs)
    engine.wake_up()
    prompts = [Prompt(tuple(ids), key, range(case.num_generations)) for key, ids in enumerate(case.prompts())]
    completions = engine.generate(prompts, SamplingParams(max_tokens=case.completion_tokens, seed=1))
    engine.close()
    owners = [prompt for prompt in prompts for _ in prompt.samples]
    return [
        {"prompt": prompt.token_ids, "completion": completion.token_ids, "engine": completion.logprobs}
        for prompt, completion in zip(owners, completions, strict=True)
    ]


def ask_trainer(model: Any, scored: Scored) -> None:
    """Add the log-probs of the trainer's forward to every completion."""
    import torch

    from colocate.data.packing import pack
    from colocate.policy.head.logprobs import token_logprobs
    from colocate.policy.head.output_head import output_head
    from colocate.policy.stack.host_activations import HostActivations
    from colocate.policy.stack.stack import DecoderStack
    from colocate.types import Sample

    device = next(model.parameters()).device
    samples = [
        Sample(
            prompt_ids=torch.tensor(one["prompt"], device=device),
            completion_ids=torch.tensor(one["completion"], device=device),
            completion_mask=torch.ones(len(one["completion"]), device=device),
            advantage=0.0,
        )
        for one in scored
    ]
    stack = DecoderStack(model, HostActivations())
    alone = [[number] for number in range(len(samples))]
    prompts = [len(sample.prompt_ids) for sample in samples]
    for indices in pack(alone, prompts, [sample.num_tokens for sample in samples], TRAINER_TOKENS):
        packed = [samples[i] for i in indices]
        with torch.no_grad():
            hidden = stack.hidden_states(stack.pack(packed), "full")
        targets = torch.cat([sample.completion_ids for sample in packed])
        logprobs, _ = token_logprobs(hidden, targets, output_head(model))
        for i, values in zip(indices, logprobs.split([len(s.completion_ids) for s in packed]), strict=True):
            scored[i]["trainer"] = values.tolist()


def load_model(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def run_vllm(directory: Path, case: Case, native: Scored) -> Scored:
    """vLLM's own completions; its log-probs of native's are added to those as `vllm`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    # Log-probs of prompt tokens need the logits of a whole prefill step in fp32: 1.2 GB for 2,048 tokens, and
    # some copies of them, from the memory that vLLM leaves.
    llm = LLM(
        model=str(directory), dtype="bfloat16", seed=0, gpu_memory_utilization=0.6,
        max_model_len=case.max_len + 1, max_num_seqs=case.num_seqs, max_num_batched_tokens=2048,
    )  # fmt: skip
    options = dict(temperature=1.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in case.prompts()],
        SamplingParams(n=case.num_generations, max_tokens=case.completion_tokens, logprobs=0, **options),
        use_tqdm=False,
    )
    own = [
        {
            "prompt": list(output.prompt_token_ids),
            "completion": list(completion.token_ids),
            "engine": sampled_logprobs(completion.token_ids, completion.logprobs),
        }
        for output in outputs
        for completion in output.outputs
    ]
    readings = llm.generate(
        [{"prompt_token_ids": [*one["prompt"], *one["completion"]]} for one in native],
        SamplingParams(max_tokens=1, prompt_logprobs=0, **options),
        use_tqdm=False,
    )
    for one, reading in zip(native, readings, strict=True):
        num_tokens = len(one["completion"])
        one["vllm"] = sampled_logprobs(one["completion"], reading.prompt_logprobs[-num_tokens:])
    return own


def sampled_logprobs(token_ids: Any, logprobs: Any) -> list[float]:
    return [float(at[token].logprob) for token, at in zip(token_ids, logprobs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("native", "vllm", "trainer"))
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    case = tiny(LOGPROBS_CASE) if options.tiny else LOGPROBS_CASE
    native_file, vllm_file = (options.records / f"{name}.completions" for name in ("native", "vllm"))
    if options.part == "native":
        model = load_model(options.model_dir)
        native = complete_natively(model, case)
        ask_trainer(model, native)
        native_file.write_text(json.dumps(native))
        print(f"native engine: {gap(native):.5f} nats")
        return
    native = json.loads(native_file.read_text())
    if options.part == "vllm":
        vllm_file.write_text(json.dumps(run_vllm(options.model_dir, case, native)))
        native_file.write_text(json.dumps(native))
        return
    own = json.loads(vllm_file.read_text())
    ask_trainer(load_model(options.model_dir), own)
    record = {
        "kind": "logprobs",
        **origin(),
        "case": vars(case),
        "num_tokens": sum(len(one["completion"]) for one in native),
        "native_gap": gap(native),
        "vllm_gap_sampling": gap(own),
        "vllm_gap_same_completions": gap(native, "vllm"),
    }
    (options.records / "logprobs.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
