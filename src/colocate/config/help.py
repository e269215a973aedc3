"""The text of `colocate train --help`, and the options by their headings."""

from __future__ import annotations

import shutil
import textwrap
from typing import NamedTuple

from colocate.config.grpo_options import GRPOOptions
from colocate.config.run_config import RunConfig, run_options
from colocate.options.declared import documented

_WIDEST, _INDENT = 110, " " * 8
_REFUSED = "Accepted so that existing scripts run"
"""Heading of the options that are not listed: `config/honoured.py` answers for these."""

_INHERITED: dict[str, dict[str, str]] = {
    "The run": {
        "output_dir": 'Directory of the run\'s checkpoints, record and model. None: "trainer_output".',
        "max_steps": "Optimizer steps of the run; -1: as many as num_train_epochs come to.",
        "num_train_epochs": "Passes over the prompts; read only if max_steps is not set.",
        "per_device_train_batch_size": "Completions per device and micro-step.",
        "gradient_accumulation_steps": "Micro-steps whose gradients are summed for one optimizer step.",
        "seed": "Seed of sampling, of the order of prompts and of new adapters.",
        "use_cpu": "Train on the CPU even if there is a GPU.",
    },
    "Optimizer": {
        "optim": "adamw_torch, adamw_bnb_8bit, sgd and others.",
        "lr_scheduler_type": "linear, cosine, constant, constant_with_warmup and others.",
        "warmup_steps": "Steps in which the learning rate rises from 0; a number below 1 is a "
        "share of the run.",
        "weight_decay": "Weight decay of AdamW on all weights but biases and norms.",
        "adam_beta1": "Decay rate of Adam's running mean of gradients.",
        "adam_beta2": "Decay rate of Adam's running mean of squared gradients.",
        "max_grad_norm": "A gradient with a larger norm is scaled down to this norm.",
    },
    "Checkpoints": {
        "save_strategy": '"steps", "epoch", "best" or "no".',
        "save_steps": "Steps between checkpoints; a number below 1 is a share of the run.",
        "save_total_limit": "Keep at most this many checkpoints. None: all.",
        "save_only_model": "Save the model alone: the run cannot be resumed from its checkpoints.",
        "load_best_model_at_end": "At the end of the run, load the weights of the best checkpoint.",
        "metric_for_best_model": "The metric that makes a checkpoint the best, such as eval_reward.",
        "push_to_hub": "Upload the model to hub_model_id at each save.",
        "hub_model_id": "Repository on the Hub. None: the name of output_dir.",
    },
    "Evaluation": {
        "eval_strategy": '"steps", "epoch" or "no".',
        "eval_steps": "Steps between evaluations. None: logging_steps.",
        "eval_on_start": "Evaluate before the first step, too.",
        "per_device_eval_batch_size": "Completions per device and evaluation batch.",
    },
    "Reports": {
        "report_to": "wandb, trackio, tensorboard and others, or a list of them.",
        "run_name": "Name of the run in these reports.",
        "logging_strategy": '"steps", "epoch" or "no".',
        "logging_first_step": "Log the first step whatever logging_steps is.",
        "disable_tqdm": "Print plain lines instead of the live panel at the bottom of the terminal.",
    },
}
"""Options of `transformers.TrainingArguments` that run files use, and what they do."""


_ORDER = (
    *(
        "What to train on what",
        *_INHERITED,
        "Defaults that differ from TrainingArguments",
        "Model",
        "Prompts",
    ),
    *("Batches. All batch sizes count completions, not prompts", "Rollout"),
    'Rollout by vLLM (engine="vllm"); the native engine has no use for these',
    'Rollout by servers (engine="rollout_server")',
    *("Loss", "Rewards", "Dynamic sampling", "Carry-over", "Turns", "Logging"),
)
"""The first headings; others follow as they stand in the sources."""


class ListedOption(NamedTuple):
    """An option as help shows it."""

    name: str
    default: str
    """The default as it is written on a command line; "None" also where it is an empty list or mapping."""
    text: str


def option_sections() -> dict[str, list[ListedOption]]:
    """All options by heading; transformers' options follow `RunConfig`'s.

    Under a heading that several classes have, the options of a base class come first. Options that are
    accepted and do nothing are left out.
    """
    sections: dict[str, list[ListedOption]] = {}
    inherited = {
        heading: [_entry(name, text) for name, text in texts.items()] for heading, texts in _INHERITED.items()
    }
    for record in (RunConfig, *GRPOOptions.__mro__[:-1]):
        own: dict[str, list[ListedOption]] = {}
        for name, (heading, text) in documented(record).items():
            own.setdefault(heading, []).append(_entry(name, text))
        for heading, options in own.items():
            sections[heading] = options + sections.get(heading, [])
        if record is RunConfig:
            sections |= inherited
    order = [name for name in (*_ORDER, *sections) if name in sections and not name.startswith(_REFUSED)]
    return {name: sections[name] for name in order}


def _entry(name: str, text: str) -> ListedOption:
    default = run_options()[name].default
    return ListedOption(name, "None" if default in ([], {}) else str(default), text)


def option_help() -> str:
    """The text of `colocate train --help`: `option_sections` in lines."""
    lines: list[str] = []
    for heading, options in option_sections().items():
        lines += ["", f"{heading}:"]
        for option in options:
            lines += _lines(option)
    further = (
        "Further options: all of transformers.TrainingArguments, but for a few that are refused by name."
    )
    lines += ["", *textwrap.wrap(further, help_width())]
    return "\n".join(lines).lstrip("\n")


def help_width() -> int:
    """Columns that help has for its lines: those of the terminal, but no more than can be read with ease."""
    return max(40, min(_WIDEST, shutil.get_terminal_size().columns - 2))


def _lines(option: ListedOption) -> list[str]:
    shown = "" if option.default == "None" else f" (default: {option.default})"
    return [
        f"  --{option.name}{shown}",
        *textwrap.wrap(
            option.text,
            help_width(),
            initial_indent=_INDENT,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
        ),
    ]
