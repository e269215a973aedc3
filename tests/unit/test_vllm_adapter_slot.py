"""What is written into vLLM's buffers for adapters, against PEFT's own merged weights; without vLLM."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from engine_models import make_lora, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from colocate.engines.vllm import adapter_slot
from colocate.engines.vllm.adapter_slot import PACKED, RANKS, AdapterSlot, slot_arguments, why_no_slot
from colocate.engines.vllm.shared_weights import fused_projections
from colocate.weights.adapters import base_linear
from colocate.weights.layouts import layout_for

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FakeLayer:
    """A layer of vLLM that is told of adapters as `set_lora` documents it."""

    def __init__(self, linears: list[Any], max_rank: int, dtype: torch.dtype) -> None:
        def zeros(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(1, 1, rows, columns, dtype=dtype)

        self.lora_a_stacked = tuple(zeros(max_rank, linear.in_features) for linear in linears)
        self.lora_b_stacked = tuple(zeros(linear.out_features, max_rank) for linear in linears)

    def reset_lora(self, index: int) -> None:
        for buffer in (*self.lora_a_stacked, *self.lora_b_stacked):
            buffer[index] = 0

    def set_lora(self, index: int, a: Any, b: Any) -> None:
        self.reset_lora(index)
        is_packed = len(self.lora_a_stacked) > 1
        assert isinstance(a, list) == isinstance(b, list) == is_packed
        for part in range(len(self.lora_a_stacked)):
            part_a, part_b = (a[part], b[part]) if is_packed else (a, b)
            if part_a is not None:
                self.lora_a_stacked[part][index, 0, : len(part_a)].copy_(part_a)
                self.lora_b_stacked[part][index, 0, :, : part_b.shape[1]].copy_(part_b)

    def update(self, part: int) -> torch.Tensor:
        """B A of one of its projections, in float64."""
        return self.lora_b_stacked[part][0, 0].double() @ self.lora_a_stacked[part][0, 0].double()


class FakeVLLM:
    """An engine with those layers for adapters that its arguments ask for."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        arguments = slot_arguments(model)
        assert arguments["enable_lora"] and arguments["max_loras"] == 1
        self.lora_manager = types.SimpleNamespace(
            modules={
                name: FakeLayer([base_linear(m) for m in modules], arguments["max_lora_rank"], dtype)
                for name, modules in fused_projections(layout_for(model))
                if name.rpartition(".")[-1] in arguments["lora_target_modules"]
            },
            packed_modules_mapping=dict(PACKED),
            lora_index_to_id=[None],
        )
        self.llm_engine = self

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self)]

    def add_lora(self, request: Any) -> None:
        tensors = load_file(f"{request.path}/adapter_model.safetensors")
        assert tensors and not any(tensor.any() for tensor in tensors.values())
        self.lora_manager.lora_index_to_id = [request.adapter_id]


@pytest.fixture(autouse=True)
def lora_request(monkeypatch):
    def request(name: str, adapter_id: int, path: str) -> Any:
        return types.SimpleNamespace(name=name, adapter_id=adapter_id, path=path)

    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.lora.request"].LoRARequest = request  # type: ignore[attr-defined]


def renew(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()


adapters = st.builds(
    dict,
    r=st.integers(1, 9),
    lora_alpha=st.integers(1, 40),
    use_rslora=st.booleans(),
    rank_pattern=st.dictionaries(st.sampled_from(PROJECTIONS), st.integers(1, 12), max_size=2),
    alpha_pattern=st.dictionaries(st.sampled_from(PROJECTIONS), st.integers(1, 12), max_size=2),
    target_modules=st.lists(st.sampled_from(PROJECTIONS), min_size=1, unique=True),
)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@settings(max_examples=25)
@given(configs=st.lists(adapters, min_size=1, max_size=2), is_16bit=st.booleans(), seed=st.integers(0, 9))
def test_buffers_have_what_peft_would_merge(configs, is_16bit, seed):
    model = get_peft_model(make_model("qwen3"), LoraConfig(**configs[0]))
    if len(configs) > 1:
        model.add_adapter("second", LoraConfig(**configs[1]))
        model.base_model.set_adapter(["default", "second"])
    dtype = torch.bfloat16 if is_16bit else torch.float32
    vllm = FakeVLLM(model, dtype)
    slot = AdapterSlot(vllm, model)
    for version in (seed, seed + 1):  # the second over the first
        renew(model, version)
        slot.copy()
        weights = [p for name, p in model.named_parameters() if "lora_" in name]
        assert slot.copied_bytes == sum(p.numel() for p in weights) * dtype.itemsize <= slot.num_bytes
        for name, modules in fused_projections(layout_for(model)):
            layer = vllm.lora_manager.modules.get(name)
            for part, module in enumerate(modules):
                names = [n for n in model.active_adapters if n in getattr(module, "lora_A", {})]
                assert layer is not None or not names
                if layer is not None:
                    expected = sum(
                        (module.double().get_delta_weight(n) for n in names),
                        torch.zeros(base_linear(module).weight.shape, dtype=torch.float64),
                    )
                    module.float()
                    tolerance = 0.02 if is_16bit else 1e-6
                    bound = tolerance * expected.abs().max()
                    assert (layer.update(part) - expected).abs().max() <= bound


def test_an_adapter_that_is_merged_leaves_nothing_beside_the_base():
    model = make_lora("qwen3")
    vllm = FakeVLLM(model)
    slot = AdapterSlot(vllm, model)
    assert slot.copied_bytes > 0
    model.merge_adapter()
    slot.copy()
    assert slot.copied_bytes == 0
    assert not any(
        buffer.any() for layer in vllm.lora_manager.modules.values() for buffer in layer.lora_a_stacked
    )


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (65, 128), (512, 512)])
def test_room_is_of_a_rank_that_vllm_has(rank, room):
    model = get_peft_model(
        make_model("qwen3").to("meta"), LoraConfig(r=rank, target_modules=["q_proj", "k_proj"])
    )
    assert room in RANKS
    assert slot_arguments(model)["max_lora_rank"] == room
    assert slot_arguments(model)["lora_target_modules"] == ["qkv_proj"]


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"r": 513}, "rank 513 together, and vLLM takes 512 at most"),
        ({"lora_bias": True}, "biases"),
        ({}, None),
        ({"use_rslora": True}, None),
    ],
)
def test_why_adapters_cannot_stand_beside_shared_weights(config, reason):
    model = get_peft_model(make_model("qwen3"), LoraConfig(target_modules=["q_proj"], **config))
    why = why_no_slot(model)
    assert (why is None) if reason is None else (reason in str(why))


def test_without_an_active_adapter_there_is_nothing_to_stand_beside():
    model = make_lora("qwen3")
    model.merge_adapter()
    assert "no active adapter" in str(why_no_slot(model))


def test_float32_on_a_gpu_is_not_for_vllms_kernels(monkeypatch):
    model = make_lora("qwen3")
    layout = types.SimpleNamespace(
        **vars(layout_for(model)), device=torch.device("cuda"), dtype=torch.float32
    )
    monkeypatch.setattr(adapter_slot, "layout_for", lambda _: layout)
    assert "16 bits, and the model is in float32" in str(why_no_slot(model))


def change_ranks(model: Any, _: FakeVLLM) -> None:
    model.add_adapter("wide", LoraConfig(r=30, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "wide"])


def add_target(model: Any, _: FakeVLLM) -> None:
    model.add_adapter("other", LoraConfig(r=1, target_modules=["down_proj"]))
    model.base_model.set_adapter(["default", "other"])


def drop(_: Any, vllm: FakeVLLM) -> None:
    vllm.lora_manager.lora_index_to_id = [None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_ranks, r"rank 34 together, and vLLM was started for 8.*'buckets'"),
        (add_target, r"down_proj has got an adapter since vLLM started.*'buckets'"),
        (drop, r"the policy's adapter alone, and has \[None\]"),
    ],
)
def test_what_no_longer_fits_is_an_error(change, message):
    model = get_peft_model(
        make_model("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "up_proj", "o_proj"])
    )
    vllm = FakeVLLM(model)
    slot = AdapterSlot(vllm, model)
    change(model, vllm)
    with pytest.raises(RuntimeError, match=message):
        slot.copy()


def forget_modules(manager: Any) -> None:
    manager.modules = {}


def rename_buffers(manager: Any) -> None:
    for layer in manager.modules.values():
        del layer.lora_a_stacked


def change_signature(manager: Any) -> None:
    for layer in manager.modules.values():
        layer.set_lora = lambda index: None


def reorder(manager: Any) -> None:
    manager.packed_modules_mapping["gate_up_proj"] = ["up_proj", "gate_proj"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forget_modules, "no place that is known here for the adapters of model.layers.0.self_attn.qkv_proj"),
        (rename_buffers, "no place that is known here"),
        (change_signature, "does not take the adapters: .*positional argument"),
        (reorder, r"takes the adapters of gate_up_proj as \['up_proj', 'gate_proj'\]"),
    ],
)
def test_another_vllm_inside_is_noticed(change, message):
    model = make_lora("qwen3")
    vllm = FakeVLLM(model)
    change(vllm.lora_manager)
    with pytest.raises(RuntimeError, match=message):
        AdapterSlot(vllm, model)
