"""vLLM's first weights: the trainer's own tensors where that is possible, else a copy of them.

vLLM stores q, k and v of a layer (and gate and up) as one matrix, one below the other, and
`weights.shared_views` lays out the trainer's weights in that way. So vLLM's parameters can be views of the
trainer's storage, and an optimizer step is published as soon as it is done. They must become views before
vLLM profiles its memory and captures graphs. Therefore the model loader does it, a public extension point of
vLLM. vLLM allocates its own parameters before and frees them then, so for a moment the weights exist twice.

The trainer's storage is not in the memory pool that vLLM's sleep drops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colocate.engines.vllm import internals
from colocate.weights.adapters import base_linear
from colocate.weights.layouts import causal_lm, has_layout, layout_for
from colocate.weights.quantized import is_4bit
from colocate.weights.shared_views import fused_view
from colocate.weights.source import WeightSource

LOAD_FORMAT = "colocate"

SHARING_DEVICE = "cuda"
"""The type of device on which vLLM's kernels read weights as they are; on a CPU vLLM packs them."""

VOCABULARY_BLOCK = 64
"""vLLM pads the rows of embedding and head to a multiple of this."""

FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""vLLM's linear layers of a decoder layer, in the order of `LayerLayout.projection_groups`."""

_sources: dict[str, SharedWeights] = {}


@dataclass
class SharedWeights:
    """The trainer's model as the source of vLLM's weights, and whether vLLM shares or copies them.

    Attributes:
        model: the trainer's module.
        wants_sharing: try to share; `why_not_shared` gave no reason and the parameters are fused.
        shared: vLLM's parameters by name, each a view of the trainer's storage; empty: vLLM has a copy.
        reason: why vLLM has a copy.
        is_plain: vLLM's kernels read the parameters in a checkpoint's form, so that new weights can be loaded
            in place. False: vLLM has packed or replaced some.
    """

    model: nn.Module
    wants_sharing: bool
    shared: dict[str, Tensor] = field(default_factory=dict)
    reason: str = ""
    is_plain: bool = False

    def check_in_place(self) -> None:
        """Raises RuntimeError when vLLM no longer reads the trainer's parameters."""
        advice = "Move, convert or wrap the model before the engine is made, or set vllm_weights='buckets'."
        try:
            present = vllm_views(self.model)
        except RuntimeError as error:
            raise RuntimeError(f"The trainer's parameters were moved after vLLM started. {advice}") from error
        moved = [name for name, view in self.shared.items() if present[name].data_ptr() != view.data_ptr()]
        if moved:
            raise RuntimeError(
                f"{len(moved)} of the trainer's parameters were moved after vLLM started, {moved[0]} first: "
                f"vLLM would go on reading the old ones. {advice}"
            )


def why_not_shared(model: nn.Module, *, tensor_parallel_size: int, model_impl: str) -> str | None:
    """Why weights cannot be shared, as far as is known before vLLM starts; None if there is no reason."""
    base: Any = causal_lm(model)
    device = next(base.parameters()).device
    if device.type != SHARING_DEVICE:
        return f"on the device {device.type!r} vLLM packs the weights for its kernels"
    if tensor_parallel_size > 1:
        return f"with vllm_tensor_parallel_size={tensor_parallel_size} each GPU holds a part of every matrix"
    if hasattr(model, "peft_config"):
        return "the policy has adapters, which are merged into the weights that vLLM gets"
    if not has_layout(model):
        return f"{type(base).__name__} has no layout that says how its matrices fuse"
    if any(is_4bit(module) for module in base.modules()):
        return "the weights are in 4 bits"
    if model_impl == "transformers":
        return "vllm_model_impl='transformers' has its own parameters"
    if (num_tokens := base.get_input_embeddings().num_embeddings) % VOCABULARY_BLOCK:
        return f"vLLM pads the vocabulary of {num_tokens} tokens to a multiple of {VOCABULARY_BLOCK}"
    return None


def vllm_views(model: nn.Module) -> dict[str, Tensor]:
    """vLLM's parameters of a model with a layout, as views of the trainer's fused storage.

    Raises:
        RuntimeError: the storage is not fused (see `fuse_parameters`).
    """
    layout = layout_for(model)
    norm: Any = layout.norm
    layers: Any = causal_lm(model).model.layers
    views: dict[str, Tensor] = {
        "model.embed_tokens.weight": layout.embed_tokens.weight.detach(),
        "model.norm.weight": norm.weight.detach(),
        # If the head is tied, vLLM has only the first of these and no parameter of this name.
        "lm_head.weight": layout.lm_head.weight.detach(),
    }
    for index, layer in enumerate(layout.layers):
        prefix = f"model.layers.{index}"
        for name, modules in zip(FUSED, layer.projection_groups(), strict=True):
            linears = [base_linear(module) for module in modules]
            views[f"{prefix}.{name}.weight"] = fused_view([linear.weight for linear in linears])
            if linears[0].bias is not None:
                views[f"{prefix}.{name}.bias"] = fused_view([linear.bias for linear in linears])
        # vLLM has transformers' names for what it does not fuse.
        names = {id(module): name for name, module in layers[index].named_modules()}
        norms: Any = layer.norms()
        views |= {f"{prefix}.{names[id(norm)]}.weight": norm.weight.detach() for norm in norms}
    return views


def num_bytes(model: nn.Module) -> int:
    """Bytes of vLLM's parameters of a model with fused storage, each counted once."""
    return sum({view.data_ptr(): view.nbytes for view in vllm_views(model).values()}.values())


def start_source(source: SharedWeights) -> tuple[dict[str, Any], str]:
    """The arguments with which vLLM loads from `source`, and the key with which to `forget` it."""
    _register()
    key = str(id(source))
    _sources[key] = source
    return {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"source": key}}, key


def forget(key: str) -> None:
    """Drop the reference to a source after the engine has started: vLLM keeps the key, not the model."""
    _sources.pop(key, None)


def _mismatch(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> str | None:
    for name, parameter in parameters.items():
        if name not in views:
            return f"vLLM has a parameter {name} that the layout does not know"
        view = views[name]
        for what in ("shape", "dtype", "device"):
            theirs, ours = getattr(parameter, what), getattr(view, what)
            if theirs != ours:
                theirs, ours = (tuple(theirs), tuple(ours)) if what == "shape" else (theirs, ours)
                return f"{name} has {what} {theirs} in vLLM and {ours} in the trainer"
        if not view.is_contiguous():
            return f"{name} is not contiguous in the trainer"
    return None


@functools.cache
def _register() -> None:
    """Register the loader with vLLM, once in a process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class TrainerLoader(BaseModelLoader):
        """Loads from the trainer's module in this process."""

        loaded: frozenset[tuple[str, int]]  # name and address of each parameter, before vLLM packs any

        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            source = _sources[self.load_config.model_loader_extra_config["source"]]
            if not (source.wants_sharing and _share(source, model)):
                with torch.no_grad():
                    model.load_weights(WeightSource(source.model).tensors())
            self.loaded = _addresses(model)

        def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            model = super().load_model(*args, **kwargs)
            internals.forget_workspaces()
            source = _sources[self.load_config.model_loader_extra_config["source"]]
            moved = sorted(self.loaded ^ _addresses(model))
            # Loading in place does not update tensors that vLLM has computed from parameters. Models with a
            # layout have none.
            source.is_plain = not moved and has_layout(source.model)
            if source.shared and moved:
                source.reason = f"vLLM has replaced {moved[0][0]} after loading it"
                source.shared = {}
            return model


def _addresses(model: nn.Module) -> frozenset[tuple[str, int]]:
    return frozenset((name, parameter.data_ptr()) for name, parameter in model.named_parameters())


def _share(source: SharedWeights, model: Any) -> bool:
    """Make vLLM's parameters views of the trainer's storage; False, with a reason noted, if they differ."""
    views = vllm_views(source.model)
    parameters = dict(model.named_parameters())
    if (reason := _mismatch(parameters, views)) is not None:
        source.reason = reason
        return False
    for name, parameter in parameters.items():
        parameter.data = views[name]
    source.shared = {name: views[name] for name in parameters}
    return True
