"""One process of the runs in test_vllm_in_process.py: `vllm_worker.py <directory> <case>...`.

Does the cases with real vLLM, leaves what it found in `<directory>/rank<n>.json`, and exits without closing
the last engine.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import (
    greedy_reference,
    make_lora,
    make_model,
    make_prompts,
    plain_logits,
)

from colocate.engines.vllm import shared_weights
from colocate.engines.vllm.engine import VLLMEngine
from colocate.types import SamplingParams
from listening import sockets
from vllm_unpacked import unpacked

GREEDY = SamplingParams(max_tokens=9, temperature=0)
EAGER = {"enforce_eager": True}


alive: list[VLLMEngine] = []


def start(model: Any, **options: Any) -> VLLMEngine:
    """An engine; the one before it is closed, as a process has one at a time."""
    while alive:
        alive.pop().close()
    kwargs = EAGER | {"block_size": 32}  # several of them in the 128 tokens of a tiny model's context
    alive.append(VLLMEngine(model, engine_kwargs=kwargs, **options))
    return alive[-1]


def perturb(model: Any, seed: int) -> None:
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.add_(noise.to(parameter), alpha=0.05)


def is_greedy(model: Any, prompt: Any, completion: Any) -> bool:
    """Whether the trainer would have said the same; in bfloat16, up to near ties."""
    if model.dtype == torch.float32:
        return list(completion.token_ids) == greedy_reference(model, prompt.token_ids, 9)
    logits = plain_logits(model, prompt.token_ids, completion.token_ids)
    lead = logits.max(dim=-1).values - logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return bool(lead.max() < 0.5)


def rounds(engine: VLLMEngine, model: Any, prompts: list[Any], num_rounds: int) -> list[bool]:
    """Whether greedy completions are the trainer's, at first and after each publication asleep."""
    equal = []
    for version in range(num_rounds):
        if version:
            perturb(model, version)
            engine.update_weights(version)
        engine.wake_up()
        completions = engine.generate(prompts, GREEDY)
        owners = [prompt for prompt in prompts for _ in prompt.samples]
        equal.append(all(is_greedy(model, *pair) for pair in zip(owners, completions, strict=True)))
        engine.sleep()
    return equal


def tensor_parallel() -> dict[str, Any]:
    """Two processes, one engine: unequal prompts, and a rank with none."""
    rank = int(os.environ["RANK"])
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    model = make_model("qwen3", hidden_size=64, head_dim=64 if is_cuda else 32)
    if is_cuda:
        model = model.cuda().bfloat16()
    engine = VLLMEngine(model, engine_kwargs=EAGER, tensor_parallel_size=2)
    mine = make_prompts([5, 7, 3], 2) if rank == 0 else make_prompts([4], seed=1)
    equal = rounds(engine, model, mine, 3)
    engine.wake_up()
    alone = engine.generate(mine if rank == 0 else [], GREEDY)
    found = {
        "equal": equal,
        "num_alone": len(alone),
        "num_asked": sum(len(p.samples) for p in mine),
        "group": engine._group.index,
        "published_bytes": engine.published_bytes,
    }
    engine.close()
    ranks: list[int | None] = [None, None]
    dist.all_gather_object(ranks, rank)  # the run's own group has outlived the engine
    return found | {"ranks": ranks}


def addresses(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def shared() -> dict[str, Any]:
    """Weights of one storage on a CPU, where vLLM is kept from packing them."""
    model = make_model("qwen2", hidden_size=128, vocab_size=128)
    with unpacked():
        engine = start(model, weights="shared")
    equal = rounds(engine, model, make_prompts([5, 7]), 4)
    children = psutil.Process().children(recursive=True)
    return {
        "equal": equal,
        "shares": engine.shares_weights,
        "published_bytes": engine.published_bytes,
        "outside": len(set(engine._llm.apply_model(addresses)[0]) - set(addresses(model))),
        "found": found_in_the_cache(engine, model),
        "listens": sorted(sockets([os.getpid(), *(child.pid for child in children)])),
    }


def found_in_the_cache(engine: VLLMEngine, model: Any) -> dict[str, list[int]]:
    """What each of two turns has found, and how many whole blocks there were of its context."""
    block = engine._llm.llm_engine.vllm_config.cache_config.block_size
    engine.wake_up()
    told, whole = [], []
    (prompt,) = make_prompts([2 * block + 3], seed=3)
    (number,) = engine.submit([replace(prompt, max_tokens=(4,))], GREEDY, keep=True)
    context = len(prompt.token_ids)
    while engine.is_busy:
        for completion in engine.poll().values():
            told.append(completion.num_cached_tokens)
            whole.append(0 if len(told) == 1 else (context - 1) // block * block)
            context += len(completion.token_ids) + 2
            if len(told) == 1:
                engine.extend(number, (5, 6), 3)
    engine.abort([number])
    engine.sleep()
    return {"told": told, "whole": whole}


def in_place() -> dict[str, Any]:
    """A copy whose parameters vLLM reads as they are, as on GPUs; and sharing that turns out impossible."""
    model = make_model("qwen3", head_dim=32)  # 97 tokens, which vLLM pads; it starts as if that were unknown
    with unpacked(), mock.patch.object(shared_weights, "VOCABULARY_BLOCK", 1):
        engine = start(model, weights="auto", bucket_bytes=20_000)
    found = {
        "equal": rounds(engine, model, make_prompts([5, 7]), 3),
        "shares": engine.shares_weights,
        "reason": engine._shared.reason,
        "is_plain": engine._shared.is_plain,
        "published_bytes": engine.published_bytes,
        "model_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }
    lora = make_lora("qwen2", hidden_size=128)
    with unpacked():
        engine = start(lora)
    return found | {
        "lora_equal": rounds(engine, lora, make_prompts([5, 7]), 2),
        "lora_plain": engine._shared.is_plain,
        "lora_reason": engine._shared.reason,
    }


def main() -> None:
    directory, *names = sys.argv[1:]
    cases = {case.__name__: case for case in (tensor_parallel, shared, in_place)}
    found = {name: cases[name]() for name in names}
    Path(directory, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
