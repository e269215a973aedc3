"""Rollouts by the native engine or by vLLM: seconds and tokens per second of every repetition.

    python -m benchmarks.rollout.run --engine native --cases 1p5b_512seq --out native.json
    python -m benchmarks.rollout.run --engine vllm --cases 1p5b_512seq 1p5b_ragged --out vllm.json

Random weights, random prompts, temperature 1, no stop tokens, given lengths. Loading and warming up (a
rollout of the same sequences, an eighth as long) are not part of a repetition; everything else from prompts
to tokens and log-probs on the host is. An eighth is enough for ragged lengths to end slowly enough to pass
through every size of batch: the native engine captures the graph of a size when it first meets it, vLLM all
of its graphs at its start.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.results import origin
from benchmarks.rollout.cases import CASES, Case, model_directory, tiny

VARIANTS = ("in-process", "own-process")
"""Where vLLM's engine runs: in the caller's process, as trainers that share the GPU run it, or in its own,
which takes the scheduler off the caller's interpreter lock."""

WARM_UP_SHARE = 8
"""Lengths are divided by it."""

Lists = list[list[int]]
"""Per prompt: its tokens, or the lengths of its completions."""


class Engine(Protocol):
    def rollout(self, case: Case, prompts: Lists, limits: Lists, seed: int) -> int:
        """Complete each prompt, once for each of its limits. Returns the number of tokens generated."""
        ...

    def memory(self) -> dict[str, int]: ...


class Native:
    def __init__(self, directory: Path, cases: list[Case]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from colocate.engines.native.engine import NativeEngine

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
        self._torch = torch
        self.engine = NativeEngine(model, max_num_seqs=max(case.num_seqs for case in cases))
        self.engine.wake_up()

    def rollout(self, case: Case, prompts: Lists, limits: Lists, seed: int) -> int:
        from colocate.types import Prompt, SamplingParams

        # What an engine may remember of earlier prompts belongs to an earlier policy.
        self.engine.update_weights(version=self.engine.policy_version + 1)
        requests = [
            Prompt(tuple(ids), key, range(len(some)), tuple(some))
            for key, (ids, some) in enumerate(zip(prompts, limits, strict=True))
        ]
        completions = self.engine.generate(
            requests, SamplingParams(max_tokens=max(map(max, limits)), temperature=1.0, seed=seed)
        )
        if any(c.logprobs is None or len(c.logprobs) != len(c.token_ids) for c in completions):
            raise RuntimeError("The native engine returned completions without log-probs.")
        return sum(len(completion.token_ids) for completion in completions)

    def memory(self) -> dict[str, int]:
        if not self._torch.cuda.is_available():
            return {}
        free, total = self._torch.cuda.mem_get_info()
        return {
            "device_used_bytes": total - free,
            "peak_allocated_bytes": self._torch.cuda.max_memory_allocated(),
            "kv_cache_bytes": self.engine.kv_cache_bytes,
        }


class Vllm:
    """vLLM with all of the GPU to itself, which a trainer beside it would not leave.

    Prefix caching, CUDA graphs for all batch sizes up to 512 and asynchronous scheduling are its defaults.

    Args:
        variant: one of `VARIANTS`.
        options: further ones of vLLM's.
    """

    def __init__(self, directory: Path, cases: list[Case], variant: str, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(variant == "own-process"))
        from vllm import LLM

        self.llm = LLM(
            model=str(directory),
            dtype="bfloat16",
            seed=0,
            gpu_memory_utilization=0.9,
            max_model_len=max(case.max_len for case in cases),
            max_num_seqs=max(case.num_seqs for case in cases),
            max_num_batched_tokens=16384,
            **options,
        )

    def rollout(self, case: Case, prompts: Lists, limits: Lists, seed: int) -> int:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        requests, sampling = [], []
        for ids, some in zip(prompts, limits, strict=True):
            # A request for each distinct length; members of a group that share one are one request.
            for length in sorted(set(some)):
                requests.append({"prompt_token_ids": ids})
                sampling.append(
                    SamplingParams(
                        n=some.count(length),
                        temperature=1.0,
                        max_tokens=length,
                        ignore_eos=True,
                        logprobs=0 if case.logprobs else None,
                        # "For better performance", says its documentation: no dictionary for each token.
                        flat_logprobs=case.logprobs,
                        detokenize=False,
                    )
                )
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        completions = [completion for output in outputs for completion in output.outputs]
        if case.logprobs and any(len(c.logprobs or ()) != len(c.token_ids) for c in completions):
            raise RuntimeError("vLLM returned completions without log-probs.")
        return sum(len(completion.token_ids) for completion in completions)

    def memory(self) -> dict[str, int]:
        return {}  # it takes what gpu_memory_utilization says


def measure(engine: Engine, case: Case, num_repetitions: int) -> dict[str, Any]:
    """Warm up, then time; `rollout` ends when the tokens are on the host, so nothing is left to wait for.

    Raises:
        RuntimeError: a rollout did not have the asked-for number of tokens.
    """
    prompts, limits = case.prompts(), case.limits()
    short = [[max(1, limit // WARM_UP_SHARE) for limit in some] for some in limits]
    expected = sum(map(sum, limits))
    start_s = time.perf_counter()
    engine.rollout(case, prompts, short, seed=0)
    warm_up_s = time.perf_counter() - start_s
    repetitions = []
    for number in range(num_repetitions):
        start_s = time.perf_counter()
        num_tokens = engine.rollout(case, prompts, limits, seed=1 + number)
        seconds = time.perf_counter() - start_s
        if num_tokens != expected:
            raise RuntimeError(f"{expected} tokens were asked for and {num_tokens} came.")
        repetitions.append({"seconds": seconds, "num_tokens": expected, "tokens_per_s": expected / seconds})
        print(f"{seconds:.2f} s, {expected / seconds:.0f} tokens/s", flush=True)
    return {"warm_up_s": warm_up_s, "repetitions": repetitions, "memory": engine.memory()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("native", "vllm"), required=True)
    parser.add_argument("--vllm-variant", choices=VARIANTS, default=VARIANTS[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, required=True, help="of one model")
    parser.add_argument("--tiny", action="store_true", help="the cases made tiny, to try the script")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def chosen_cases(options: argparse.Namespace) -> dict[str, Case]:
    """Raises SystemExit if the cases are not of one model."""
    cases = {name: CASES[name] for name in options.cases}
    if len(models := {case.model for case in cases.values()}) > 1:
        raise SystemExit(f"--cases are of the models {sorted(models)}; run one model at a time.")
    return {name: tiny(case) for name, case in cases.items()} if options.tiny else cases


def main() -> None:
    options = parse()
    cases = chosen_cases(options)
    all_cases = list(cases.values())
    record: dict[str, Any] = {
        "kind": "rollout",
        "engine": options.engine,
        "variant": options.vllm_variant if options.engine == "vllm" else "native",
        **origin(),
    }
    directory = model_directory(options.model_dir, all_cases[0].model)
    start_s = time.perf_counter()
    engine: Engine = (
        Native(directory, all_cases)
        if options.engine == "native"
        else Vllm(directory, all_cases, options.vllm_variant)
    )
    record["init_s"] = time.perf_counter() - start_s
    print(f"{options.engine} started in {record['init_s']:.1f} s", flush=True)
    record["cases"] = {}
    for name, case in cases.items():
        print(name, flush=True)
        record["cases"][name] = vars(case) | measure(engine, case, options.repetitions)
        # Case by case, so that a time limit does not take all of them.
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
