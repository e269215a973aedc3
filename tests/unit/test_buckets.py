"""Weights for an engine with a copy: bounded buckets, merged adapters, 4-bit weights as they multiply."""

import copy
import json
from itertools import pairwise

import pytest
import torch
from engine_models import make_gpt2, make_lora, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, get_peft_model
from quantized_models import make_4bit_model

from colocate.weights.chunks import Chunk
from colocate.weights.layouts import causal_lm
from colocate.weights.source import WeightSource


def flat(model, **options):
    return {name: tensor for bucket in WeightSource(model, **options).buckets() for name, tensor in bucket}


@settings(max_examples=25)
@given(max_bytes=st.integers(1, 60_000), with_adapter=st.booleans())
def test_buckets_are_bounded_and_leave_nothing_out(max_bytes, with_adapter):
    model = make_lora("qwen2") if with_adapter else make_model("qwen2")
    parts = list(WeightSource(model, max_bytes).buckets())
    names = [name for part in parts for name, _ in part]
    plain = make_model("qwen2")
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())
    for part in parts:
        assert len(part) == 1 or sum(tensor.nbytes for _, tensor in part) <= max_bytes
    # No bucket could have taken the first tensor of the next one, too.
    for part, following in pairwise(parts):
        assert sum(t.nbytes for _, t in part) + following[0][1].nbytes > max_bytes


@settings(max_examples=25)
@given(max_bytes=st.integers(1, 60_000), is_used_again=st.booleans())
def test_chunks_are_views_of_one_buffer_with_every_tensor(max_bytes, is_used_again):
    """Also where the buffer of the chunk before is filled anew; and its bytes alone give the tensors."""
    model, memory, found = make_model("qwen2").bfloat16(), torch.empty(0, dtype=torch.uint8), {}
    source = WeightSource(model, max_bytes)

    def buffer(num_bytes):
        nonlocal memory
        if not is_used_again or len(memory) < num_bytes:
            memory = torch.full((num_bytes,), 255, dtype=torch.uint8)
        return memory[:num_bytes]

    num_chunks = 0
    for chunk in source.chunks(buffer):
        num_chunks += 1
        assert chunk.flat.data_ptr() == memory.data_ptr() and not found.keys() & dict(chunk.tensors).keys()
        found |= dict(Chunk(chunk.flat.clone(), json.loads(json.dumps(chunk.places))).tensors)
    assert num_chunks == len(list(source.buckets()))
    assert {n: t.nbytes for n, t in found.items()} == dict(source.sizes)
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("model", [make_model("qwen3"), make_gpt2()], ids=["qwen3", "gpt2"])
def test_plain_parameters_are_not_copied(model):
    assert {n: t.data_ptr() for n, t in flat(model).items()} == {
        n: p.data_ptr() for n, p in model.named_parameters()
    }


def test_adapters_are_merged_and_the_model_stays():
    model = make_lora("llama-biases")
    before = copy.deepcopy(model.state_dict())
    merged = flat(model)
    expected = copy.deepcopy(model).double().merge_and_unload()
    for name, tensor in expected.named_parameters():
        torch.testing.assert_close(merged[name].double(), tensor, atol=1e-6, rtol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"],
        before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"],
    )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("wrap", [make_model, make_lora])
def test_a_tied_head_comes_under_one_name(wrap, is_tied):
    model = wrap("qwen3", tie_word_embeddings=is_tied)
    name = WeightSource(model).tied_head
    assert (name is not None) == is_tied == ("lm_head.weight" not in flat(model))
    if name is not None:
        assert torch.equal(flat(model)[name], causal_lm(model).get_output_embeddings().weight)


def test_disabled_and_merged_adapters_are_what_the_forward_uses():
    model = make_lora("qwen2")
    merged = flat(model)["model.layers.0.mlp.up_proj.weight"].clone()
    with model.disable_adapter():
        assert not torch.allclose(flat(model)["model.layers.0.mlp.up_proj.weight"], merged)
    model.merge_adapter()
    torch.testing.assert_close(flat(model)["model.layers.0.mlp.up_proj.weight"], merged)


def test_a_merged_bf16_weight_is_rounded_once():
    model = make_lora("qwen2").bfloat16()
    q = causal_lm(model).model.layers[0].self_attn.q_proj
    exact = q.base_layer.weight.double() + q.scaling["default"] * (
        q.lora_B["default"].weight.double() @ q.lora_A["default"].weight.double()
    )
    ours = flat(model)["model.layers.0.self_attn.q_proj.weight"]
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).abs().max() <= (exact.bfloat16().double() - exact).abs().max() * 1.01


@pytest.mark.parametrize("with_adapter", [False, True])
def test_4bit_weights_are_what_the_layer_multiplies_with(with_adapter):
    model = make_4bit_model("qwen2")
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    layer = causal_lm(model).model.layers[1].mlp.down_proj
    columns = layer(torch.eye(128))  # [in, out]: each row is a column of the weight
    weight = flat(model)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(weight, columns.t().detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        make_model("qwen3"),
        make_model("qwen3-tied"),
        make_lora("qwen2"),
        make_gpt2(),
        make_4bit_model("qwen2"),
    ],
    ids=["plain", "tied", "lora", "without a layout", "4 bits"],
)
def test_the_size_of_all_is_known_before_any_is_made(model):
    assert WeightSource(model).num_bytes == sum(tensor.nbytes for tensor in flat(model).values())


def test_4bit_weights_count_dequantised():
    model = make_4bit_model("qwen2")
    for part in WeightSource(model, 40_000).buckets():
        assert len(part) == 1 or sum(tensor.nbytes for _, tensor in part) <= 40_000


def test_other_adapters_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"cannot be handed to the engine.*ia3"):
        flat(get_peft_model(make_model("qwen2"), IA3Config(task_type="CAUSAL_LM")))
    with pytest.raises(ValueError, match="max_bytes=0"):
        flat(make_model("qwen2"), max_bytes=0)
