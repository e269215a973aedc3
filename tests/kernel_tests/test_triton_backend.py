"""Rollouts on the kernels against rollouts on PyTorch's operations, in float32 on the same device."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eight_bit_models import ONE_ROUNDING, with_8bit_kv, with_8bit_products
from engine_models import (
    assert_logprobs_are_the_models,
    greedy_completions,
    greedy_references,
    make_model,
    make_prompts,
    randomise_adapters,
)
from peft import LoraConfig, get_peft_model
from quantized_models import make_4bit_model

from colocate.engines.native import engine as native_engine
from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.model_runner import LayerWeights
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.sampler import Sampler
from colocate.engines.native.tensor_parallel import OneRank
from colocate.engines.native.torch_backend import TorchBackend
from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.decode import prefixes
from colocate.kernels.matmul import lora
from colocate.memory import arena
from colocate.types import Completion, SamplingParams
from colocate.weights.layouts import WeightPart, layout_for
from colocate.weights.weight_parts import split_weights


@pytest.fixture(autouse=True)
def few_programs_to_interpret(device, request):
    if device.type == "cpu":
        request.getfixturevalue("few_programs")


class Uncaptured(TritonBackend):
    """Launches every kernel itself: the interpreter has nothing to capture."""

    captures_graphs = False


def adapted(base, **ranks: int):
    """With random adapters of these ranks on some projections."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(ranks), rank_pattern=ranks)
    model = get_peft_model(base, config)
    randomise_adapters(model)
    return model


def start(model, backend: TorchBackend, rollout_precision: str = "bf16") -> NativeEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_engine, "backend_for", lambda device: backend)
        engine = NativeEngine(model, max_num_seqs=3, page_size=16, rollout_precision=rollout_precision)
    engine.wake_up()
    return engine


def rollout(model, backend: TorchBackend, device, sampling: SamplingParams) -> list[Completion]:
    engine = start(model.to(device), backend)
    completions = engine.generate(make_prompts([19, 3], 2), sampling)
    engine.close()
    return completions


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_model("qwen3"),
        lambda: make_model("mistral-window"),
        lambda: adapted(make_model("granite"), o_proj=3, down_proj=5),
        lambda: make_model("smollm3"),
        lambda: make_model("olmo3"),
        lambda: adapted(make_model("glm4"), o_proj=3, down_proj=5),
        lambda: make_model("hunyuan_v1_dense"),
        lambda: make_model("gemma3_text"),
        lambda: make_model("phi3-partial-rotary"),
        lambda: adapted(make_model("qwen2"), q_proj=3, v_proj=20, o_proj=8, up_proj=2, down_proj=5),
        lambda: adapted(make_model("qwen3"), q_proj=3, k_proj=3, v_proj=3, gate_proj=5, up_proj=17),
    ],
    ids=[
        "qwen3",
        "mistral-window",
        "granite",
        "smollm3",
        "olmo3",
        "glm4",
        "hunyuan",
        "gemma3",
        "phi3-partial-rotary",
        "adapters",
        "adapters of gate and up",
    ],
)
@pytest.mark.share(2)
def test_kernels_and_operations_generate_the_same(make, device, monkeypatch):
    monkeypatch.setattr(prefixes, "MIN_SHARED_TOKENS", 4)
    sampling = SamplingParams(max_tokens=3, seed=3, stop_token_ids=(50,))
    expected = rollout(make(), TorchBackend(), device, sampling)
    completions = rollout(make(), Uncaptured(), device, sampling)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for ours, theirs in zip(completions, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=2e-5, rtol=1e-5
        )


def test_log_probs_of_filtered_draws_are_the_policys(device):
    sampling = SamplingParams(3, temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0)).to(device) * 3
    batch: Any = SimpleNamespace(
        prompt_keys=torch.arange(4, device=device),
        samples=torch.zeros(4, dtype=torch.int32, device=device),
        num_generated=torch.zeros(4, dtype=torch.int32, device=device),
        seen=torch.rand(4, 97, device=device) < 0.3,
    )
    tokens, logprobs = TritonBackend().sample(logits.clone(), Sampler(sampling), batch, slice(0, 4))
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None].long())[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


class OneOfTwo(OneRank):
    """A rank that has the rows of the other one already."""

    num_parts = 2

    def __init__(self, part: int, other: torch.Tensor | None) -> None:
        self.part = part
        self.rows = [other, other]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[self.part] = x
        return torch.stack([x if rows is None else rows for rows in self.rows])

    def whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        return self.gather(logits).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("top_k", [0, 9])
@pytest.mark.parametrize("make_backend", [TorchBackend, TritonBackend])
def test_two_ranks_draw_from_their_halves_what_one_draws(make_backend, top_k, device):
    sampling = SamplingParams(3, temperature=0.7, top_k=top_k, seed=9)
    logits = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)).to(device) * 3
    zeros = torch.zeros(4, dtype=torch.int32, device=device)
    keys = dict(
        prompt_keys=torch.arange(4, device=device), samples=zeros, num_generated=zeros, finished=zeros
    )
    batch: Any = SimpleNamespace(**keys, seen=None, seed=torch.tensor([9], device=device))
    expected = TorchBackend().sample(logits.clone(), Sampler(sampling), batch, slice(0, 4))
    other = None
    for part, half in enumerate(logits.chunk(2, dim=1)):
        backend = make_backend()
        backend.parallel = rank = OneOfTwo(part, other)
        tokens, logprobs = backend.sample(half, Sampler(sampling), batch, slice(0, 4))
        other = rank.rows[part]
    assert torch.equal(tokens.long(), expected[0])
    torch.testing.assert_close(logprobs, expected[1], atol=1e-5, rtol=1e-5)


class WithRoom(OneRank):
    """A rank whose sums want partial results in a place of their own, with the rows of a larger step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def room(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        place = torch.full((num_rows + 3, num_columns), torch.nan, dtype=dtype, device=self.device)
        return place[:num_rows]


class Half:
    """One of two parts of a model, and its second layer with the weights of a rollout."""

    def __init__(self, model: Any, index: int, device: torch.device) -> None:
        self.model, self.part = copy.deepcopy(model), WeightPart(index, 2)
        split_weights(self.model, self.part)
        self.layout = layout_for(self.model)
        self.weights = RolloutWeights(stacks_adapters=True)
        self.weights.allocate(self.layout, is_copy=True)
        self.backend = Uncaptured()
        self.backend.parallel = WithRoom(device)

    def prepared(self) -> LayerWeights:
        self.weights.prepare(self.layout)
        return LayerWeights(self.weights, EightBitWeights(), self.layout.layers[1], self.part)

    def of_inputs(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, dim=1)[self.part.index]

    def of_outputs(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([output.chunk(2, dim=1)[self.part.index] for output in outputs], dim=1)


@pytest.mark.parametrize(("num_rows", "max_rows"), [(1, 1024), (33, 1024), (5, 4)])
@torch.inference_mode()
def test_halves_of_adapted_projections_make_those_of_peft(num_rows, max_rows, device, monkeypatch):
    """Before and after a step, in which the adapters change and their copies' places do not."""
    monkeypatch.setattr(lora, "MAX_ROWS", max_rows)
    monkeypatch.setattr(arena, "_check_only_one", lambda *_: None)  # ranks have a GPU each, and here is one
    ranks = dict(q_proj=3, k_proj=2, v_proj=20, o_proj=8, gate_proj=4, up_proj=5, down_proj=17)
    with torch.inference_mode(False):
        model = adapted(make_model("llama-biases", vocab_size=98), **ranks).to(device)
        halves = [Half(model, index, device) for index in (0, 1)]
    layer, identities = layout_for(model).layers[1], []
    draw = torch.Generator().manual_seed(4)
    for seed in (5, 6):
        for changed in (model, *(half.model for half in halves)):
            torch.manual_seed(seed)
            randomise_adapters(changed)
        layers = [half.prepared() for half in halves]
        identities.append([tuple(weights.identity()) for weights in layers])
        x = torch.randn(num_rows, layer.qkv[0].in_features, generator=draw).to(device)
        attended = torch.randn(num_rows, layer.o.in_features, generator=draw).to(device)
        gated = layer.activation(layer.gate_up[0](x)) * layer.gate_up[1](x)
        partial: dict[str, list[torch.Tensor]] = {"o": [], "down": []}
        for half, weights in zip(halves, layers, strict=True):
            for projection in (weights.qkv, weights.o, weights.gate_up, weights.down):
                assert projection.weight.stacked_a is not None
            qkv = weights.qkv(half.backend, x)
            torch.testing.assert_close(qkv, half.of_outputs([module(x) for module in layer.qkv]))
            own_gated = weights.gate_up.gated(half.backend, weights.activation, x)
            torch.testing.assert_close(own_gated, half.of_outputs([gated]))
            partial["o"].append(weights.o(half.backend, half.of_inputs(attended)))
            partial["down"].append(weights.down(half.backend, half.of_inputs(gated)))
        torch.testing.assert_close(sum(partial["o"]), layer.o(attended))
        torch.testing.assert_close(sum(partial["down"]), layer.down(gated))
    assert identities[0] == identities[1]


PROMPTS = make_prompts([3], 2)
GREEDY = SamplingParams(max_tokens=2, temperature=0)


def logprobs_of(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor([completion.logprobs for completion in completions])


def stacks(engine: NativeEngine) -> list:
    layers = engine._decoder.runner._layers
    return [p.weight.stack for layer in layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def adapted_base(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with adapters on all projections; of 4 bits, engines hold a copy or one weight at a time."""
    if kind.startswith("4 bits"):
        is_copy = kind.endswith("copy")
        monkeypatch.setattr(
            native_engine,
            "take_weights",
            lambda weights, cache, layout, **_: weights.allocate(layout, is_copy=is_copy),
        )
        base = make_4bit_model("qwen2", device=str(device))
    else:
        base = make_model("llama-biases")
    ranks = dict(q_proj=3, k_proj=2, v_proj=20, o_proj=8, gate_proj=4, up_proj=2, down_proj=5)
    return adapted(base, **ranks).to(device)


@pytest.mark.parametrize("kind", ["biases", "4 bits, one by one"])
@pytest.mark.share(2)
def test_adapters_are_added_to_products_in_8_bits(kind, device, monkeypatch):
    """Their A are found below the weights of the trainer, as below those of a copy, and of one at a time."""
    model = adapted_base(kind, device, monkeypatch)
    engine = start(model, Uncaptured(), "fp8")
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=2, seed=3))
    assert all(stack is not None for stack in stacks(engine))
    engine.close()
    reference = with_8bit_products(with_8bit_kv(model))
    assert_logprobs_are_the_models(reference, PROMPTS, completions, atol=ONE_ROUNDING)


@pytest.mark.parametrize("kind", ["biases", "4 bits, copy", "4 bits, one by one"])
@pytest.mark.share(2)
def test_adapters_below_the_weights_are_those_of_the_moment(kind, device, monkeypatch):
    """Before and after an update in place, and without adapters, against transformers and PEFT."""
    model = adapted_base(kind, device, monkeypatch)
    engine = start(model, Uncaptured())
    addresses = [p.data_ptr() for p in model.parameters()]
    for _ in range(2):
        completions = engine.generate(PROMPTS, GREEDY)
        assert all(stack is not None for stack in stacks(engine))
        assert_logprobs_are_the_models(model, PROMPTS, completions, atol=2e-4, rtol=1e-4)
        randomise_adapters(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses, "rollouts move nothing"
    before = logprobs_of(engine.generate(PROMPTS, GREEDY))
    with model.disable_adapter():
        assert greedy_completions(engine, PROMPTS, 2) == greedy_references(model, PROMPTS, 2)
        assert all(stack is None for stack in stacks(engine))
    torch.testing.assert_close(logprobs_of(engine.generate(PROMPTS, GREEDY)), before)
    engine.close()
