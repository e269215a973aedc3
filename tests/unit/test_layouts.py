"""A layout and a decoder stack are kept while nothing that they were made of has changed, and no longer."""

import copy
import gc
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_models import FAMILIES as ENGINE_FAMILIES
from engine_models import config_of, make_lora, make_model
from torch import nn
from transformers import AutoModelForCausalLM, Ministral3Config, Qwen3MoeConfig

from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack
from colocate.weights.architectures import ARCHITECTURES
from colocate.weights.families import FAMILIES
from colocate.weights.layouts import causal_lm, has_layout, layout_for, why_no_layout
from colocate.weights.weight_parts import why_not_split

TINY = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def replace_weight(model):
    linear = causal_lm(model).model.layers[1].mlp.down_proj.base_layer
    linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)


def replace_adapters_weight(model):
    linear = causal_lm(model).model.layers[1].mlp.down_proj.lora_B["default"]
    linear.weight = nn.Parameter(linear.weight.detach().clone())


def replace_norm(model):
    norm = causal_lm(model).model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def replace_layer(model):
    layers = causal_lm(model).model.layers
    layers[0], layers[1] = layers[1], layers[0]


def move_weight(model):
    weight = causal_lm(model).model.layers[0].self_attn.k_proj.base_layer.weight
    weight.data = weight.data.clone()


def projection(model):
    return causal_lm(model).model.layers[1].self_attn.v_proj


def lora_model():
    model = make_lora("qwen3")
    model.add_adapter("other", model.peft_config["default"])
    return model.train()


REBUILT = [replace_weight, replace_adapters_weight, replace_norm, replace_layer]
SWITCHED = [
    move_weight,
    lambda model: model.set_adapter("other"),
    lambda model: model.base_model.disable_adapter_layers(),
    lambda model: model.merge_adapter(),
    lambda model: model.eval(),
    lambda model: projection(model).set_scale("default", 3.0),
    lambda model: setattr(projection(model).lora_dropout["default"], "p", 0.3),
]


@pytest.mark.parametrize("change", REBUILT + SWITCHED)
def test_a_change_of_parts_needs_a_new_layout_and_any_change_a_new_stack(change):
    model = lora_model()
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.1)
    layout = layout_for(model)
    stack = DecoderStack(model, HostActivations())
    assert layout_for(model) is layout and stack.is_current(model)
    change(model)
    assert layout.is_current() == (change in SWITCHED)
    assert (layout_for(model) is layout) == (change in SWITCHED)
    assert not stack.is_current(model)
    assert DecoderStack(model, HostActivations()).is_current(model)


def test_what_an_adapter_added_or_a_type_cast_changes_is_found_again():
    model = lora_model()
    layout = layout_for(model)
    model.add_adapter("third", model.peft_config["default"])
    assert not layout.is_current()
    layout = layout_for(model)
    model.bfloat16()
    assert not layout.is_current()
    model.merge_and_unload()
    assert type(layout_for(model).layers[0].o) is nn.Linear


def test_steps_on_the_same_parameters_keep_layout_and_stack():
    model = lora_model()
    layout, stack = layout_for(model), DecoderStack(model, HostActivations())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
            parameter.requires_grad_(not parameter.requires_grad)
    model.eval()
    assert not stack.is_current(model)
    model.train()
    assert layout.is_current() and stack.is_current(model)


def test_a_stack_is_of_one_model():
    assert not DecoderStack(make_model("qwen3"), HostActivations()).is_current(make_model("qwen3"))


def test_an_option_that_turns_up_later_is_refused_all_the_same():
    model = make_model("qwen2")
    assert has_layout(model)
    model.config.final_logit_softcapping = 30.0
    assert not has_layout(model)


def test_a_kept_layout_keeps_no_model_alive():
    model = make_model("qwen2")
    layout, alive = layout_for(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and not layout.is_current()


def test_a_layout_goes_with_its_model_and_with_no_copy_of_it(tmp_path):
    """Its modules' hooks may lead to the model."""
    model = make_model("qwen2")
    layout_for(model)
    torch.save(model, tmp_path / "model.pt")
    assert "colocate" not in (tmp_path / "model.pt").read_bytes().decode("latin-1")
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert layout_for(copied).norm is copied.model.norm
        assert layout_for(model).norm is model.model.norm
    model.model.norm.register_forward_hook(partial(lambda owner, *_: None, model))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_every_list_of_families_names_those_that_have_a_layout():
    classes = {squeezed(kind.__name__) for kind in ARCHITECTURES}
    assert classes == {re.sub("[-. ]", "", name).lower() for name in FAMILIES}
    names = "|".join(map(re.escape, sorted(FAMILIES, key=len, reverse=True)))
    root, family = Path(__file__).parents[2], rf"(?:(?:{names})(?:\.5| 3| 2 and 3| \(2410\))?)"
    listed = re.compile(rf"{family}(?:(?:,| and| or)\s+{family}){{2,}}")
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]
    found = [(page.name, text) for page in pages for text in listed.findall(page.read_text(encoding="utf-8"))]
    assert {name for name, _ in found} >= {"README.md", "options.py"}
    assert [place for place in found if not all(name in place[1] for name in FAMILIES)] == []


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_the_page_on_installation_has_every_family_and_whether_its_weights_are_split(family):
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text(encoding="utf-8")
    rows = {row.split(" | ")[0].strip("| "): row for row in page.splitlines() if row.startswith("| ")}
    layout = layout_for(make_model(family, vocab_size=96))
    (name,) = (
        name for name in FAMILIES if re.sub("[-. ]", "", name).lower() == squeezed(layout.architecture)
    )
    assert rows[name].endswith("| yes |") == (why_not_split(layout, 2) is None)


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (
            config_of("gpt2"),
            "LayerNorm and of positions without a rotary embedding and of an MLP without a gate",
        ),
        (config_of("gemma2"), "soft caps on attention and of soft caps on logits"),
        (
            Qwen3MoeConfig(
                **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
            ),
            "a mixture of experts",
        ),
        (Ministral3Config(**TINY, head_dim=8), "a scale of queries by position"),
    ],
    ids=["gpt2", "gemma2", "qwen3_moe", "ministral3"],
)
def test_a_model_without_a_layout_is_told_which_blocks_are_missing(config, blocks):
    model = AutoModelForCausalLM.from_config(config)
    assert not has_layout(model)
    assert why_no_layout(model).startswith(f"{type(model).__name__} has no layout, for lack of {blocks}")
    with pytest.raises(ValueError, match=f"cannot run this model: .*{blocks}"):
        layout_for(model)


def squeezed(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM").replace("_", "").lower()
