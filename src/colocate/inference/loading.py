"""Loads a saved model to generate with: weights, adapter, tokenizer and engine, without anything of
training."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from colocate.checkpoints.saved_model import SavedModel
from colocate.config.grpo_config import GRPOConfig
from colocate.engines.base import RolloutEngine
from colocate.policy.model.loading import load_tokenizer, prepare_model, stop_token_ids
from colocate.policy.model.precision import four_bit_config
from colocate.policy.model.training_mode import disable_dropout
from colocate.reporting.panel import without_bars
from colocate.run.engine import build_engine, context_length
from colocate.run.process_setup import set_up_process
from colocate.types import SamplingParams
from colocate.weights.adapter_files import read_adapter
from colocate.weights.file_reading import DamagedFile
from colocate.weights.layouts import has_layout
from colocate.weights.model_files import adapters_are_whole, naming_damage
from colocate.weights.stored_names import with_stored_names
from colocate.weights.weight_files import at, found_file, header_of, weight_files

_OF_TRAINING = (
    *("bf16", "chat_template_kwargs", "max_num_seqs", "page_size", "use_cpu"),
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_model_impl"),
)
"""Options of the run that trained a model which also hold when it generates."""
_CODE_IS_NEEDED = "contains custom code", "references custom code"
"""Words with which transformers refuses a model whose code nobody has allowed."""
_OF_4_BITS = ("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with tokenizer and configuration to generate with.

    Attributes:
        model: the causal language model, within PEFT's wrapper if it has an adapter.
    """

    saved: SavedModel
    model: Any
    tokenizer: PreTrainedTokenizerBase
    config: GRPOConfig
    accelerator: Accelerator

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together."""
        return context_length(self.model, self.config.vllm_max_model_length)[0]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        return stop_token_ids(self.tokenizer, self.model)

    def make_engine(self, sampling: SamplingParams, *, kv_cache_tokens: int | None = None) -> RolloutEngine:
        """The engine that the configuration names, or the one that suits the model; awake.

        Args:
            kv_cache_tokens: tokens for which a native engine takes a KV cache at once; if memory has room for
                fewer, its `num_cache_tokens` says for how many. Other engines see to their memory themselves.
        """
        config, takes_at_most = copy(self.config), False
        if kv_cache_tokens is not None and config.engine in ("auto", "native") and has_layout(self.model):
            config.kv_cache_tokens, takes_at_most = kv_cache_tokens, True
        engine = build_engine(self.model, config, self.accelerator, sampling)
        with warnings.catch_warnings():
            if takes_at_most:  # whoever asks for as many as there may be looks how many there are
                warnings.filterwarnings("ignore", "kv_cache_tokens=")
            engine.wake_up()
        return engine


def load(saved: SavedModel, options: Mapping[str, Any], *, is_any_base: bool = False) -> LoadedModel:
    """Load a model.

    Args:
        is_any_base: see `SavedAdapter.check_fits`.
        options: of `GRPOConfig`, and those of `RunConfig` that say in which type or how in 4 bits weights are
            loaded. They replace the options of the run that trained the model. Code that comes with a model
            is run only if these options have `trust_remote_code`; the run's own does not count.
    """
    known = {name: saved.options[name] for name in (*_OF_TRAINING, *_OF_4_BITS) if name in saved.options}
    values = {**known, **options}
    four_bits = {name: values.pop(name) for name in _OF_4_BITS if name in values}
    model_init_kwargs = at(saved.revision or saved.options.get("model_revision"))
    if "dtype" in values:
        model_init_kwargs["dtype"], values["bf16"] = values.pop("dtype"), False
    config = GRPOConfig(
        output_dir="unused", report_to="none", gradient_checkpointing=False,
        model_init_kwargs=model_init_kwargs, **values,
    )  # fmt: skip
    _say_what_does_not_hold(saved, config)
    accelerator = set_up_process(config)
    quantization = _quantization(four_bits, config) if four_bits.get("load_in_4bit") else None
    with without_bars(), _asking_for_trust(saved):
        model, _ = prepare_model(saved.base, config, accelerator.device, quantization, None, is_trained=False)
        if saved.adapter is not None:
            model = _with_adapter(model, saved, is_any_base)
    disable_dropout(model)
    model.eval().requires_grad_(False)
    own = saved.trained if found_file(saved.trained, "tokenizer_config.json") is not None else saved.base
    trust = config.trust_remote_code
    with _asking_for_trust(saved):
        with naming_damage(own):
            given = AutoTokenizer.from_pretrained(own, trust_remote_code=trust)
        tokenizer = load_tokenizer(model, given, trust_remote_code=trust)
    return LoadedModel(saved, model, tokenizer, config, accelerator)


def _say_what_does_not_hold(saved: SavedModel, config: GRPOConfig) -> None:
    """Print which options of the run were not taken, as they would run code that its directory names."""
    if saved.code.get("trust_remote_code") and not config.trust_remote_code:
        print(
            f"colocate: {saved.name} says that it was trained with trust_remote_code. Code that comes with a "
            "model is run only with --trust_remote_code.",
            file=sys.stderr,
        )
    if saved.code.get("vllm_engine_kwargs") and config.engine == "vllm":
        names = ", ".join(saved.code["vllm_engine_kwargs"])
        print(
            f"colocate: {saved.name} says that it was trained with vllm_engine_kwargs ({names}). They can "
            "name code, and are not taken from a model's directory.",
            file=sys.stderr,
        )


@contextmanager
def _asking_for_trust(saved: SavedModel) -> Iterator[None]:
    """Turn transformers' refusal to run a model's own code into an error that names the command's option."""
    try:
        yield
    except ValueError as error:
        if not any(words in str(error) for words in _CODE_IS_NEEDED):
            raise
        raise ValueError(
            f"{saved.name} is loaded by code that comes with it, which can do all that you can do. Read it "
            f"in {saved.base}; if you trust it, give --trust_remote_code."
        ) from error


def _with_adapter(model: Any, saved: SavedModel, is_any_base: bool) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(
            f"{saved.name} is an adapter, which needs PEFT: pip install 'peft>=0.18'."
        ) from error
    assert saved.adapter is not None
    _check_base(saved, is_any_base)
    with naming_damage(saved.adapter), adapters_are_whole(saved.adapter), warnings.catch_warnings():
        # PEFT asks by a name that transformers has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return PeftModel.from_pretrained(model, saved.adapter)


def _check_base(saved: SavedModel, is_any_base: bool) -> None:
    """Compare a LoRA adapter with the files of its base; the error says more than PyTorch's."""
    assert saved.adapter is not None
    try:
        adapter = read_adapter(saved.adapter)
    except DamagedFile:
        raise
    except (ValueError, FileNotFoundError):  # other than a plain LoRA: PEFT knows whether it fits
        return
    stored = {
        name: tensor
        for path in weight_files(saved.base, saved.revision)
        for name, tensor in header_of(path).items()
    }
    adapter = with_stored_names(adapter, saved.base, stored, revision=saved.revision)
    if adapter.updates.keys() & stored.keys():  # else the names are others than the modules'
        adapter.check_fits(saved.base, stored, is_any_base=is_any_base)


def _quantization(four_bits: Mapping[str, Any], config: GRPOConfig) -> Any:
    """The format that QLoRA's weights have, as `colocate train` makes it."""
    return four_bit_config(
        "bfloat16" if config.bf16 else "float32",
        quant_type=four_bits.get("bnb_4bit_quant_type", "nf4"),
        double_quantized=bool(four_bits.get("use_bnb_nested_quant", False)),
    )
