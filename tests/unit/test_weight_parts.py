"""The parts of a model's weights: together the model, each what tensor-parallel decode reads."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from engine_models import config_of, make_model
from peft import LoraConfig, get_peft_model

from colocate.policy.model.loading import check_vocabulary, prepare_model
from colocate.weights.layouts import WHOLE, WeightPart, layout_for
from colocate.weights.shared_views import fuse_parameters, fused_view
from colocate.weights.weight_parts import random_parts, sizes_of, split_weights, splits_of, storage_of
from tiny import make_trainer

SIZES = {"vocab_size": 96}
CASES = ["llama-biases", "qwen2", "qwen3"]
"""Biases everywhere; biases of q, k and v under a tied head; norms of q and k and heads of their own size."""


def parts_of(model, count: int = 2) -> list:
    parts = [copy.deepcopy(model) for _ in range(count)]
    for index, part in enumerate(parts):
        split_weights(part, WeightPart(index, count))
    return parts


@pytest.mark.parametrize("name", CASES)
def test_parts_side_by_side_are_the_model(name):
    model = make_model(name, **SIZES)
    whole = dict(model.named_parameters())
    parts = [dict(part.named_parameters()) for part in parts_of(model)]
    assert parts[0].keys() == parts[1].keys() == whole.keys()
    for key, weights in whole.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            joined = torch.cat([part[key] for part in parts], dim=1)
            assert all(part[key].t().is_contiguous() for part in parts)
        elif "norm" in key or key.endswith(("o_proj.bias", "down_proj.bias")):
            joined = parts[0][key]
            assert torch.equal(joined, parts[1][key])
        else:
            joined = torch.cat([part[key] for part in parts])
        assert torch.equal(joined, weights), key


@pytest.mark.parametrize("name", CASES)
def test_sums_of_the_parts_outputs_are_the_models(name):
    """transformers' own modules compute a part of heads, or of the MLP, on the parameters as they are."""
    model = make_model(name, **SIZES)
    torch.manual_seed(1)
    x = torch.randn(1, 7, model.config.hidden_size)
    angles = model.model.rotary_emb(x, torch.arange(7)[None])
    for index, layer in enumerate(model.model.layers):
        theirs = [part.model.layers[index] for part in parts_of(model)]
        for linear in (theirs[1].self_attn.o_proj, theirs[1].mlp.down_proj):
            if linear.bias is not None:
                linear.bias.data.zero_()  # or it counts twice
        total = sum(other.self_attn(x, angles, None)[0] for other in theirs)
        torch.testing.assert_close(total, layer.self_attn(x, angles, None)[0])
        torch.testing.assert_close(sum(other.mlp(x) for other in theirs), layer.mlp(x))


@pytest.mark.parametrize("name", CASES)
def test_a_part_lies_as_decode_reads_it_and_stays_so(name):
    (part, _) = parts_of(make_model(name, **SIZES))
    for model in (part, copy.deepcopy(part).to(torch.bfloat16)):  # which undo the fusion
        layout = layout_for(model)
        fuse_parameters(layout, room_for_adapters=True)
        for layer in layout.layers:
            joint = fused_view([linear.weight for linear in layer.qkv])
            assert len(joint) == (layout.num_local_heads + 2 * layout.num_local_kv_heads) * layout.head_dim
            assert fused_view([linear.weight for linear in layer.gate_up]).shape == (48, 32)
            assert storage_of(layer.o.weight).shape[1] == storage_of(layer.down.weight).shape[1] == 32
        assert (layout.part, layout.num_heads, layout.num_local_heads) == (WeightPart(0, 2), 4, 2)
        assert (layout.vocab_size, len(layout.lm_head.weight)) == (96, layout.local_vocab_size) == (96, 48)


def test_every_part_is_cut_by_its_record():
    model = make_model("llama-biases", **SIZES)
    assert {split.part for split in splits_of(model).values()} == {WHOLE}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sizes_of(model) == sizes
    for part in parts_of(model):
        assert sizes_of(part) == sizes
        splits = splits_of(part)
        for name, parameter in part.named_parameters():
            full = model.get_parameter(name)
            assert torch.equal(splits[name].of_full(full), parameter)
            assert splits[name].full_shape(parameter.shape) == full.shape


@pytest.mark.parametrize(
    ("name", "options", "count", "message"),
    [
        ("phi3", {}, 2, "the weights of queries, keys and values are one matrix"),
        ("glm4", {}, 2, "the weights of gate and up are one matrix"),
        ("olmo2", {}, 2, "the norms of queries and keys go over all heads"),
        ("qwen3", {}, 4, "num_key_value_heads=2 cannot be divided by 4"),
        ("llama", {"num_key_value_heads": 4, "intermediate_size": 50}, 4, "intermediate_size=50 cannot"),
        ("llama", {"vocab_size": 97}, 2, r"resize_token_embeddings\(98\)"),
        ("llama", {"attention_dropout": 0.1}, 2, "its attention_dropout=0.1 is computed by transformers'"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(name, options, count, message):
    model = make_model(name, **SIZES | options)
    before = {key: weights.clone() for key, weights in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        split_weights(model, WeightPart(0, count))
    assert all(torch.equal(weights, before[key]) for key, weights in model.named_parameters())


def test_parts_are_not_split_again():
    (part, _) = parts_of(make_model("llama", **SIZES))
    with pytest.raises(ValueError, match="holds one of 2 parts"):
        split_weights(part, WeightPart(0, 2))


def test_a_part_is_not_taken_for_the_whole_model(tmp_path):
    """Token ids of the first half of the vocabulary are rows of part 0, which would go through all layers."""
    model = make_model("llama", **SIZES)
    (part, _) = parts_of(model)
    ids = torch.tensor([[3, 4]])
    for use in (
        lambda: part(ids),
        lambda: get_peft_model(copy.deepcopy(part), LoraConfig(target_modules=["q_proj"]))(ids),
        lambda: part.generate(ids, max_new_tokens=2),
    ):
        with pytest.raises(RuntimeError, match=r"one of 2 parts .* neither be called nor generate"):
            use()
    with pytest.raises(RuntimeError, match=r"Save them with trainer.save_model\(\)"):
        part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    assert model.generate(ids, max_new_tokens=2).shape == (1, 4)  # parts are copies


def test_a_part_of_another_trainer_is_refused(tmp_path):
    (part, _) = parts_of(make_model("llama", **SIZES))
    with pytest.raises(ValueError, match=r"one of 2 parts .* asks for 1 \(shard\). Set shard=2, or load"):
        make_trainer(tmp_path, model=part, save_strategy="no")


@pytest.mark.parametrize("name", CASES)
def test_random_parts_have_the_shapes_of_parts_and_belong_to_their_place(name):
    config = config_of(name, **SIZES)
    options = {"device": "cpu", "dtype": torch.float32}
    first, again, second = (random_parts(config, WeightPart(index, 2), **options) for index in (0, 0, 1))
    model = make_model(name, **SIZES)
    for key, parameter in parts_of(model)[0].named_parameters():
        mine, same, other = (m.get_parameter(key) for m in (first, again, second))
        assert mine.shape == parameter.shape and mine.stride() == parameter.stride()
        assert torch.equal(mine, same)
        assert torch.equal(mine, other) == (mine.ndim == 1)
    assert torch.equal(first.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == (name == "qwen2")
    assert first.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules="all-linear")])
def test_a_part_is_prepared_for_training_as_the_whole_model_is(adapter):
    options = SimpleNamespace(
        bf16=True,
        model_init_kwargs=None,
        trust_remote_code=False,
        disable_dropout=False,
        gradient_checkpointing=False,
    )
    arguments = options, torch.device("cpu"), None, adapter
    torch.manual_seed(0)
    whole, originals = prepare_model(make_model("qwen2", **SIZES), *arguments)
    torch.manual_seed(0)
    part, same_originals = prepare_model(make_model("qwen2", **SIZES), *arguments, WeightPart(1, 2))
    check_vocabulary(SimpleNamespace(get_vocab=lambda: {"last": 95}), part)
    with pytest.raises(ValueError, match=r"0 to 95 \(96 rows\)"):
        check_vocabulary(SimpleNamespace(get_vocab=lambda: {"one too many": 96}), part)
    splits = splits_of(part)
    assert {split.dim for split in splits.values()} == {0, 1, None}
    for name, parameter in part.named_parameters():
        assert torch.equal(splits[name].of_full(whole.get_parameter(name)), parameter)
        assert parameter.requires_grad == whole.get_parameter(name).requires_grad
    assert originals.keys() == same_originals.keys() and bool(originals) == (adapter is None)
    assert all(torch.equal(originals[name], same_originals[name]) for name in originals)
