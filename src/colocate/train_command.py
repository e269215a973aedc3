"""`colocate train`: reads a run file and options, makes a trainer of them and trains.

Modules that take seconds to import (torch, transformers) are imported only after the options' names are
checked and the header is printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.redaction import redacted
from colocate.run_file import read_values
from colocate.version import __version__

if TYPE_CHECKING:
    from colocate.clusters.launch import LaunchOptions
    from colocate.config import GRPOConfig
    from colocate.run_config import RunConfig

_OF_LAUNCHER = (
    *("num_nodes", "gpus_per_node", "ranks_per_node", "max_restarts", "cluster_timeout"),
    *("num_replicas", "replica_gpus", "replica_placement"),
)
"""Options of the launcher, which none but Ray reads."""


def train(known: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    file, values = read_values(rest)
    _require_complete(values, file)
    if (options := _launch_options(known, values.get("engine"))) is not None:
        from colocate.clusters.launch import launch

        debug = ["--debug"] if known.debug else []
        own = _options_with_replicas(values) if options.ask.num_replicas else []
        return launch(["train", *debug, *rest, *own], values, options)
    is_main = os.environ.get("RANK", "0") == "0"
    with _header(file, values) if is_main else nullcontext():
        _train(values, is_main)
    return 0


def _launch_options(known: argparse.Namespace, engine: Any = None) -> LaunchOptions | None:
    """What the command line says of a launch by Ray; None: something else has started this process.

    Args:
        engine: the run's option; TensorRT-LLM's workers take a share of each rank's GPU.

    Raises:
        ValueError: an option of the launcher is given without it, or the number of ranks is not.
    """
    given = {name: getattr(known, name) for name in _OF_LAUNCHER if getattr(known, name) is not None}
    if known.launcher is None:
        for name in given:
            raise ValueError(f"--{name} is read with --launcher ray; other launchers have their own.")
        return None
    if "RANK" in os.environ:
        raise ValueError(
            f"--launcher ray starts the ranks itself, and RANK={os.environ['RANK']} says that another "
            "launcher has started this process. Start the command once, without that launcher."
        )
    if (known.gpus_per_node is None) == (known.ranks_per_node is None):
        raise ValueError(
            "--launcher ray needs --gpus_per_node, or --ranks_per_node for ranks on CPUs: one of the two."
        )
    from colocate.clusters.cluster import Ask
    from colocate.clusters.launch import LaunchOptions

    on_gpus = known.gpus_per_node is not None
    num_replicas = known.num_replicas or 0
    for name in () if num_replicas else ("replica_gpus", "replica_placement"):
        if name in given:
            raise ValueError(f"--{name} is read with --num_replicas, which says how many there are.")
    vllm_options = known.vllm_options if num_replicas else []
    words = ["--launcher ray", *(f"--{name} {value}" for name, value in given.items())]
    return LaunchOptions(
        ask=Ask(
            known.num_nodes or 1,
            known.gpus_per_node if on_gpus else known.ranks_per_node,
            on_gpus,
            shares=2 if engine == "trtllm" else 1,
            num_replicas=num_replicas,
            replica_size=known.replica_gpus or 1,
            is_colocated=known.replica_placement != "own",
        ),
        max_restarts=3 if known.max_restarts is None else known.max_restarts,
        timeout_s=600.0 if known.cluster_timeout is None else float(known.cluster_timeout),
        words=" ".join([*words, *(["--", shlex.join(vllm_options)] if vllm_options else [])]),
        vllm_options=tuple(vllm_options),
    )


def _options_with_replicas(values: Mapping[str, Any]) -> list[str]:
    """The options by which ranks use the servers that are started with them.

    Raises:
        ValueError: the run has another engine, or names servers of its own.
    """
    if (engine := values.get("engine") or "auto") not in ("auto", "vllm_server"):
        raise ValueError(
            f"--num_replicas starts vLLM servers, and engine={engine!r} asks none. Set engine='vllm_server', "
            "or leave --num_replicas out."
        )
    if values.get("vllm_server_base_url"):
        raise ValueError(
            f"--num_replicas starts servers, and vllm_server_base_url="
            f"{redacted(str(values['vllm_server_base_url']))!r} names others. Set one of the two."
        )
    on_loss = [] if values.get("vllm_on_server_loss") else ["--vllm_on_server_loss", "wait"]
    return ["--engine", "vllm_server", *on_loss]


def _train(values: Mapping[str, Any], is_main: bool) -> None:
    from colocate.config import GRPOConfig
    from colocate.reporting.messages import model_saved, say_row
    from colocate.reporting.panel import without_bars
    from colocate.rewards.registry import get_tool
    from colocate.run_config import RunFileWriter, parse_run
    from colocate.run_data import RunData
    from colocate.trainer import GRPOTrainer

    run, options = parse_run(values)
    _require_complete(vars(run))
    config = GRPOConfig(**with_model_options(run, options))
    reward_funcs = _reward_functions(run)
    data = RunData(run, config)
    train_dataset, eval_dataset = data.load()
    config.dataset_weights = data.weights or config.dataset_weights
    if is_main:
        say_row("left out", "; ".join(data.left_out))
    trainer = GRPOTrainer(
        model=run.model_name_or_path,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=_peft_config(run),
        quantization_config=quantization_config(run, config),
        callbacks=[RunFileWriter(config.run_dir / "config.yaml", run, options)],
        tools=[get_tool(name) for name in run.tools] or None,
        environment_factory=run.environment_factory and get_tool(run.environment_factory),
    )
    if is_main:
        say_unnecessary(options)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    with without_bars():  # one would stand between the lines that say where everything is
        trainer.save_model(str(config.run_dir))
    if is_main:
        several = run.datasets or run.eval_datasets or run.test_split_size
        print(
            model_saved(
                config.run_dir,
                str(run.model_name_or_path),
                is_adapter=run.use_peft,
                held_out=eval_dataset is not None and not several,
            )
        )


def _header(file: Path | None, values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Print the rows of the header that are known without the model, before PyTorch is loaded."""
    from colocate.reporting.messages import begun_header

    rewards = values.get("reward_funcs") or []
    names = [rewards] if isinstance(rewards, str) else [str(name) for name in rewards]
    if values.get("reward_model_name_or_path"):
        names.insert(0, str(values["reward_model_name_or_path"]))
    if values.get("environment_factory"):
        names.append(str(values["environment_factory"]))
    rows = {
        "model": str(values["model_name_or_path"]),
        "data": _data_in_words(values),
        "rewards": ", ".join(names),
        "output": str(values.get("output_dir") or "trainer_output"),
    }
    title = " ".join(["colocate", __version__, "train", *([str(file)] if file else [])])
    return begun_header(title, {label: redacted(text) for label, text in rows.items()})


def _data_in_words(values: Mapping[str, Any]) -> str:
    """The name of the dataset, or the names and weights of several."""
    if not isinstance(entries := values.get("datasets"), list) or not entries:
        return str(values.get("dataset_name") or entries)
    known = [entry for entry in entries if isinstance(entry, Mapping)]
    return ", ".join(
        f"{entry.get('name')} ({entry['weight']})" if "weight" in entry else f"{entry.get('name')}"
        for entry in known
    )


def _require_complete(values: Mapping[str, Any], file: Path | None = None) -> None:
    """Refuse a run without a model, data or rewards, and a run whose tracker is not installed.

    If the model's directory is missing, the message quotes the run file's first comment, which may say how to
    make the model.

    Raises:
        ValueError, ImportError: with the option, or with what to install.
    """
    from colocate.reporting.trackers import check_installed

    data = () if values.get("datasets") else ("dataset_name",)
    require(values, "model_name_or_path", *data, hint=_head_of(file) if file else "")
    if not any(map(values.get, ("reward_funcs", "reward_model_name_or_path", "environment_factory"))):
        raise ValueError("reward_funcs is not set: name at least one, e.g. --reward_funcs accuracy_reward")
    check_installed(values.get("report_to"))


def _head_of(file: Path) -> str:
    """The comment at the beginning of a run file, if the word "model" is in it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.strip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    return f". {file} says: {comment}" if "model" in comment else ""


def require(values: Mapping[str, Any], *names: str, hint: str = "") -> None:
    """Raises ValueError where an option is not set, or the model is a directory that is not there."""
    for name in names:
        if not values.get(name):
            raise ValueError(f"{name} is not set: add it to the run file or give --{name}")
    name = str(values["model_name_or_path"])
    # A name on the Hub has at most one slash; the Hub's client tries many times to reach any other name.
    if (name.count("/") > 1 or name.startswith((".", "/", "~"))) and not Path(name).is_dir():
        raise ValueError(
            f"There is no directory {name!r}: set model_name_or_path to a model's directory or its name on "
            f"the Hub"
            f"{hint}"
        )


def with_model_options(run: RunConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `GRPOConfig`, with `RunConfig`'s revision, dtype and attention added to
    `model_init_kwargs`; a value that the user has set in `model_init_kwargs` is kept."""
    model_options = {"revision": run.model_revision}
    if run.dtype is not None:
        model_options["dtype"] = run.dtype
    if run.attn_implementation is not None:
        model_options["attn_implementation"] = run.attn_implementation
    return {**options, "model_init_kwargs": {**model_options, **(options.get("model_init_kwargs") or {})}}


def _peft_config(run: RunConfig) -> Any:
    if not run.use_peft:
        return None
    from colocate.scripts.model_config import lora_config

    return lora_config(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_targets,
        task_type="CAUSAL_LM",
    )


def quantization_config(run: RunConfig, config: GRPOConfig) -> Any:
    if not run.load_in_4bit:
        return None
    require_adapters_on_4_bits(run)
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=run.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=run.use_bnb_nested_quant,
        # The engine and the trainer multiply in the type of the model's other weights.
        bnb_4bit_compute_dtype=torch.bfloat16 if config.bf16 else torch.float32,
    )


def require_adapters_on_4_bits(run: RunConfig) -> None:
    """Raises ValueError for 4-bit weights without adapters: they are frozen, so nothing would be trained."""
    if run.load_in_4bit and not run.use_peft:
        raise ValueError("load_in_4bit=True freezes the weights, and nothing is left to train: set use_peft")


def say_unnecessary(options: dict[str, Any]) -> None:
    """Print one line for each option that the user has set and a natively supported model does not read."""
    from colocate.options import UNNECESSARY_WITH_LAYOUT

    for name in sorted(options.keys() & UNNECESSARY_WITH_LAYOUT.keys()):
        reason = UNNECESSARY_WITH_LAYOUT[name]
        print(f"{name}={options[name]!r} is not needed: {reason}.", file=sys.stderr)


def _reward_functions(run: RunConfig) -> list[Any]:
    from colocate.rewards import get_reward_function

    models = [run.reward_model_name_or_path] if run.reward_model_name_or_path else []
    return [*models, *(get_reward_function(name) for name in run.reward_funcs)]
