"""One process of the runs in test_vllm_in_process.py: `vllm_worker.py <case> <directory>`.

Does the case with real vLLM, leaves what it found in `<directory>/rank<n>.json`, and exits without closing
anything.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_models import greedy_reference, make_lora, make_model, make_prompts, plain_logits

from colocate.engines.vllm import shared_weights
from colocate.engines.vllm.in_process import VLLMEngine
from colocate.types import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0)
EAGER = {"enforce_eager": True}


def perturb(model: Any, seed: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
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
            tensors = () if engine.shares_weights else model.named_parameters()
            engine.update_weights(tensors, version)
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
    engine = VLLMEngine(model, tensor_parallel_size=2, engine_kwargs=EAGER)
    mine = make_prompts([5, 7, 3], 2) if rank == 0 else make_prompts([4], seed=1)
    equal = rounds(engine, model, mine, 3)
    engine.wake_up()
    alone = engine.generate(mine if rank == 0 else [], GREEDY)
    return {
        "equal": equal,
        "num_alone": len(alone),
        "num_asked": sum(len(p.samples) for p in mine),
        "group": engine._group.index,
        "published_bytes": engine.published_bytes,
    }


def shared() -> dict[str, Any]:
    """Weights of one storage on a CPU, where vLLM is kept from packing them."""
    import vllm._custom_ops as ops

    ops._supports_onednn = False
    shared_weights.SHARING_DEVICE = "cpu"
    # A vocabulary of whole blocks: vLLM pads others.
    model = make_model("qwen2", hidden_size=128, vocab_size=128)
    engine = VLLMEngine(model, weights="shared", engine_kwargs=EAGER)
    equal = rounds(engine, model, make_prompts([5, 7]), 4)
    storages = engine._llm.apply_model(lambda module: [p.data_ptr() for p in module.parameters()])[0]
    trainers = {parameter.data_ptr() for parameter in model.parameters()}
    return {
        "equal": equal,
        "shares": engine.shares_weights,
        "published_bytes": engine.published_bytes,
        "outside": len(set(storages) - trainers),
    }


def in_place() -> dict[str, Any]:
    """A copy whose parameters vLLM reads as they are, as on GPUs; and sharing that turns out impossible."""
    import vllm._custom_ops as ops

    ops._supports_onednn = False
    shared_weights.SHARING_DEVICE = "cpu"
    model = make_model("qwen3", head_dim=32)  # 97 tokens, which vLLM pads
    engine = VLLMEngine(model, weights="auto", engine_kwargs=EAGER, bucket_bytes=20_000)
    found = {
        "equal": rounds(engine, model, make_prompts([5, 7]), 3),
        "shares": engine.shares_weights,
        "reason": engine._source.reason,
        "is_plain": engine._source.is_plain,
        "published_bytes": engine.published_bytes,
        "model_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }
    engine.close()
    lora = make_lora("qwen2", hidden_size=128)
    engine = VLLMEngine(lora, engine_kwargs=EAGER)
    return found | {
        "lora_equal": rounds(engine, lora, make_prompts([5, 7]), 2),
        "lora_plain": engine._source.is_plain,
        "lora_reason": engine._source.reason,
    }


def main() -> None:
    case, directory = sys.argv[1:]
    found = {"tensor_parallel": tensor_parallel, "shared": shared, "in_place": in_place}[case]()
    Path(directory, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
