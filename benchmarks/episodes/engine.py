"""The open engine: rollouts by submit and poll beside `generate`, and turns with and without lockstep.

    python -m benchmarks.episodes.engine --out record.json [--tiny]

On one engine with random weights, the same prompts and lengths, each way in turn:

    generate   512 completions of log-normal lengths in one call
    open       the same by submit and poll
    turns      64 x 8 episodes of 4 turns; what a tool answers is appended the moment it has answered
    lockstep   the same, a round of turns in one call after the slowest tool, their whole contexts read anew

`turns` and `lockstep` are run with tools that answer at once and with tools that take 50 ms, all at the same
time. A turn that asks for a tool takes the host nothing else: there is no template and no parsing.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.results import origin
from benchmarks.episodes.cases import CASE, TINY_TURNS, Turns
from benchmarks.rollout.cases import Case, model_directory, tiny
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.model_runner import ModelRunner
from colocate.types import Prompt, SamplingParams


class PrefillCount:
    """Counts the tokens that the engine reads in prefills, in place of `ModelRunner.prefill`."""

    def __init__(self) -> None:
        self.num_tokens = 0
        prefill = ModelRunner.prefill

        def counted(runner: ModelRunner, items: Any) -> Any:
            self.num_tokens += sum(len(item.token_ids) - item.num_cached for item in items)
            return prefill(runner, items)

        ModelRunner.prefill = counted  # type: ignore[method-assign]


def requests_of(case: Case, limits: list[list[int]]) -> list[Prompt]:
    return [
        Prompt(tuple(ids), key, range(len(some)), tuple(some))
        for key, (ids, some) in enumerate(zip(case.prompts(), limits, strict=True))
    ]


def by_generate(engine: NativeEngine, case: Case, seed: int) -> int:
    """Returns the number of tokens drawn."""
    sampling = SamplingParams(case.completion_tokens, seed=seed)
    return sum(len(c.token_ids) for c in engine.generate(requests_of(case, case.limits()), sampling))


def by_poll(engine: NativeEngine, case: Case, seed: int) -> int:
    engine.submit(requests_of(case, case.limits()), SamplingParams(case.completion_tokens, seed=seed))
    num_tokens = 0
    while engine.is_busy:
        num_tokens += sum(len(completion.token_ids) for completion in engine.poll().values())
    return num_tokens


def play(engine: NativeEngine, case: Case, turns: Turns, tool_s: float, seed: int) -> int:
    """Every episode goes on when its own tool has answered."""
    lengths = turns.lengths(case.num_seqs)
    sampling = SamplingParams(turns.max_tokens, seed=seed)
    numbers = engine.submit(requests_of(case, first_turns(case, lengths)), sampling, keep=True)
    left = {number: own[1:] for number, own in zip(numbers, lengths, strict=True)}
    answering: list[tuple[float, int]] = []
    num_tokens = 0
    while left:
        for number, completion in engine.poll().items():
            num_tokens += len(completion.token_ids)
            if left[number]:
                heapq.heappush(answering, (time.perf_counter() + tool_s, number))
            else:
                del left[number]
                engine.abort([number])
        while answering and answering[0][0] <= time.perf_counter():
            number = heapq.heappop(answering)[1]
            engine.extend(number, turns.answer(case.model, len(left[number])), left[number].pop(0))
        if not engine.is_busy and answering:
            time.sleep(max(0.0, answering[0][0] - time.perf_counter()))
    return num_tokens


def in_lockstep(engine: NativeEngine, case: Case, turns: Turns, tool_s: float, seed: int) -> int:
    """All episodes wait for the longest turn and the slowest tool, and their contexts are prompts again."""
    lengths = turns.lengths(case.num_seqs)
    sampling = SamplingParams(turns.max_tokens, seed=seed)
    requests = requests_of(case, first_turns(case, lengths))
    contexts = [prompt.token_ids for prompt in requests for _ in prompt.samples]
    num_tokens = 0
    for turn in range(turns.num_turns):
        completions = engine.generate(requests, sampling)
        num_tokens += sum(len(completion.token_ids) for completion in completions)
        if turn + 1 == turns.num_turns:
            break
        time.sleep(tool_s)
        answer = tuple(turns.answer(case.model, turns.num_turns - 1 - turn))
        contexts = [old + c.token_ids + answer for old, c in zip(contexts, completions, strict=True)]
        requests = [
            Prompt(ids, 1000 * (turn + 1) + n, range(1), (own[turn + 1],))
            for n, (ids, own) in enumerate(zip(contexts, lengths, strict=True))
        ]
    return num_tokens


def first_turns(case: Case, lengths: list[list[int]]) -> list[list[int]]:
    """The length of each episode's first turn, group by group."""
    size = case.num_generations
    return [[own[0] for own in lengths[n : n + size]] for n in range(0, case.num_seqs, size)]


def measure(
    engine: NativeEngine, count: PrefillCount, ways: dict[str, Callable[[int], int]], repetitions: int
) -> dict[str, list[dict[str, float]]]:
    """Every way once to warm up, then all in turn: a repetition of each in every round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(repetitions + 1):
        for name, way in ways.items():
            # What is remembered of earlier prompts belongs to an earlier policy.
            engine.update_weights(version=engine.policy_version + 1)
            count.num_tokens = 0
            start_s = time.perf_counter()
            num_tokens = way(number)
            seconds = time.perf_counter() - start_s
            if number:
                found[name].append(
                    {"seconds": seconds, "num_tokens": num_tokens, "num_prefilled": count.num_tokens}
                )
                print(f"{name}: {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="made tiny, to try the script")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--lockstep", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    case, turns = (tiny(CASE), TINY_TURNS) if options.tiny else (CASE, Turns())
    directory = model_directory(options.model_dir, case.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    engine, count = NativeEngine(model, max_num_seqs=case.num_seqs), PrefillCount()
    engine.wake_up()
    lengths = turns.lengths(case.num_seqs)
    record: dict[str, Any] = {
        "kind": "open engine",
        **origin(),
        "case": vars(case),
        "turns": dataclasses.asdict(turns),
        # Each prompt once, each answer once, and with each the last token of the turn before.
        "least_prefilled": case.num_prompts * case.prompt_tokens
        + sum(len(own) - 1 for own in lengths) * (turns.answer_tokens + 1),
    }
    ways: dict[str, Callable[[int], int]] = {
        "generate": partial(by_generate, engine, case),
        "open": partial(by_poll, engine, case),
    }
    for tool_s in (0.0, 0.05):
        ways[f"turns {tool_s}"] = lambda seed, tool_s=tool_s: play(engine, case, turns, tool_s, seed)
        if not options.lockstep:
            continue
        ways[f"lockstep {tool_s}"] = lambda seed, tool_s=tool_s: in_lockstep(
            engine, case, turns, tool_s, seed
        )
    record["repetitions"] = measure(engine, count, ways, options.repetitions)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
