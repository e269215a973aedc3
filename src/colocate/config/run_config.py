"""A run as a file: `GRPOConfig`'s options and what to train on what, in one flat YAML mapping.

    model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
    dataset_name: gsm8k
    reward_funcs: [accuracy_reward]
    learning_rate: 1e-6

Every key may also be given as `--key value` on the command line; that value then replaces the file's. An
unknown key is an error, and so is a value that its option cannot take; both are found without PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from colocate.config.batch_sizes import derive_batch_sizes
from colocate.config.grpo_options import GRPOOptions
from colocate.config.transformers_options import transformers_options
from colocate.options.declared import Option, declared
from colocate.options.names import override
from colocate.options.redaction import check_complete
from colocate.options.requirements import AT_LEAST_ONE, BELOW_ONE, POSITIVE
from colocate.options.run_file import read_file, read_overrides
from colocate.options.values import members, nearest, shown


@dataclass
class RunConfig:
    """Options that `colocate train` passes to `GRPOTrainer` besides its `GRPOConfig`, under TRL's names."""

    # ── What to train on what ────────────────────────────────────────────────────────────────────────────

    model_name_or_path: str | None = None
    """Model on the Hub or in a directory."""
    model_revision: str = "main"
    """Branch, tag or commit of the model on the Hub."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Type of the parameters. None: bfloat16 if `bf16` is on, else float32 (TRL: always float32)."""
    attn_implementation: str | None = None
    """Attention implementation of the trainer's forward pass, as in `from_pretrained`. None: transformers'
    choice."""

    use_peft: bool = False
    """Train LoRA adapters instead of the whole model."""
    lora_r: Annotated[int, AT_LEAST_ONE] = 16
    """Rank of the LoRA adapters."""
    lora_alpha: Annotated[int, AT_LEAST_ONE] = 32
    """Scale of the LoRA adapters: what they add to a layer is multiplied by lora_alpha / lora_r."""
    lora_dropout: Annotated[float, BELOW_ONE] = 0.05
    """Probability with which dropout sets an input of the adapters to 0 in training."""
    lora_target_modules: list[str] | None = None
    """Names of the matrices that get adapters, or "all-linear". None: PEFT's choice for the architecture."""

    load_in_4bit: bool = False
    """Keep the layers' frozen matrices in bitsandbytes' 4-bit format and train adapters on them (QLoRA);
    needs use_peft=True."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit format: "nf4" or "fp4"."""
    use_bnb_nested_quant: bool = False
    """Quantise the scales of the 4-bit weights as well, which saves 0.4 bits per weight."""

    dataset_name: str | None = None
    """A dataset on the Hub, a file or directory (.jsonl, .json, .parquet, .csv), or "reasoning_gym:<task>"
    for a generated task (`colocate.data.loading.load_prompts`)."""
    dataset_config: str | None = None
    """Configuration (subset) of the dataset on the Hub."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str = "test"
    """Split to evaluate on; read only if `eval_strategy` asks for evaluation."""
    dataset_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `datasets.load_dataset`, or size, seed and parameters of a generated task."""
    eval_dataset_name: str | None = None
    """Another dataset whose split "train" is evaluated on. None: `dataset_test_split` of `dataset_name`."""
    eval_dataset_options: dict[str, Any] = field(default_factory=dict)
    """The `dataset_options` of `eval_dataset_name`: such as another seed of a generated task. Its problem i
    is drawn by seed + i, so seeds must be further apart than there are problems, or both have the same
    ones."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Several datasets instead of dataset_name: in a file, mappings with name and, as far as they are needed,
    label, config, split, weight, options, and prompt_column, prompt_template, system_prompt, columns and
    max_rows for this one."""
    eval_datasets: list[dict[str, Any]] = field(default_factory=list)
    """Several datasets to evaluate on, each by itself, written like those in `datasets`."""
    test_split_size: Annotated[float | None, POSITIVE] = None
    """Hold out this share or, from 1 on, number of the training rows, and evaluate on them."""

    prompt_column: str | None = None
    """The dataset's column with the prompts. None: "prompt"."""
    prompt_template: str | None = None
    """A text that makes each prompt, with columns in braces: "{question} Think first." Two braces stand for
    one that the text has."""
    system_prompt: str | None = None
    """Text of a system message before each prompt; a prompt that is text becomes the user's message after
    it."""
    columns: dict[str, Any] = field(default_factory=dict)
    """New names of columns, as reward functions look for them: {answer: solution}. A column whose new name is
    null is left out."""
    max_rows: Annotated[int | None, AT_LEAST_ONE] = None
    """Train on the first rows of each dataset, this many at most. None: all."""
    max_eval_rows: Annotated[int | None, AT_LEAST_ONE] = None
    """Evaluate on the first rows, this many at most. None: all."""
    min_prompt_tokens: Annotated[int | None, AT_LEAST_ONE] = None
    """Leave out rows whose prompt has fewer tokens, chat template included. The run says how many there
    are."""
    max_prompt_tokens: Annotated[int | None, AT_LEAST_ONE] = None
    """Leave out rows whose prompt has more tokens; `max_prompt_length` would cut them."""

    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions: built-in names, dotted paths (`package.module.function`) or `file.py:function`."""
    reward_model_name_or_path: str | None = None
    """A reward model, on the Hub or in a directory; it comes before `reward_funcs` in `reward_weights`."""

    tools: list[str] = field(default_factory=list)
    """Functions that the model may call: dotted paths or `file.py:function`."""
    environment_factory: str | None = None
    """A class whose objects each play one episode, with their methods as tools: a dotted path or
    `file.py:Class`. Its `get_reward`, if it has one, is a reward function."""

    @property
    def lora_targets(self) -> list[str] | Literal["all-linear"] | None:
        """`lora_target_modules` as PEFT takes it: PEFT knows "all-linear" only as a text, not in a list."""
        return "all-linear" if self.lora_target_modules == ["all-linear"] else self.lora_target_modules


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────

_OFTEN_MEANT = {
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "dataset": "dataset_name",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "reward": "reward_funcs",
    "lora": "use_peft",
    "output": "output_dir",
}
"""Names that other programs have for an option, where those are spelled like another one of ours."""


@functools.cache
def run_options() -> Mapping[str, Option]:
    """Every option of a run: those of `RunConfig` and of `GRPOConfig`, by name."""
    return {**declared(RunConfig), **transformers_options(), **declared(GRPOOptions)}


def read_values(arguments: Sequence[str]) -> tuple[Path | None, dict[str, Any]]:
    """The run file that `[RUN.yaml] [--option value ...]` names, and the options of file and command line
    together, as text or YAML's values.

    Raises:
        ValueError: there is no such file or option, or an option lacks its value.
    """
    has_file = bool(arguments) and not arguments[0].startswith("-")
    file = Path(arguments[0]) if has_file else None
    values = {} if file is None else read_file(file)
    values = override(values, read_overrides(arguments[1:] if has_file else arguments))
    for name, value in values.items():
        option = _option(name)
        # An option without a value on the command line arrives as True, which only a switch can be.
        if value is True and not {bool, Any} & {*members(option.hint)}:
            raise ValueError(f"{name} needs a value: --{name} VALUE. {name}=True is not one of its values.")
    return file, values


def _option(name: str) -> Option:
    """Raises ValueError, with the name that is likely meant, where there is no such option."""
    if name in run_options():
        return run_options()[name]
    if name == "config":
        raise ValueError("There is no option 'config': a run file stands alone, colocate train RUN.yaml")
    meant = _OFTEN_MEANT.get(name)
    hint = f"; did you mean {meant!r}?" if meant else nearest(name, run_options()) or "."
    raise ValueError(f"There is no option {shown(name)}{hint}")


def read_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options, each read as its option declares (`Option.read`).

    Raises:
        ValueError: an unknown option, a value that its option does not take, or one that stands for a secret.
    """
    check_complete(values)
    return {name: _option(name).read(value) for name, value in values.items()}


def split_options(values: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """The `RunConfig` and the arguments of `GRPOConfig.from_read`, of values that have been read."""
    own = values.keys() & declared(RunConfig).keys()
    options = {name: value for name, value in values.items() if name not in own}
    return RunConfig(**{name: values[name] for name in own}), options


def parse_run(values: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """`split_options` of what `read_options` makes of the values."""
    return split_options(read_options(values))


def check_batch(values: Mapping[str, Any], num_ranks: int) -> None:
    """Refuse numbers of completions that do not hold whole groups, as `GRPOConfig` does.

    Args:
        values: options that have been read.
    """
    names = (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("generation_batch_size", "steps_per_generation", "num_generations", "num_generations_eval"),
        "eval_strategy",
    )
    batch = {name: values.get(name, run_options()[name].default) for name in names}
    derive_batch_sizes(SimpleNamespace(world_size=num_ranks, **batch))
