"""The comparison at a run's start passes for every layout, and finds whatever computes something else."""

import pytest
import torch
from engine_models import CONFIGS, make_lora, make_model
from peft import LoraConfig, get_peft_model
from quantized_models import make_4bit_model
from test_policy import make_policy
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RMSNorm,
)

from colocate.policy.checks.self_check import check_stack, small_model_of
from colocate.policy.model.training_mode import disable_dropout
from colocate.policy.stack.stack import DecoderStack, runs_packed
from colocate.weights.layouts import ONE_TABLE, WeightPart, causal_lm, layout_for
from colocate.weights.weight_parts import split_weights

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.share(4)
def test_every_layout_passes_and_nothing_is_left_changed(name, dtype):
    for make in (make_model, make_lora):
        model = make(name).to(dtype)
        if make is make_lora:
            for wrapper in model.modules():
                if hasattr(wrapper, "lora_dropout"):
                    if dtype != torch.float64:  # PEFT keeps adapters in float32, and multiplies in it
                        wrapper.lora_A.float(), wrapper.lora_B.float()
                    wrapper.lora_dropout["default"] = nn.Dropout(0.5)  # the stack's own, and not compared
        causal_lm(model).model.layers[0].train()
        modes = [module.training for module in model.modules()]
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        state = torch.get_rng_state()
        check_stack(model)
        assert torch.equal(state, torch.get_rng_state())
        assert modes == [module.training for module in model.modules()]
        assert all(p.grad is None and torch.equal(p, weights[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "hunyuan_v1_dense", "olmo3"])
@pytest.mark.share(3)
def test_layers_in_4_bits_pass_with_and_without_adapters(name, dtype):
    model = make_4bit_model(name, dtype=dtype)
    check_stack(model)
    check_stack(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)))


def scaled_residual(self, hidden_states, **kwargs):
    return forwards[Qwen3DecoderLayer](self, hidden_states, **kwargs) + 0.1 * hidden_states


def scaled_attention(self, hidden_states, **kwargs):
    self.scaling = 0.5 * self.head_dim**-0.5
    return forwards[Qwen3Attention](self, hidden_states, **kwargs)


def gelu_gate(self, x):
    return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def offset_norm(self, x):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
    return ((1 + self.weight) * normed).to(x.dtype)


def detached_gate(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)).detach() * self.up_proj(x))


forwards = {cls: cls.forward for cls in (Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm)}
CHANGES = [
    (Qwen3DecoderLayer, scaled_residual, r"layer \d's output"),
    (Qwen3Attention, scaled_attention, "layer 0's output"),
    (Qwen3MLP, gelu_gate, "layer 0's output"),
    (Qwen3RMSNorm, offset_norm, "layer 0's output"),
    (Qwen3MLP, detached_gate, "the gradient of layer 0's input"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("changed", "forward", "where"), CHANGES)
def test_another_forward_is_refused_with_the_difference(monkeypatch, changed, forward, where, dtype):
    model = make_model("qwen3").to(dtype)
    if forward is scaled_attention:  # a layout reads the scale off the module, where it is what it was
        check_stack(model)
    monkeypatch.setattr(changed, "forward", forward)
    message = rf"Qwen3ForCausalLM.*{where} differs by [\d.]+ of.*{dtype}.*transformers \d.*released with"
    with pytest.raises(ValueError, match=message):
        check_stack(model)


@pytest.mark.parametrize(
    ("place", "where"),
    [("model", "layer"), ("layers", "layer"), ("norm", "the last norm's"), ("head", "the logits")],
)
def test_what_happens_between_layers_and_after_them_is_seen(monkeypatch, place, where):
    model, doubled = make_model("llama3"), lambda module, args, output: 2 * output
    if place == "model":  # Gemma scales what the embedding says, outside of it
        embed, original = model.model.embed_tokens, LlamaModel.forward

        def scaled(self, input_ids=None, inputs_embeds=None, **kwargs):
            return original(self, inputs_embeds=2 * embed(input_ids), **kwargs)

        monkeypatch.setattr(LlamaModel, "forward", scaled)
    elif place == "layers":
        model.model.layers[1].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    else:
        module = model.model.norm if place == "norm" else model.lm_head
        module.register_forward_hook(doubled, prepend=True)
    with pytest.raises(ValueError, match=where):
        check_stack(model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["resid_dropout", "embed_drop", "attention_dropout", "resid_attn_dropout"])
def test_dropout_that_the_stack_does_not_apply_is_refused_unless_it_is_off(name, dtype):
    model = make_model("phi3", resid_pdrop=0.1) if name == "resid_attn_dropout" else make_model("llama3")
    model, drop = model.to(dtype).eval(), nn.Dropout(0.1)
    rate = 0.5 if name == "attention_dropout" else 0.1
    if name == "attention_dropout":
        model.model.layers[1].self_attn.attention_dropout = rate
    elif name == "embed_drop":
        model.model.embed_drop = drop
        model.model.layers[0].register_forward_pre_hook(lambda module, args: (drop(args[0]), *args[1:]))
    elif name == "resid_dropout":
        model.model.layers[1].mlp.resid_dropout = drop
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: drop(output))
    message = rf"dropout that the stack does not apply .*{name} = {rate}\): set disable_dropout=True"
    with pytest.raises(ValueError, match=message):
        check_stack(model)
    disable_dropout(model)
    check_stack(model)


def test_a_model_whose_attention_dropout_is_off_runs_packed():
    model = make_model("seed_oss", attention_dropout=0.1, residual_dropout=0.1)
    assert not runs_packed(model)
    disable_dropout(model)
    assert runs_packed(model)
    check_stack(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padding_row_with_a_gradient_is_refused(monkeypatch, dtype):
    model = make_model("qwen3", pad_token_id=3).to(dtype)
    assert model.model.embed_tokens.padding_idx == 3
    check_stack(model)
    weight = model.model.embed_tokens.weight
    monkeypatch.setattr(DecoderStack, "embedded", lambda self, pack: F.embedding(pack.token_ids, weight))
    with pytest.raises(ValueError, match="the gradient of the embedding's parameters"):
        check_stack(model)


def test_an_adapter_that_has_learned_nothing_is_compared_by_its_gradient(monkeypatch):
    model = make_lora("qwen3")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    check_stack(model)
    for wrapper in model.modules():
        if hasattr(wrapper, "lora_A"):
            wrapper.lora_A["default"].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match="the gradient of layer 0's parameters"):
        check_stack(model)


def test_keys_with_a_large_bias_pass():
    """Qwen2's are some hundreds, which bfloat16 rounds by 1."""
    model = make_model("qwen2").bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[::7] *= 400
    check_stack(model)


def test_a_policy_is_not_made_of_a_model_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(Qwen3MLP, "forward", gelu_gate)
    with pytest.raises(ValueError, match="layer 0's output differs"):
        make_policy(make_model("qwen3"))


def test_checkpointing_does_not_hide_the_layers():
    model = make_model("llama3")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    check_stack(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_model_that_calls_a_layer_twice_is_refused(monkeypatch):
    model = make_model("llama3")
    original = LlamaForCausalLM.forward

    def twice(self, **kwargs):
        original(self, **kwargs)
        return original(self, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", twice)
    with pytest.raises(ValueError, match="makes 8 calls of its 4 modules"):
        check_stack(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_small_model_of_every_layout_passes_and_has_each_kind_of_layer(name):
    model = make_model(name, num_hidden_layers=5, pad_token_id=96)
    small = small_model_of(model)
    check_stack(small)
    kinds, of_small = (
        [(layer.sliding_window, layer.rotary) for layer in layout_for(m).layers] for m in (model, small)
    )
    assert of_small == [kind for kind in dict.fromkeys(kinds) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("scaling", "layer 0's output"),
        ("embedding_multiplier", "layer 0's output"),
        ("residual_multiplier", "layer 0's output"),
        ("logits_multiplier", "the logits"),
    ],
)
def test_a_multiplier_that_is_left_out_is_refused(name, where, dtype):
    model = make_model("granite").to(dtype)
    check_stack(model)
    object.__setattr__(layout_for(model), name, 1.0)
    with pytest.raises(ValueError, match=where):
        check_stack(model)


def test_layers_without_rotation_that_are_rotated_are_refused():
    model = make_model("smollm3")
    check_stack(model)
    layout = layout_for(model)
    assert [layer.rotary for layer in layout.layers] == [ONE_TABLE, None]
    object.__setattr__(layout.layers[1], "rotary", ONE_TABLE)
    with pytest.raises(ValueError, match="layer 1's output"):
        check_stack(model)


BLOCKS = [
    # family, of its layout or of a layer's, the block, and what the layout says instead
    ("olmo2", "layer", "attention_output_norm", None),
    ("olmo2", "layer", "mlp_output_norm", None),
    ("olmo2", "layer", "input_norm", "attention_output_norm"),
    ("olmo2", "layer", "mlp_norm", "mlp_output_norm"),
    ("olmo3", "layer", "sliding_window", None),
    ("olmo3", "layer", "rotary", "full_attention"),
    ("exaone4", "layer", "q_norm", "k_norm"),
    ("glm4", "layout", "pair_distance", 4),
    ("glm4", "layer", "mlp_norm", "input_norm"),
    ("glm", "layout", "pair_distance", None),
    ("ernie4_5", "layout", "pair_distance", None),
    ("phi3-partial-rotary", "layout", "pair_distance", 1),
    ("hunyuan_v1_dense", "layout", "norms_last", False),
    ("qwen3", "layout", "norms_last", True),
    ("helium", "layout", "norm_offset", 1.0),
    ("gemma3_text", "layout", "norm_offset", None),
    ("gemma3_text", "layout", "embedding_multiplier", 1.0),
    ("gemma3_text", "layout", "scaling", 12**-0.5),
    ("gemma3_text", "layer", "rotary", "full_attention"),
    ("gemma3_text", "layer", "sliding_window", None),
    ("gemma3_text", "layer", "activation", F.silu),
]


@pytest.mark.parametrize(("name", "where", "block", "instead"), BLOCKS)
def test_a_layout_that_says_another_block_is_refused(name, where, block, instead):
    model = make_model(name)
    check_stack(model)
    layout = layout_for(model)
    part = layout if where == "layout" else layout.layers[0]
    if isinstance(instead, str) and hasattr(part, instead):
        instead = getattr(part, instead)
    assert getattr(part, block) != instead
    object.__setattr__(part, block, instead)
    with pytest.raises(ValueError, match="layer 0's output differs"):
        check_stack(model)


def test_norms_over_each_head_in_place_of_all_are_refused():
    model = make_model("olmo2")
    layout = layout_for(model)
    for layer in layout.layers:  # the start of each weight, as if it were a head's
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.data[:] = norm.weight.data[: layout.head_dim].repeat(
                len(norm.weight) // layout.head_dim
            )
    check_stack(model)
    for layer in layout.layers:
        for name in ("q_norm", "k_norm"):
            head_norm = nn.Module()
            head_norm.weight = getattr(layer, name).weight[: layout.head_dim].detach()
            object.__setattr__(layer, name, head_norm)
    object.__setattr__(layout, "norms_whole_qk", False)
    with pytest.raises(ValueError, match="layer 0's output differs"):
        check_stack(model)


def test_a_part_of_a_changed_model_is_refused(monkeypatch):
    """transformers' modules cannot compute with a part, so it shows on a small model of the class."""
    model = make_model("qwen3", vocab_size=96)
    split_weights(model, WeightPart(1, 2))
    check_stack(model)
    monkeypatch.setattr(Qwen3Attention, "forward", scaled_attention)
    with pytest.raises(ValueError, match="layer 0's output"):
        check_stack(model)
