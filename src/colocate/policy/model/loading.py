"""Loading a model and a tokenizer, and making them ready to be trained."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from colocate.options.names import with_present_names
from colocate.options.values import shown
from colocate.policy.model.options import ModelOptions
from colocate.policy.model.precision import asked_dtype, cast_to_bf16, check_types, refuse_float16
from colocate.policy.model.training_mode import disable_dropout
from colocate.weights.adapters import refused_by_peft, why_not_reproduced, why_not_trained, without_routers
from colocate.weights.fully_sharded import is_fully_sharded, shard_fully
from colocate.weights.generation_defaults import make_savable
from colocate.weights.layouts import WHOLE, WeightPart, causal_lm, has_layout, weight_part_of
from colocate.weights.model_files import adapters_are_whole, check_complete, naming_damage
from colocate.weights.part_loading import load_part
from colocate.weights.weight_files import at
from colocate.weights.weight_parts import split_weights

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = logging.getLogger(__name__)


def prepare_model(
    model: Any,
    options: ModelOptions,
    device: torch.device,
    quantization_config: Any,
    peft_config: Any,
    part: WeightPart = WHOLE,
    weight_mesh: DeviceMesh | None = None,
    *,
    is_trained: bool = True,
) -> tuple[Any, dict[str, Tensor]]:
    """A model ready to be trained, and its trainable weights as they were before a cast to bf16, whole.

    Args:
        part: the part of the weights to keep. If possible nothing else is read (`part_loading`); otherwise
            the model is loaded whole, and split before it goes to the device. A model object may hold its
            part already (`weight_parts.random_parts`).
        weight_mesh: mesh of the ranks with the parts; a model without a layout is split over it
            (`fully_sharded`).
        is_trained: refuse float16, which can generate and not be trained.
    """
    loaded = _loaded(model, options, quantization_config, part, is_trained=is_trained)
    if is_trained:
        freeze_what_text_does_not_reach(loaded)
    originals = cast_to_bf16(loaded) if options.bf16 else {}
    if is_trained:
        check_types(loaded)
        make_savable(causal_lm(loaded))
    if peft_config is not None:
        loaded = add_adapter(loaded, peft_config)
        freeze_what_text_does_not_reach(loaded)  # "all-linear" puts adapters there, too
        originals = {}  # the base is frozen now, and a frozen weight needs no master
    if options.disable_dropout:
        disable_dropout(loaded)
    if options.gradient_checkpointing and not has_layout(loaded):
        # transformers has read JSON text into a dict by now.
        enable_gradient_checkpointing(loaded, options.gradient_checkpointing_kwargs)
    if part != WHOLE and weight_part_of(loaded) != part:
        if weight_mesh is not None and not has_layout(loaded):
            shard_fully(loaded, part, weight_mesh, device)
            return loaded, originals
        split_weights(loaded, part)
    return nn.Module.to(loaded, device), originals


def _loaded(
    model: Any, options: ModelOptions, quantization_config: Any, part: WeightPart, *, is_trained: bool
) -> Any:
    """The model whole, or the part that is asked for, in the type that was asked for."""
    init_kwargs = with_present_names(options.model_init_kwargs)
    if isinstance(model, str):
        if is_trained and not options.bf16 and asked_dtype(init_kwargs, bf16=False) == torch.float16:
            refuse_float16(f"{model!r}", ", as model_init_kwargs asks for")
        init_kwargs.setdefault("trust_remote_code", options.trust_remote_code)
        if quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
    elif quantization_config is not None:
        raise ValueError(
            "quantization_config applies while a model loads, but your model is already instantiated: pass "
            "it by name, or drop quantization_config."
        )
    loaded: Any = part_of_checkpoint(model, part, bf16=bool(options.bf16), model_init_kwargs=init_kwargs)
    if loaded is None:
        loaded = load_model(model, bf16=bool(options.bf16), model_init_kwargs=init_kwargs)
    check_adapter_is_wrapped(loaded)
    if (held := weight_part_of(loaded)) not in (WHOLE, part):
        raise ValueError(
            f"Your model holds one of {held.count} parts of its weights, into which an earlier trainer has "
            f"split it, and this run asks for {part.count} (shard). Set shard={held.count}, or load what "
            "trainer.save_model() has saved."
        )
    return loaded


def part_of_checkpoint(
    model: Any, part: WeightPart, *, bf16: bool, model_init_kwargs: Mapping[str, Any]
) -> PreTrainedModel | None:
    """A model with only `part` of its weights read; None where it must be loaded whole.

    That is so for a model object, an adapter, a checkpoint that is quantised or holds more than a language
    model, and arguments that only `from_pretrained` knows; with `bf16` also for finer weights, since their
    masters are made from whole ones.
    """
    known = {"trust_remote_code", "dtype", "revision"}
    if part == WHOLE or not isinstance(model, str) or set(model_init_kwargs) - known:
        return None
    revision = model_init_kwargs.get("revision")
    dtype = asked_dtype(model_init_kwargs, bf16=bf16)
    if bf16:
        if dtype not in ("auto", torch.bfloat16):
            return None
        dtype = torch.bfloat16
    if not isinstance(dtype, torch.dtype) or _class_for(model, model_init_kwargs) is not AutoModelForCausalLM:
        return None
    try:
        config = AutoConfig.from_pretrained(
            model, trust_remote_code=bool(model_init_kwargs.get("trust_remote_code")), **at(revision)
        )
    except (OSError, ValueError):  # whoever loads it whole says what is wrong
        return None
    if getattr(config, "quantization_config", None) is not None or hasattr(config, "auto_map"):
        return None
    return load_part(model, config, part, dtype=dtype, is_stored_so=bf16, revision=revision)


def load_model(
    model: str | PreTrainedModel | PeftModel,
    *,
    bf16: bool,
    model_init_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel | PeftModel:
    """A causal language model by Hub id or path, or the object given.

    With `bf16` a model loads in its checkpoint's own precision, since `cast_to_bf16` keeps weights that are
    finer than bf16 for the masters; without `bf16` it loads in `model_init_kwargs["dtype"]` or, as in TRL,
    float32. A checkpoint that holds more than a language model is loaded whole, so that it can be saved
    whole.

    Raises:
        ValueError: an unknown dtype, `model_init_kwargs` together with a model object, or a checkpoint of
            no causal language model.
        TypeError: the object is no causal language model.
    """
    kwargs = with_present_names(model_init_kwargs)
    if not isinstance(model, str):
        if kwargs:
            raise ValueError(
                f"model_init_kwargs={shown(kwargs)} cannot apply: your model is already instantiated, as "
                f"a {type(model).__name__}. Pass it by name, or drop model_init_kwargs."
            )
        if getattr(causal_lm(model), "get_output_embeddings", lambda: None)() is None:
            raise TypeError(
                f"{type(model).__name__} is not a causal language model: it has no LM head. Load it with "
                "AutoModelForCausalLM."
            )
        return model
    kwargs["dtype"] = asked_dtype(kwargs, bf16=bf16)
    with naming_damage(model, kwargs.get("revision")), adapters_are_whole(model):
        return _load_whole(model, kwargs)


def _load_whole(name: str, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    model_class: Any = _class_for(name, kwargs)
    try:
        model, report = model_class.from_pretrained(name, output_loading_info=True, **kwargs)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise ValueError(f"The model {name!r} refuses model_init_kwargs={shown(kwargs)}: {error}") from error
    check_complete(name, report)
    return model


def model_on_meta(name: str, model_init_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """The model that `load_model` would load by this name, on the meta device, which allocates no memory."""
    kwargs = dict(model_init_kwargs)
    with naming_damage(name, kwargs.get("revision")):
        config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name, **kwargs)
    with torch.device("meta"):
        return _class_for(name, {**kwargs, "config": config}).from_config(
            config, trust_remote_code=bool(kwargs.get("trust_remote_code"))
        )


_CONFIG_OPTIONS = (
    *("trust_remote_code", "revision", "code_revision", "subfolder", "token"),
    *("cache_dir", "force_download", "local_files_only"),
)
"""The arguments of `from_pretrained` that say where a checkpoint's configuration is found."""


def _class_for(
    name: str, kwargs: Mapping[str, Any]
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class that loads a whole checkpoint; AutoModelForCausalLM may load a VLM's text part only."""
    config = kwargs.get("config")
    if config is None:
        try:
            config = AutoConfig.from_pretrained(
                name, **{k: kwargs[k] for k in _CONFIG_OPTIONS if k in kwargs}
            )
        except (OSError, ValueError):
            # An adapter's directory has no configuration. For anything else the class says what is wrong.
            return AutoModelForCausalLM
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
            return AutoModelForImageTextToText
        raise ValueError(_why_no_causal_lm(name, config))
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    is_whole = text_class.config_class is type(config) or config.architectures == [text_class.__name__]
    if is_whole or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _why_no_causal_lm(name: str, config: PretrainedConfig) -> str:
    kind = ", ".join(config.architectures or [config.model_type])
    return (
        f"model={name!r} is a {kind}, which is no causal language model. Choose one that "
        "AutoModelForCausalLM can load, or a vision-language model, which is trained on text."
    )


def freeze_what_text_does_not_reach(model: PreTrainedModel | PeftModel) -> None:
    """Freeze the vision tower and other parts that text does not reach: without images they have no gradient,
    so their moments and masters would be memory for nothing, and weight decay would shrink them."""
    lm = causal_lm(model)
    if lm.config.get_text_config() is lm.config:
        return
    text_modules = (lm.get_decoder(), lm.get_input_embeddings(), lm.get_output_embeddings())
    reached = {id(p) for module in text_modules for p in module.parameters()}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in reached]
    for parameter in frozen:
        parameter.requires_grad_(False)
    if frozen:
        logger.warning(
            f"{type(lm).__name__} is trained on text: {sum(p.numel() for p in frozen):,} parameters "
            "outside its language model, which text does not reach, stay as they are and are saved."
        )


def check_adapter_is_wrapped(model: nn.Module) -> None:
    """Check that a model with an adapter's layers is the `PeftModel` around them, which saves the adapter.
    PEFT adds the layers to the model object that it is given."""
    if hasattr(model, "peft_config") and not hasattr(model, "get_base_model"):
        raise ValueError(
            f"Your {type(model).__name__} has an adapter's layers inside, from an earlier trainer or "
            "get_peft_model, and is not the PeftModel around them. To go on with that adapter pass the "
            "PeftModel (trainer.model), without peft_config, or load it from its directory by "
            "AutoPeftModelForCausalLM.from_pretrained(directory, is_trainable=True). For another adapter, or "
            "none, load the model anew."
        )


def add_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig) -> PeftModel:
    """Wrap the model in a new adapter and freeze the rest. Call it after `cast_to_bf16`."""
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise ImportError("peft_config needs PEFT: pip install 'peft>=0.18'.") from error
    if not isinstance(peft_config, PeftConfig):
        raise TypeError(
            f"peft_config must be a PeftConfig such as LoraConfig, not {type(peft_config).__name__}."
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The model has an adapter already and peft_config asks for another. Drop peft_config to train "
            "the one there is, or merge it first: model = model.merge_and_unload()."
        )
    if (reason := why_not_reproduced(peft_config)) is not None:
        raise ValueError(f"peft_config is {reason}")
    if (reason := why_not_trained(peft_config)) is not None:
        raise ValueError(reason)
    with warnings.catch_warnings():
        # PEFT asks by a name that transformers has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        try:
            return get_peft_model(model, without_routers(model, peft_config))
        except ImportError:  # a method that needs another package, which PEFT names
            raise
        except Exception as error:  # PEFT takes many a wrong value without a look, and fails on it later
            raise refused_by_peft(model, peft_config, error) from error


def enable_gradient_checkpointing(
    model: PreTrainedModel | PeftModel, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Recompute activations in the backward pass, without re-entrant autograd unless `kwargs` asks for it.

    An architecture that does not support this keeps all its activations, and a log line says so.
    """
    if not causal_lm(model).supports_gradient_checkpointing:
        logger.warning(
            f"{type(causal_lm(model)).__name__} does not support gradient checkpointing: its activations are "
            "kept. If memory does not suffice, lower max_tokens_per_microbatch."
        )
        return
    options = {"use_reentrant": False, **(kwargs or {})}
    causal_lm(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if options["use_reentrant"] and hasattr(model, "peft_config"):
        # A re-entrant checkpoint passes gradients on only if an input needs one, which frozen embeddings do
        # not give it.
        causal_lm(model).enable_input_require_grads()


def load_tokenizer(
    model: nn.Module, processing_class: Any, *, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one saved with the model; checked against the model."""
    if processing_class is None:
        name = causal_lm(model).config.name_or_path
        if not name:
            raise ValueError(
                "The model was not loaded from anywhere, so its tokenizer is unknown: pass processing_class."
            )
        with naming_damage(name):
            processing_class = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if isinstance(processing_class, ProcessorMixin):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}, but only text can be trained on: "
            "pass its .tokenizer and prompts without images."
        )
    set_pad_token(processing_class, model)
    check_vocabulary(processing_class, model)
    return processing_class


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Raise ValueError if the tokenizer can produce an id that the embedding has no row for.

    An embedding with more rows than the tokenizer has ids is fine: it is often rounded up for the hardware.
    """
    largest = max(tokenizer.get_vocab().values())
    rows = len(causal_lm(model).get_input_embeddings().weight)
    if not is_fully_sharded(model):  # where it says how many rows the whole has
        rows *= weight_part_of(model).count
    if largest >= rows:
        raise ValueError(
            f"The tokenizer's largest token id is {largest}, but the model embeds ids 0 to {rows - 1} "
            f"({rows} rows). Use the tokenizer that belongs to the model, or call "
            f"model.resize_token_embeddings({largest + 1}) first."
        )


def set_pad_token(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> int:
    """The pad token (EOS where the tokenizer has none), made the same for tokenizer and model."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no EOS token, so no completion could end before max_completion_length. Set "
            "tokenizer.eos_token to the token that ends an answer."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    lm = causal_lm(model)
    configs = (lm.config.get_text_config(), lm.generation_config)
    # Some configurations of older models have no such setting (CodeGen, RWKV).
    others = {getattr(c, "pad_token_id", None) for c in configs} - {None, tokenizer.pad_token_id}
    if others:
        logger.warning(
            f"The tokenizer's PAD token {tokenizer.pad_token_id} differs from the model config and "
            f"generation config ({', '.join(map(str, others))}), which were aligned with the tokenizer."
        )
    for config in configs:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer.pad_token_id


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's EOS and those the model declares (end of turn)."""
    declared = causal_lm(model).generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *declared]))
