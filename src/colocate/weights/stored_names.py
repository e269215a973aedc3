"""The names that an adapter's weights have in the files of its model.

PEFT names modules as they lie in memory. Files may have other names, from an older release or another
library, and may hold each expert of a mixture by itself where the model has one tensor for all:
`from_pretrained` renames and joins them. Here the same rules are followed back, on a model without memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PretrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from colocate.weights.adapter_files import ADAPTED, Experts, Piece, Replacement, SavedAdapter, Update, beyond
from colocate.weights.weight_files import StoredTensor, at


def with_stored_names(
    adapter: SavedAdapter, base: str, stored: Mapping[str, StoredTensor], *, revision: str | None = None
) -> SavedAdapter:
    """The adapter with the names that its weights have in the files of `base`, as far as they are known; the
    same adapter if it has these names, or the model's code is not transformers' own."""
    named = {*adapter.updates, *adapter.replacements}
    if not adapter.has_parameters and all(name in stored for name in named):
        return adapter
    config = AutoConfig.from_pretrained(base, **at(revision))
    if getattr(config, "auto_map", None):
        if adapter.has_parameters:
            raise ValueError(beyond(adapter.name, "it has target_parameters, in a model of its own code"))
        return adapter
    own = {name: update for name, update in adapter.updates.items() if isinstance(update, Update)}
    for model in _candidates(config):
        updates = _updates_of_parameters(adapter, own, model) if adapter.has_parameters else own
        if updates is None:
            continue
        changed = {*updates, *adapter.replacements}
        if changed <= {name for name, _ in model.named_parameters(remove_duplicate=False)}:
            return _renamed(adapter, updates, _Files(model, stored))
    return adapter


def _candidates(config: PretrainedConfig) -> Iterator[Any]:
    """The models that a checkpoint of this configuration may have been loaded as, without memory."""
    kinds = [getattr(transformers, name, None) for name in config.architectures or ()]
    kinds += [
        mapping[type(config)]
        for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
        if type(config) in mapping
    ]
    if (text := type(config.get_text_config())) in MODEL_FOR_CAUSAL_LM_MAPPING:  # loaded without its tower
        kinds.append(MODEL_FOR_CAUSAL_LM_MAPPING[text])
    for kind in dict.fromkeys(kinds):
        if kind is None:
            continue
        fits = isinstance(config, kind.config_class)
        with torch.device("meta"):
            yield kind(config if fits else config.get_text_config())


def _updates_of_parameters(
    adapter: SavedAdapter, own: Mapping[str, Update], model: Any
) -> dict[str, Update] | None:
    """Updates by `target_parameters`, which PEFT's nesting tells apart; None: they do not fit the model."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    config = LoraConfig.from_pretrained(str(adapter.path.parent))
    try:
        wrapped: Any = get_peft_model(model, config, low_cpu_mem_usage=True).base_model
    except ValueError:  # it has no such modules
        return None
    by_key = {update.a_key: update for update in own.values()}
    updates = {}
    for path, module in wrapped.model.named_modules():
        if (
            not isinstance(module, LoraLayer)
            or (known := by_key.get(f"{ADAPTED}{path}.lora_A.weight")) is None
        ):
            continue
        name = ".".join(part for part in path.split(".") if part != "base_layer")
        if isinstance(module, ParamWrapper):
            shape = tuple(module.get_param().shape)
            is_transposed = bool(getattr(module.get_base_layer(), "is_transposed", False))
            experts = Experts(shape[0], is_transposed) if len(shape) == 3 else None
            if shape[-2:] != (known.shape[::-1] if experts and is_transposed else known.shape):
                return None
            (scaling,) = module.scaling.values()
            updates[f"{name}.{module.parameter_name}"] = replace(
                known, scaling=float(scaling), shape=shape, experts=experts
            )
        else:
            updates[f"{name}.weight"] = known
    unwrapped = wrapped.unload()
    assert unwrapped is model, "PEFT works on the model that it was given"
    return updates


class _Files:
    """The layout of a model's parameters in certain files."""

    def __init__(self, model: Any, stored: Mapping[str, StoredTensor]) -> None:
        self._model = model
        conversions = get_model_conversion_mapping(model)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        meta = dict(model.state_dict())
        self._names: dict[str, str] = {}
        """The tensor of the files that is a parameter, by the parameter's name."""
        for key in stored:
            name, converter = rename_source_key(
                key, renamings, converters, base_model_prefix=model.base_model_prefix, meta_state_dict=meta
            )
            if converter is None:
                self._names[name] = key
        # As after loading: to save, transformers reverts what was of use.
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]

    def name_of(self, parameter: str) -> str:
        return self._names.get(parameter, parameter)

    def is_one(self, parameter: str) -> bool:
        """Whether a parameter is a tensor of the files, under this name or another."""
        return parameter in self._names

    def pieces(self, parameter: str, update: Update) -> dict[str, Piece]:
        def convert(delta: Tensor) -> dict[str, Tensor]:
            return dict(revert_weight_conversion(self._model, {parameter: delta}))

        whole = torch.zeros((), dtype=torch.float32).expand(update.shape)
        return {key: Piece(update, convert, tuple(part.shape)) for key, part in convert(whole).items()}


def _renamed(adapter: SavedAdapter, updates: Mapping[str, Update], files: _Files) -> SavedAdapter:
    renamed: dict[str, Update | Piece] = {}
    for name, update in updates.items():
        if files.is_one(name):
            renamed[files.name_of(name)] = update
        else:
            renamed |= files.pieces(name, update)
    replacements: dict[str, Replacement] = {files.name_of(n): r for n, r in adapter.replacements.items()}
    return replace(adapter, updates=renamed, replacements=replacements)
