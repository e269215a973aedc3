"""A run as a file: `GRPOConfig`'s options and what to train on what, in one flat YAML mapping.

    model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
    dataset_name: gsm8k
    reward_funcs: [accuracy_reward]
    learning_rate: 1e-6

Every key may also be given as `--key value` on the command line; that value then replaces the file's. An
unknown key is an error, and so is a value that its option cannot take.
"""

from __future__ import annotations

import enum
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from transformers import TrainerCallback

from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import MAY_BE_INFINITE, UNNECESSARY_WITH_LAYOUT, default_of, honoured
from colocate.options.redaction import check_complete, redacted
from colocate.options.requirements import AT_LEAST_ONE, BELOW_ONE, POSITIVE, check_range, ranges_of
from colocate.options.run_file import LAUNCH
from colocate.options.values import coerce, nearest, shown, types_of
from colocate.options.yaml_text import write_yaml
from colocate.reporting.messages import short_path


@dataclass
class RunConfig:
    """Options that `colocate train` passes to `GRPOTrainer` besides its `GRPOConfig`, under TRL's names.

    Raises:
        ValueError: a number of LoRA's is out of its range.
    """

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

    def __post_init__(self) -> None:
        for name, requirement in ranges_of(RunConfig).items():
            check_range(name, getattr(self, name), requirement)

    @property
    def lora_targets(self) -> list[str] | Literal["all-linear"] | None:
        """`lora_target_modules` as PEFT takes it: PEFT knows "all-linear" only as a text, not in a list."""
        return "all-linear" if self.lora_target_modules == ["all-linear"] else self.lora_target_modules


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────


def parse_run(values: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """Split options into the two records' arguments, each with the type that its field declares.

    Returns the `RunConfig` and the keyword arguments of `GRPOConfig` (which derives values as it is made).

    Raises:
        ValueError: an unknown option, a value that is not of its option's type, or one that stands for a
            secret.
    """
    check_complete(values)
    run_types, option_types = types_of(RunConfig), types_of(GRPOConfig)
    run, options = {}, {}
    for name, value in values.items():
        if name in run_types:
            run[name] = coerce(name, value, run_types[name])
        elif name in option_types:
            options[name] = coerce(name, value, option_types[name], may_be_infinite=name in MAY_BE_INFINITE)
        else:
            hint = nearest(name, [*run_types, *option_types])
            raise ValueError(f"There is no option {shown(name)}{hint or '.'}")
    return RunConfig(**run), options


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────

# Where a run is launched from, not what it is.
_NOT_SAVED = ("resume_from_checkpoint",)


def resolved(run: RunConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the run, as given or by default, so that new defaults cannot change the run later.

    A secret is replaced by its name, and a run started from the file asks for the secret
    (`colocate.options.redaction`). Values that `GRPOConfig` derives (batch sizes, bfloat16) are left as they
    were given, since they depend on the machine.
    """
    # A user who sets an option that the native engine does not need is told so: a default that is saved here
    # must not look as if the user had set it.
    saved = honoured(GRPOConfig) - UNNECESSARY_WITH_LAYOUT.keys()
    defaults = {f.name: default_of(f) for f in fields(GRPOConfig) if f.name in saved}
    values = {f.name: getattr(run, f.name) for f in fields(run)} | defaults | dict(options)
    return {
        name: value.value if isinstance(value, enum.Enum) else redacted(value, name)
        for name, value in values.items()
        if name not in _NOT_SAVED
    }


def save_run(path: Path, run: RunConfig, options: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_yaml(resolved(run, options)), encoding="utf-8")


class RunFileWriter(TrainerCallback):
    """Saves the run's options after its first step: a run that could not start has overwritten nothing."""

    def __init__(self, path: Path, run: RunConfig, options: Mapping[str, Any]) -> None:
        self._saved = (path, run, dict(options))
        self._is_saved = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and not self._is_saved:
            save_run(*self._saved)
            self._is_saved = True

    @property
    def dataset_name(self) -> str | None:
        """The dataset, as the run names it."""
        return self._saved[1].dataset_name

    @property
    def resume_command(self) -> str:
        """The command that goes on with the run."""
        command = f"colocate train {shlex.quote(short_path(self._saved[0]))} --resume_from_checkpoint auto"
        if launch := os.environ.get(LAUNCH):
            return f"{command} {launch}"
        num_processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return command if num_processes == "1" else f"torchrun --nproc_per_node {num_processes} -m {command}"
