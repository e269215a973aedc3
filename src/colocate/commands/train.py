"""`colocate train`: makes a trainer of a run file and options, and trains.

Modules that take seconds to import (torch, transformers) are imported only after the options' names and
values are checked and the header is printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.commands.arguments import positive
from colocate.commands.run_options import (
    add_run_parser,
    require,
    require_adapters_on_4_bits,
    say_unnecessary,
    with_model_options,
)
from colocate.config.run_config import RunConfig, check_batch, read_options, read_values, split_options
from colocate.engines.registry import engine_of
from colocate.options.redaction import redacted
from colocate.parallel.ray_cluster import ClusterRequest
from colocate.version import __version__

if TYPE_CHECKING:
    from colocate.config.grpo_config import GRPOConfig

_OF_LAUNCHER = (
    *("num_nodes", "gpus_per_node", "ranks_per_node", "max_restarts", "cluster_timeout"),
    *("num_replicas", "replica_engine", "replica_gpus", "replica_placement"),
)
"""Options of the launcher, which none but Ray reads."""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    command = add_run_parser(commands, "train", "train a model", add_help=False)
    command.add_argument("-h", "--help", action=_OptionHelp, nargs=0, help="show this help message and exit")
    _add_launcher(command)


class _OptionHelp(argparse.Action):
    """Prints the help with all options, which are gathered only when somebody asks for help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from colocate.config.help import help_width, option_help

        about = textwrap.fill(str(parser.description), help_width())
        parser.description = f"{about}\n\n{option_help()}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.print_help()
        parser.exit()


def _add_launcher(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("ranks (one process per GPU) that Ray starts")
    add = group.add_argument
    add("--launcher", choices=["ray"], help="start the ranks on a Ray cluster")
    add("--num_nodes", type=positive, help="nodes to train on (default: 1)")
    add("--gpus_per_node", type=positive, help="GPUs of each node, one rank on each")
    add("--ranks_per_node", type=positive, help="ranks of each node without GPUs")
    add("--max_restarts", type=_whole, help="starts again from the last checkpoint, at most (default: 3)")
    add("--cluster_timeout", type=_whole, help="seconds to wait for the cluster to have room (default: 600)")
    add("--num_replicas", type=positive, help="rollout servers to start for the run")
    add(
        "--replica_engine",
        choices=["vllm", "native"],
        help="what they draw with (default: vllm, whose options go after --)",
    )
    add(
        "--replica_gpus",
        type=positive,
        help="GPUs of each vLLM server, tensor parallel over them (default: 1)",
    )
    add(
        "--replica_placement",
        choices=["colocated", "own"],
        help="servers on the ranks' GPUs, in turns with them (the default), or on GPUs of their own",
    )


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    file, values = read_values(known.run_options)
    values = read_options(values)
    _require_complete(values, file)
    ask = _ask(known, values.get("engine"))
    num_ranks = _num_ranks(os.environ) if ask is None else ask.num_nodes * ask.ranks_per_node
    if num_ranks is not None and not values.get("deepspeed"):  # which may set sizes of its own
        check_batch(values, num_ranks)
    if ask is not None:
        from colocate.clusters.launch import launch

        debug = ["--debug"] if known.debug else []
        own = _options_with_replicas(values) if ask.num_replicas else []
        return launch(["train", *debug, *known.run_options, *own], values, ask)
    is_main = os.environ.get("RANK", "0") == "0"
    _check_output_dir(Path(str(values.get("output_dir") or "trainer_output")), is_main)
    with _header(file, values) if is_main else nullcontext():
        _train(file, values, is_main)
    return 0


def _num_ranks(environment: Mapping[str, str]) -> int | None:
    """Ranks that the launcher has started; None: only libraries that take seconds to load can tell."""
    if "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    by_mpi = {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}
    return None if by_mpi & environment.keys() else 1


def _check_output_dir(directory: Path, is_main: bool) -> None:
    """Refuse a directory that cannot be written, or that another run writes, before data are loaded."""
    from colocate.checkpoints.lock import RunLock
    from colocate.checkpoints.sealed import check_writable

    check_writable(directory)
    with RunLock(directory, is_main=is_main):
        pass  # the trainer takes it when it trains


def _ask(known: argparse.Namespace, engine: Any = None) -> ClusterRequest | None:
    """The launch by Ray that the command line asks for; None: something else has started this process."""
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
    on_gpus = known.gpus_per_node is not None
    num_replicas = known.num_replicas or 0
    for name in () if num_replicas else ("replica_engine", "replica_gpus", "replica_placement"):
        if name in given:
            raise ValueError(f"--{name} is read with --num_replicas, which says how many there are.")
    vllm_options = known.vllm_options if num_replicas else []
    if known.replica_engine == "native":
        _check_for_native(known.replica_gpus or 1, vllm_options)
    words = ["--launcher ray", *(f"--{name} {value}" for name, value in given.items())]
    return ClusterRequest(
        known.num_nodes or 1,
        known.gpus_per_node if on_gpus else known.ranks_per_node,
        on_gpus,
        shares=1 if engine in (None, "auto") else engine_of(engine).gpu_shares,
        num_replicas=num_replicas,
        replica_size=known.replica_gpus or 1,
        replica_engine=known.replica_engine or "vllm",
        vllm_options=tuple(vllm_options),
        is_colocated=known.replica_placement != "own",
        max_restarts=3 if known.max_restarts is None else known.max_restarts,
        timeout_s=600.0 if known.cluster_timeout is None else float(known.cluster_timeout),
        words=" ".join([*words, *(["--", shlex.join(vllm_options)] if vllm_options else [])]),
    )


def _check_for_native(num_gpus: int, vllm_options: Sequence[str]) -> None:
    """Raises ValueError for native servers with options that only vLLM's have."""
    if num_gpus > 1:
        raise ValueError(
            f"--replica_gpus {num_gpus} needs --replica_engine vllm: a native server has its whole model on "
            f"one GPU. For as many GPUs set --replica_gpus 1 and {num_gpus} times as many --num_replicas."
        )
    if vllm_options:
        raise ValueError(
            f"`-- {vllm_options[0]}` is for vLLM, and --replica_engine native was asked for: set vllm, or "
            "leave out what follows the --."
        )


def _options_with_replicas(values: Mapping[str, Any]) -> list[str]:
    """The options by which ranks use the servers that are started with them."""
    if (engine := values.get("engine") or "auto") not in ("auto", "rollout_server", "vllm_server"):
        raise ValueError(
            f"--num_replicas starts rollout servers, and engine={engine!r} asks none. Set "
            "engine='rollout_server', or leave --num_replicas out."
        )
    for name in ("rollout_server_base_url", "vllm_server_base_url"):
        if values.get(name):
            raise ValueError(
                f"--num_replicas starts servers, and {name}={redacted(str(values[name]))!r} names others. "
                "Set one of the two."
            )
    on_loss = [] if values.get("vllm_on_server_loss") else ["--vllm_on_server_loss", "wait"]
    return ["--engine", "rollout_server", *on_loss]


def _train(file: Path | None, values: Mapping[str, Any], is_main: bool) -> None:
    from colocate.commands.import_ahead import importing_ahead

    with importing_ahead():
        from colocate.config.grpo_config import GRPOConfig
        from colocate.config.saved_run import RunFileWriter
        from colocate.reporting.messages import model_saved, say_row
        from colocate.reporting.panel import without_bars
        from colocate.rewards import BUILT_IN
        from colocate.run.data import RunData
        from colocate.trainer import GRPOTrainer
        from colocate.users_code.by_name import get_tool

    run, options = split_options(values)
    config = GRPOConfig.from_read(with_model_options(run, options))
    _refuse_moved(file, config)
    reward_funcs = _reward_functions(run)
    with without_bars():  # of other libraries, which would stand in the header, and fill a log
        data = RunData(run, config)
        train_dataset, eval_dataset = data.load()
        config.dataset_weights = data.weights or config.dataset_weights
        if is_main:
            say_row("left out", "; ".join(data.left_out))
            say_unnecessary(run, options)
        trainer = GRPOTrainer(
            model=run.model_name_or_path,
            reward_funcs=reward_funcs,
            args=config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=_peft_config(run),
            quantization_config=_quantization_config(run, config),
            callbacks=[RunFileWriter(config.run_dir / "config.yaml", run, options)],
            tools=[get_tool(name) for name in run.tools] or None,
            environment_factory=run.environment_factory and get_tool(run.environment_factory),
        )
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        trainer.save_model(str(config.run_dir))
    if is_main:
        is_known = run.test_split_size or not (run.datasets or run.eval_datasets)
        print(
            model_saved(
                config.run_dir,
                str(run.model_name_or_path),
                is_adapter=run.use_peft,
                held_out=eval_dataset is not None and bool(is_known),
                has_turns=bool(run.tools or run.environment_factory),
                own_rewards=run.reward_funcs if set(run.reward_funcs) - BUILT_IN.keys() else (),
                has_own_code=config.trust_remote_code,
            )
        )


def _refuse_moved(file: Path | None, config: GRPOConfig) -> None:
    """Refuse to begin anew where a run is to be resumed whose directory was moved along with its run file."""
    from colocate.checkpoints.sealed import AUTO, list_checkpoints

    if file is None or config.resume_from_checkpoint not in (True, AUTO) or list_checkpoints(config.run_dir):
        return
    if beside := list_checkpoints(file.parent):
        raise ValueError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r} looks for checkpoints in "
            f"output_dir={str(config.output_dir)!r}, where there is none, and {beside[-1]} is beside the run "
            f"file {file}. If the run's directory was moved or copied, add --output_dir "
            f"{shlex.quote(str(file.parent))}."
        )


def _header(file: Path | None, values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Print the rows of the header that are known without the model, before PyTorch is loaded."""
    from colocate.reporting.messages import begun_header

    names = [*(values.get("reward_funcs") or [])]
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
    entries = values.get("datasets") or []
    return ", ".join(
        f"{entry.get('name')} ({entry['weight']})" if "weight" in entry else f"{entry.get('name')}"
        for entry in entries
    ) or str(values.get("dataset_name"))


def _require_complete(values: Mapping[str, Any], file: Path | None = None) -> None:
    """Refuse a run without a model, data or rewards, and a run whose tracker is not installed."""
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


def _peft_config(run: RunConfig) -> Any:
    if not run.use_peft:
        return None
    from colocate.trl.scripts.model_config import lora_config

    return lora_config(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_targets,
        task_type="CAUSAL_LM",
    )


def _quantization_config(run: RunConfig, config: GRPOConfig) -> Any:
    if not run.load_in_4bit:
        return None
    require_adapters_on_4_bits(run)
    from colocate.policy.model.precision import four_bit_config

    return four_bit_config(
        "bfloat16" if config.bf16 else "float32",
        quant_type=run.bnb_4bit_quant_type,
        double_quantized=run.use_bnb_nested_quant,
    )


def _reward_functions(run: RunConfig) -> list[Any]:
    from colocate.rewards import get_reward_function

    models = [run.reward_model_name_or_path] if run.reward_model_name_or_path else []
    return [*models, *(get_reward_function(name) for name in run.reward_funcs)]
