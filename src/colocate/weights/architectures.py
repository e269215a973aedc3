"""The families that the native engine and the packed training compute, each as a row of blocks.

A row says by fields what a family's decoder layers are made of and where its modules lie. What differs
between two models of one family, such as biases or a factor on the logits, is read from modules and
configuration (`colocate.weights.layouts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import (
    CwmForCausalLM,
    Ernie4_5ForCausalLM,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GlmForCausalLM,
    GraniteForCausalLM,
    HeliumForCausalLM,
    HunYuanDenseV1ForCausalLM,
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SeedOssForCausalLM,
    SmolLM3ForCausalLM,
)
from transformers.models.cwm.modeling_cwm import CwmAttention, CwmMLP
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention, Ernie4_5MLP
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention, Exaone4MLP
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3MLP,
    Gemma3TextScaledWordEmbedding,
)
from transformers.models.glm.modeling_glm import GlmAttention, GlmMLP
from transformers.models.glm4.modeling_glm4 import Glm4Attention, Glm4MLP
from transformers.models.granite.modeling_granite import GraniteAttention, GraniteMLP
from transformers.models.helium.modeling_helium import HeliumAttention, HeliumMLP
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1Attention,
    HunYuanDenseV1MLP,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.ministral.modeling_ministral import MinistralAttention, MinistralMLP
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2MLP
from transformers.models.olmo3.modeling_olmo3 import Olmo3Attention, Olmo3MLP
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssAttention, SeedOssMLP
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention, SmolLM3MLP

Norms = tuple[str | None, str | None, str | None, str | None]
"""Names of a layer's norms: before and after attention, before and after the MLP; None: there is none."""

BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
GLM4: Norms = (
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
)  # fmt: skip
GEMMA: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def _own_window(attention: Any, config: Any) -> int | None:
    """The window that the module of a layer keeps, if any."""
    return getattr(attention, "sliding_window", None)


def _one_window(attention: Any, config: Any) -> int | None:
    return config.sliding_window


def _window_if_sliding(attention: Any, config: Any) -> int | None:
    return attention.sliding_window if attention.is_sliding else None


@dataclass(frozen=True)
class Blocks:
    """The blocks of a family's decoder layers; where a row says nothing, they are Llama's."""

    attention: type[nn.Module]
    mlp: type[nn.Module]
    """The classes whose forward the native engine reproduces."""
    norms: Norms = BEFORE
    norm_offset: float | None = None
    """Added to the weights of norms (`kernels.definitions.rms_norm`)."""
    norms_whole_qk: bool = False
    """Whether the norms of queries and keys go over all heads of a token."""
    norms_last: bool = False
    """Whether the norms of queries and keys come after the rotation."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Names of these norms in the attention module, which may have none."""
    interleaves: bool = False
    """Whether the rotation turns neighbouring values of a head with one another, and not its halves."""
    partial_rotary: bool = False
    """Whether the family can rotate a part of each head (`partial_rotary_factor`)."""
    embedding: type[nn.Embedding] = nn.Embedding
    window: Callable[[Any, Any], int | None] = _own_window
    """The keys that a layer's query sees, given its attention and the configuration; None: all."""
    rotates: Callable[[Any, Any], bool] = lambda attention, config: True
    """Whether a layer rotates queries and keys, given its attention and the configuration."""
    rotary_by_kind: bool = False
    """Whether each kind of layer (`layer_types`) has a rotary table of its own."""


ARCHITECTURES: dict[type[nn.Module], Blocks] = {
    LlamaForCausalLM: Blocks(LlamaAttention, LlamaMLP),
    MistralForCausalLM: Blocks(MistralAttention, MistralMLP, window=_one_window),
    Phi3ForCausalLM: Blocks(Phi3Attention, Phi3MLP, window=_one_window, partial_rotary=True),
    Qwen2ForCausalLM: Blocks(Qwen2Attention, Qwen2MLP),
    Qwen3ForCausalLM: Blocks(Qwen3Attention, Qwen3MLP),
    CwmForCausalLM: Blocks(CwmAttention, CwmMLP),
    Exaone4ForCausalLM: Blocks(
        Exaone4Attention,
        Exaone4MLP,
        norms=AFTER,
        window=_window_if_sliding,
        rotates=lambda attention, config: attention.sliding_window is None or attention.is_sliding,
    ),
    GraniteForCausalLM: Blocks(GraniteAttention, GraniteMLP),
    MinistralForCausalLM: Blocks(MinistralAttention, MinistralMLP),
    Olmo2ForCausalLM: Blocks(Olmo2Attention, Olmo2MLP, norms=AFTER, norm_offset=0.0, norms_whole_qk=True),
    Olmo3ForCausalLM: Blocks(
        Olmo3Attention, Olmo3MLP, norms=AFTER, norm_offset=0.0, norms_whole_qk=True, rotary_by_kind=True
    ),
    Ernie4_5ForCausalLM: Blocks(Ernie4_5Attention, Ernie4_5MLP, interleaves=True),
    Gemma3ForCausalLM: Blocks(
        Gemma3Attention,
        Gemma3MLP,
        norms=GEMMA,
        norm_offset=1.0,
        rotary_by_kind=True,
        embedding=Gemma3TextScaledWordEmbedding,
    ),
    GlmForCausalLM: Blocks(GlmAttention, GlmMLP, interleaves=True, partial_rotary=True),
    Glm4ForCausalLM: Blocks(Glm4Attention, Glm4MLP, norms=GLM4, interleaves=True, partial_rotary=True),
    HeliumForCausalLM: Blocks(HeliumAttention, HeliumMLP, norm_offset=0.0, interleaves=True),
    HunYuanDenseV1ForCausalLM: Blocks(
        HunYuanDenseV1Attention,
        HunYuanDenseV1MLP,
        norms_last=True,
        qk_norms=("query_layernorm", "key_layernorm"),
    ),
    SeedOssForCausalLM: Blocks(SeedOssAttention, SeedOssMLP),
    SmolLM3ForCausalLM: Blocks(
        SmolLM3Attention, SmolLM3MLP, rotates=lambda attention, config: bool(attention.use_rope)
    ),
}
"""Causal language models by class."""
