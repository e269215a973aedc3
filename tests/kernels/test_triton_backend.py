"""Rollouts on the kernels against rollouts on PyTorch's operations, in float32 on the same device."""

from __future__ import annotations

import pytest
import torch
from engine_models import make_model, make_prompts
from peft import LoraConfig, get_peft_model

from colocate.engines.native import prefixes
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.torch_backend import TorchBackend
from colocate.engines.native.triton_backend import TritonBackend
from colocate.types import Completion, SamplingParams


class Uncaptured(TritonBackend):
    """Launches every kernel itself: the interpreter has nothing to capture."""

    captures_graphs = False


def adapted(name: str, **ranks: int):
    """With random adapters of these ranks on some projections."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(ranks), rank_pattern=ranks)
    model = get_peft_model(make_model(name), config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.normal_(std=0.15)
    return model


def rollout(model, backend: TorchBackend, device, sampling: SamplingParams) -> list[Completion]:
    model = model.to(device)
    engine = NativeEngine(model, max_num_seqs=3, page_size=16)
    engine._backend = backend
    engine._cache.scratch_bytes = backend.scratch_bytes(engine._layout, 3)
    engine.wake_up()
    completions = engine.generate(make_prompts([19, 3], 2), sampling)
    engine.close()
    return completions


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_model("qwen3"),
        lambda: make_model("mistral-window"),
        lambda: adapted("qwen2", q_proj=3, v_proj=20, o_proj=8, up_proj=2, down_proj=5),
    ],
    ids=["qwen3", "mistral-window", "adapters"],
)
def test_kernels_and_operations_generate_the_same(make, device, monkeypatch):
    monkeypatch.setattr(prefixes, "MIN_SHARED_TOKENS", 4)
    sampling = SamplingParams(max_tokens=5, seed=3, stop_token_ids=(50,))
    expected = rollout(make(), TorchBackend(), device, sampling)
    completions = rollout(make(), Uncaptured(), device, sampling)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for ours, theirs in zip(completions, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=2e-5, rtol=1e-5
        )
