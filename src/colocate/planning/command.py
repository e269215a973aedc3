"""`colocate plan`: whether a run fits a device, how long its steps take, and what to set if it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import RunConfig
from colocate.engines.native.eight_bit_weights import check_gpu
from colocate.planning.hardware import GPUS, Cluster, Gpu, find_gpu
from colocate.planning.plan_text import PlanReport, print_report
from colocate.planning.planner import Case
from colocate.planning.run_options import PlannedOptions, constraints_of, workload_of
from colocate.planning.slower_kernels import slower_kernels
from colocate.policy.attention.cudnn_attention import why_not_cudnn_on
from colocate.policy.model.loading import model_on_meta
from colocate.policy.model.precision import DTYPES
from colocate.weights.families import FAMILY_NAMES
from colocate.weights.layouts import Layout, layout_for
from colocate.weights.shapes import FourBit, Lora, ModelShapes

DOES_NOT_FIT = 3
"""Exit code of a run that does not fit; 1 and 2 are the exit codes of errors (`colocate.cli.main`)."""
MOST_GPUS_OF_NODE = 8


def plan_run(
    run: RunConfig,
    options: dict[str, Any],
    *,
    device_name: str | None = None,
    device_memory_gib: float | None = None,
    num_gpus: int = 1,
    num_nodes: int | None = None,
    as_json: bool = False,
    is_verbose: bool = False,
) -> int:
    """Print the plan of a run, from the model's config.json and the run's options alone.

    Args:
        options: the arguments of `GRPOConfig.from_read`.
        device_name, device_memory_gib: the GPU to plan for, by its name or its memory; if neither is given,
            the GPU of this machine.
        num_gpus: how many of them train together, in all nodes.
        num_nodes: the nodes that they are in; None: as few as hold them with `MOST_GPUS_OF_NODE` each.
        as_json: print the numbers as JSON instead of text.
        is_verbose: print every row of the arithmetic.

    Returns:
        The exit code: 0 if the run fits or there is no device to fit, else `DOES_NOT_FIT`.
    """
    is_elsewhere = device_name is not None or device_memory_gib is not None
    config = _config(options, num_gpus, is_elsewhere=is_elsewhere)
    model_config = _model_config(run, config)
    model = model_on_meta(str(run.model_name_or_path), {"config": model_config})
    layout = _layout(model)
    shapes = ModelShapes.of(
        model,
        lora=Lora(run.lora_r, run.lora_targets) if run.use_peft else None,
        four_bit=FourBit(double_quantized=run.use_bnb_nested_quant) if run.load_in_4bit else None,
    )
    gpu, device_bytes = _device(config, device_name, device_memory_gib)
    dtype = _dtype(run, config, model_config)
    capability = _capability(config, gpu, is_elsewhere=is_elsewhere)
    has_cudnn = capability is not None and why_not_cudnn_on(capability, dtype, shapes.head_size) is None
    planned = config.options_of(PlannedOptions, world_size=num_gpus, device=config.device)
    workload = workload_of(planned, shapes, dtype, is_gpu=device_bytes is not None, has_cudnn=has_cudnn)
    cluster = Cluster(num_gpus, num_nodes or -(-num_gpus // MOST_GPUS_OF_NODE), gpu)
    case = Case(shapes, workload, device_bytes, constraints_of(planned), cluster)
    slower = None
    if capability is not None:
        is_native = workload.engine == "native" and config.engine != "transformers"
        precision = config.rollout_precision
        check_gpu(precision, layout, capability, gpu.name if gpu else "the GPU here")
        slower = slower_kernels(layout, dtype, capability, is_native=is_native, rollout_precision=precision)
    report = PlanReport(
        str(run.model_name_or_path), case, cluster, case.sharding_choice(cluster), config, slower
    )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(report, is_verbose=is_verbose)
    return DOES_NOT_FIT if report.plan.fits is False else 0


def _config(options: dict[str, Any], num_ranks: int, *, is_elsewhere: bool) -> GRPOConfig:
    """The configuration of a run of `num_ranks` processes, with the precision that the planned GPU has."""
    # transformers counts the processes that there are, and here is one.
    kind: Any = GRPOConfig
    if num_ranks > 1:
        kind = type(GRPOConfig.__name__, (GRPOConfig,), {"world_size": property(lambda _: num_ranks)})
    if not is_elsewhere:
        return kind.from_read(options)
    # transformers refuses bf16=True where there is no GPU, and None would mean False.
    bf16 = options.get("bf16")
    config = kind.from_read({name: value for name, value in options.items() if name != "bf16"})
    config.bf16 = not config.use_cpu if bf16 is None else bf16
    return config


def _model_config(run: RunConfig, config: GRPOConfig) -> PretrainedConfig:
    name = str(run.model_name_or_path)
    try:
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise OSError("The directory has no config.json.")
        return AutoConfig.from_pretrained(
            name, revision=run.model_revision, trust_remote_code=config.trust_remote_code
        )
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise OSError(
            f"The configuration of {name!r} was not found: {first} A plan needs the model's config.json and "
            "no weights: without the Hub, put that file into a directory and give the directory as "
            "model_name_or_path."
        ) from error


def _layout(model: nn.Module) -> Layout:
    """The layout of a model; the error for an unsupported one has the memory that is known all the same."""
    try:
        return layout_for(model)
    except ValueError as error:
        raise ValueError(f"{error}\n{_without_plan(model)}") from error


def _without_plan(model: nn.Module) -> str:
    """The known part of the memory of a model that is not supported natively and so has no plan."""
    count = sum(parameter.numel() for parameter in model.parameters())
    weights, whole = (f"{count * num_bytes / 2**30:.1f} GiB" for num_bytes in (2, 18))
    return (
        f"Only runs of natively supported models are planned ({FAMILY_NAMES}). What is "
        f"known: {count / 1e9:.2f} billion parameters take {weights} in bfloat16. Full fine-tuning takes "
        f"18 B for each, with float32 masters, Adam's moments and gradients: {whole}, and activations on "
        "top; use_peft=True needs little more than the weights. "
        "engine='transformers' runs the model with model.generate and padded batches, several times slower "
        "than the native engine; engine='vllm' generates at vLLM's speed from a copy of the weights, another "
        f"{weights} during rollouts."
    )


def _device(
    config: GRPOConfig, device_name: str | None, device_memory_gib: float | None
) -> tuple[Gpu | None, int | None]:
    """The device's entry in the table of GPUs and its memory in bytes, each None if unknown."""
    name = device_name
    if name is None and device_memory_gib is None and config.device.type == "cuda":
        name = torch.cuda.get_device_name(config.device)
    gpu = None if name is None else find_gpu(name)
    if device_memory_gib is not None:
        return gpu, int(device_memory_gib * 2**30)
    if device_name is not None:
        if gpu is None:
            raise ValueError(
                f"--device_name {name} is not in the table of {', '.join(g.name for g in GPUS)}: give "
                "--device_memory_gib to plan for its memory"
            )
        return gpu, int(gpu.memory_gib * 2**30)
    if config.device.type == "cuda":
        return gpu, torch.cuda.get_device_properties(config.device).total_memory
    return None, None


def _capability(config: GRPOConfig, gpu: Gpu | None, *, is_elsewhere: bool) -> tuple[int, int] | None:
    """The compute capability of the GPU to plan for; None if there is none, or only its memory is known."""
    if gpu is not None or is_elsewhere or config.device.type != "cuda":
        return None if gpu is None else gpu.capability
    return torch.cuda.get_device_capability(config.device)


def _dtype(run: RunConfig, config: GRPOConfig, model_config: Any) -> torch.dtype:
    if config.bf16:
        return torch.bfloat16
    asked = (config.model_init_kwargs or {}).get("dtype") or run.dtype or "float32"
    return DTYPES.get(asked) or model_config.dtype or torch.float32
