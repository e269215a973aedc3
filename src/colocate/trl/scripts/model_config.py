"""The model of a script under TRL's names, and the trainer's arguments made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from colocate.options.requirements import AT_LEAST_ONE, BELOW_ONE, check_choice, check_range
from colocate.options.values import shown
from colocate.trl.scripts.arguments import option

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_FORMATS = ("fp4", "nf4")
_RANGES = {"lora_r": AT_LEAST_ONE, "lora_alpha": AT_LEAST_ONE, "lora_dropout": BELOW_ONE}


@dataclass
class ModelConfig:
    """A model and its adapters, as a script's command line names them. The defaults are TRL's.

    Raises:
        ValueError: a value is out of its range, or asks for what is not supported; the message says what to
            set instead.
    """

    model_name_or_path: str | None = option(None, "Model on the Hub or in a directory.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    dtype: str | None = option(
        "float32",
        "Type in which the parameters are loaded. With bf16 on, they are kept in bfloat16 afterwards, "
        "with float32 masters in the optimizer.",
        choices=list(_DTYPES),
    )
    attn_implementation: str | None = option(
        None, "Attention implementation of the trainer's forward pass, as in from_pretrained."
    )
    use_peft: bool = option(False, "Train LoRA adapters instead of the whole model.")
    lora_r: int = option(16, "Rank of the LoRA adapters.")
    lora_alpha: int = option(
        32, "Scale of the LoRA adapters: what they add is multiplied by lora_alpha / lora_r."
    )
    lora_dropout: float = option(0.05, "Probability with which dropout sets an adapter's input to 0.")
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the matrices that get adapters, or all-linear. None: PEFT's choice."},
    )
    lora_target_parameters: list[str] | None = field(
        default=None,
        metadata={"help": "Names of parameters that get adapters, where no module holds them alone."},
    )
    lora_modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Names of modules that are trained whole in addition to the adapters."},
    )
    lora_task_type: str = option("CAUSAL_LM", "PEFT's name for the kind of model; CAUSAL_LM is supported.")
    use_rslora: bool = option(
        False, "Multiply what adapters add by lora_alpha / sqrt(lora_r) (rank-stabilised LoRA)."
    )
    use_dora: bool = option(
        False, "Train the magnitudes of the weights apart from their directions (DoRA, arXiv:2402.09353)."
    )
    load_in_8bit: bool = option(False, "Keep the frozen matrices in bitsandbytes' 8 bits.")
    load_in_4bit: bool = option(False, "Keep the frozen matrices in bitsandbytes' 4 bits (QLoRA).")
    bnb_4bit_quant_type: str = option("nf4", "The 4-bit format.", choices=list(_FORMATS))
    use_bnb_nested_quant: bool = option(False, "Quantise the scales of the 4-bit weights as well.")
    bnb_4bit_quant_storage: str | None = option(
        None, "Type of the tensors that the 4-bit weights are packed into. None: uint8."
    )

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit=True and load_in_4bit=True exclude each other: set one of them.")
        if self.dtype is not None:
            check_choice("dtype", self.dtype, _DTYPES)
        check_choice("bnb_4bit_quant_type", self.bnb_4bit_quant_type, _FORMATS)
        for name, requirement in _RANGES.items():
            check_range(name, getattr(self, name), requirement)
        if self.dtype == "float16":
            raise ValueError(
                "dtype='float16' is not supported: float16 needs loss scaling, which rare large gradients "
                "upset; set dtype='bfloat16'."
            )
        if self.lora_task_type != "CAUSAL_LM":
            raise ValueError(
                f"lora_task_type={shown(self.lora_task_type)} is not supported: the trainer trains causal "
                "language models; remove it."
            )
        self.lora_target_modules = _as_peft_takes_it(self.lora_target_modules)


def _as_peft_takes_it(names: Any) -> Any:
    """The names of modules, a single one as a text: PEFT knows "all-linear" only as a text."""
    # TRL's documented command lines have commas between the names: PEFT would look for a module called
    # "q_proj,", find none and leave out q_proj silently.
    if not isinstance(names, list):
        return names
    names = [name.rstrip(",") if isinstance(name, str) else name for name in names]
    return names[0] if len(names) == 1 else names


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The adapters that `model_args` asks for, for the trainer's `peft_config`; None without `use_peft`.

    Raises:
        ImportError: PEFT is not installed.
    """
    if not model_args.use_peft:
        return None
    return lora_config(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        target_modules=model_args.lora_target_modules,
        modules_to_save=model_args.lora_modules_to_save,
        task_type=model_args.lora_task_type,
        target_parameters=model_args.lora_target_parameters,
    )


def lora_config(**options: Any) -> LoraConfig:
    """PEFT's configuration of LoRA adapters, with options of its own."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("use_peft=True needs PEFT: pip install 'peft>=0.18'") from error
    return LoraConfig(**options)


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The way to quantise the model while it loads, for the trainer's `quantization_config`; or None.

    Raises:
        ValueError: no type is given in which 4-bit weights are multiplied.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    if model_args.load_in_8bit:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_8bit=True)
    if model_args.dtype == "auto":
        raise ValueError(
            "load_in_4bit=True with dtype='auto' leaves open in which type the 4-bit weights are multiplied: "
            "set dtype='bfloat16' or 'float32'."
        )
    from colocate.policy.model.precision import four_bit_config  # loads PyTorch, which takes seconds

    return four_bit_config(
        model_args.dtype,
        quant_type=model_args.bnb_4bit_quant_type,
        double_quantized=model_args.use_bnb_nested_quant,
        storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """The `device_map` that loads a quantised model on this process's GPU; None where there is no GPU.

    TRL had this function until its scripts passed `quantization_config` to the trainer.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    from accelerate import PartialState

    return {"": PartialState().local_process_index}
