"""Names of the blocks of a model that the native engine does not compute, for messages."""

from __future__ import annotations

from typing import Any

from torch import nn

_BY_CLASS = {
    "a mixture of experts": ("experts", "moe", "router"),
    "Mamba layers": ("mamba",),
    "linear attention": ("deltanet", "linearattention", "lightningattention", "rwkv"),
    "short convolutions": ("shortconv",),
    "LayerNorm": ("layernorm",),
}
"""Blocks by what the names of their modules' classes contain; norms of transformers end in "RMSNorm"."""

_BY_OPTION = {
    "multi-head latent attention": "kv_lora_rank",
    "soft caps on attention": "attn_logit_softcapping",
    "soft caps on logits": "final_logit_softcapping",
    "attention to later tokens": "use_bidirectional_attention",
}


def missing_blocks(base: Any) -> list[str]:
    """Name the blocks of a causal language model that no row of `architectures.ARCHITECTURES` has; it may be
    that all have one, and only their combination has none."""
    config, modules = base.config, list(base.modules())
    if config.get_text_config() is not config:  # what its towers have says nothing of the text model
        return ["a text model inside a wrapper"]
    classes = {type(module).__name__.lower() for module in modules}
    rope = getattr(config, "rope_parameters", None) or {}
    blocks = [
        block for block, words in _BY_CLASS.items() if any(word in name for name in classes for word in words)
    ]
    blocks += [block for block, option in _BY_OPTION.items() if getattr(config, option, None)]
    if "llama_4_scaling_beta" in rope:
        blocks.append("a scale of queries by position")
    if any(name == "sinks" for name, _ in _own_parameters(modules)):
        blocks.append("attention sinks")
    if not any("rotary" in name for name in classes):
        blocks.append("positions without a rotary embedding")
    gates = ("gate_proj", "gate_up_proj", "experts")
    if not any(hasattr(module, gate) for module in modules for gate in gates):
        blocks.append("an MLP without a gate")
    return blocks


def _own_parameters(modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [pair for module in modules for pair in module.named_parameters(recurse=False)]
