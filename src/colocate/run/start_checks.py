"""Ranks compare how they were started, before the model is loaded.

Nothing synchronises the ranks' weights later: each computes the same step from the same sum of gradients. A
rank with another option, dataset, model or library would drift away or hang the others, hours later and
without a word. Every rank leaves one report, and the first rank compares them (`parallel.meeting`).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.trainer_utils import SaveStrategy

from colocate.checkpoints.snapshot import checksum
from colocate.config.grpo_config import GRPOConfig
from colocate.data.fingerprint import fingerprint
from colocate.data.splits import evaluation_sets
from colocate.experience.ranks import of_all_ranks
from colocate.options.redaction import redacted
from colocate.options.values import shown
from colocate.parallel.meeting import in_words, meeting
from colocate.run.identity import LIBRARIES, versions
from colocate.users_code.source_files import sources_of
from colocate.weights.layouts import WHOLE, causal_lm, weight_part_of
from colocate.weights.weight_files import check_no_gguf

_MAY_DIFFER = (
    *("local_rank", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
    *("hub_token", "vllm_group_host", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
)
"""Options that only one rank reads, or that say how a process talks."""
_SET_BY_SAVING = ("architectures", "dtype")
"""Entries that transformers adds to a model's configuration on the rank that saves it, in an earlier run."""
_MAX_LINES = 12
_SAMPLE_ELEMENTS = 1024
"""Elements of each parameter, and kilobytes of each file, that stand for all."""

_REMEDIES = {
    "option": "give every rank the same options",
    "version of": "install the same packages on every node",
    "train_dataset": "give every rank the whole dataset, in the same order; the ranks share the prompts out "
    "themselves",
    "reward model": "give every rank the same reward models",
    "model": "give every rank the same model: the same directory, revision or, with random weights, seed",
    "source of": "give every rank the same functions and classes, in the same order; of a file that lies on "
    "each node's own disk, the same version",
}
_REMEDIES["eval_dataset"] = _REMEDIES["train_dataset"]


def check_ranks(
    args: GRPOConfig, model: Any, train_dataset: Any, eval_dataset: Any, functions: Mapping[str, Any]
) -> None:
    """Compare the ranks, and refuse a split that the model does not allow; `functions` are the user's own, by
    the argument that they are passed as."""
    check_split(args, model)
    if args.world_size < 2:
        return
    report = json.dumps(report_of(args, model, train_dataset, eval_dataset, functions))
    place = meeting()
    # Without a meeting the script has connected the ranks itself.
    verdict = place.decide(report, judge, args.ddp_timeout) if place else judge(of_all_ranks([report]))
    if verdict:
        raise ValueError(verdict)


def check_split(args: GRPOConfig, model: Any) -> None:
    """Refuse a number of parts (`shard`) into which the nodes or the model cannot be divided."""
    check_no_gguf(model)
    num_parts = args.shard
    if not isinstance(num_parts, int) or num_parts == 1:
        return
    config = _config_of(model, args).get_text_config()
    place = meeting()
    sizes = {
        "processes": args.world_size,
        "processes of a node": place.ranks_per_node if place else args.world_size,
        "attention heads": config.num_attention_heads,
        "key/value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    wrong = [
        f"{size} {name} / {num_parts} = {size / num_parts:g}"
        for name, size in sizes.items()
        if size % num_parts
    ]
    if wrong:
        fit = [str(n) for n in (1, 2, 4, 8) if not any(size % n for size in sizes.values())]
        raise ValueError(
            f"shard={num_parts} splits the weights over {num_parts} processes of one node, and these must be "
            f"whole: {'; '.join(wrong)}. For this model and start, shard may be 'auto', 'none' or "
            f"{', '.join(fit)}."
        )


def report_of(
    args: GRPOConfig, model: Any, train_dataset: Any, eval_dataset: Any, functions: Mapping[str, Any]
) -> dict[str, Any]:
    """A rank's description of itself: plain JSON without secrets, some kilobytes."""
    datasets = {"train_dataset": train_dataset}
    for name, dataset in evaluation_sets(eval_dataset).items():
        datasets[f"eval_dataset {name}".strip()] = dataset
    compared = {f"option {name}": text for name, text in _options(args).items()}
    compared |= {f"version of {name}": str(version) for name, version in _versions().items()}
    compared |= {
        f"{name}'s {part}": str(value)
        for name, dataset in datasets.items()
        if dataset is not None
        for part, value in fingerprint(dataset).items()
    }
    compared |= {f"model's {part}": text for part, text in _model(model).items()}
    compared |= {f"reward {place}": text for place, text in _reward_models(functions["reward_funcs"]).items()}
    compared |= {f"source of {place}": text for place, text in sources_of(functions).items()}
    return {
        "host": socket.gethostname(),
        "gpu": gpu_of(args),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "compared": compared,
    }


def gpu_of(args: GRPOConfig) -> str | None:
    """The identity of this rank's GPU, the same in every process; None where ranks may share one: on a CPU,
    and with gloo."""
    if args.device.type != "cuda" or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    slice_of_gpu = f"/{visible}" if visible.startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(args.device).uuid}{slice_of_gpu}"


def judge(reports: Sequence[str | None]) -> str:
    """Why ranks with these reports cannot run together; empty if they can."""
    missing = [rank for rank, report in enumerate(reports) if report is None]
    if missing:
        return (
            f"{in_words(missing).capitalize()} of {len(reports)} began, but did not come as far as loading "
            "the model within ddp_timeout seconds: see the output of these processes."
        )
    ranks = [json.loads(report) for report in reports if report is not None]
    return _shared_gpus(ranks) or _differences(ranks)


def _shared_gpus(ranks: Sequence[Mapping[str, Any]]) -> str:
    users: dict[str, list[int]] = {}
    for rank, report in enumerate(ranks):
        if report["gpu"] is not None:
            users.setdefault(report["gpu"], []).append(rank)
    for gpu, sharing in users.items():
        if len(sharing) > 1:
            host, visible = ranks[sharing[0]]["host"], ranks[sharing[0]]["visible"]
            on_host = [report for report in ranks if report["host"] == host]
            num_gpus = len({report["gpu"] for report in on_host})
            return (
                f"{in_words(sharing).capitalize()} on {host} have the same GPU ({gpu}): {len(on_host)} "
                f"processes run there on {num_gpus} GPU{'s' if num_gpus > 1 else ''} (CUDA_VISIBLE_DEVICES="
                f"{'not set' if visible is None else visible}). Start one process per GPU (torchrun "
                "--nproc_per_node, accelerate --num_processes), or let CUDA_VISIBLE_DEVICES name as many "
                "GPUs as there are processes on the node."
            )
    return ""


def _differences(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A line for each thing that is not alike on all ranks."""
    lines, kinds = [], []
    names = dict.fromkeys(name for report in ranks for name in report["compared"])
    for name in names:
        by_value: dict[str | None, list[int]] = {}
        for rank, report in enumerate(ranks):
            # A machine that has not downloaded the model yet does not know its revision.
            if name in report["compared"] or name != "model's revision":
                by_value.setdefault(report["compared"].get(name), []).append(rank)
        if len(by_value) > 1:
            values = (
                f"{'none' if value is None else value} on {in_words(having)} ({ranks[having[0]]['host']})"
                for value, having in by_value.items()
            )
            lines.append(f"  {name}: {', '.join(values)}")
            kinds += [kind for kind in _REMEDIES if name.startswith(kind)]
    if not lines:
        return ""
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  … and {len(lines) - _MAX_LINES} more"]
    remedies = "; ".join(dict.fromkeys(_REMEDIES[kind] for kind in kinds))
    return "\n".join(["The ranks of this run were not started alike:", *lines, f"To go on, {remedies}."])


def _options(args: GRPOConfig) -> dict[str, str]:
    options = {
        field.name: getattr(args, field.name, None)
        for field in dataclasses.fields(args)
        if field.name not in _MAY_DIFFER
    }
    if args.save_strategy == SaveStrategy.NO:  # else the ranks write one checkpoint together
        del options["output_dir"]
    # Scripts put the whole model onto the rank's own device with it.
    kwargs = options["model_init_kwargs"] or {}
    options["model_init_kwargs"] = {name: value for name, value in kwargs.items() if name != "device_map"}
    return {name: _text(value, name) for name, value in options.items()}


def _text(value: Any, name: str) -> str:
    """A value as text that is alike in every process; of a long one, the beginning and a digest."""
    value = value.value if isinstance(value, enum.Enum) else value
    whole, text = (
        re.sub(r" at 0x[0-9a-fA-F]+", "", shown_value)
        for shown_value in (repr(redacted(value, name)), shown(value, name))
    )
    return text if whole == text else f"{text} [{_digest(whole.encode())}]"


def _versions() -> dict[str, str | None]:
    python = ".".join(platform.python_version_tuple()[:2])
    return versions((*LIBRARIES, "triton", "tokenizers")) | {"python": python}


def _model(model: Any) -> dict[str, str]:
    """The model's description as far as it is cheap: of a loaded one the first elements of its parameters, of
    a directory its files' sizes and ends, of a name on the Hub the revision that this machine has."""
    if isinstance(model, nn.Module):
        # Ranks may have been given a part of the weights each.
        is_part = weight_part_of(model) != WHOLE
        compared = [p.detach() for p in model.parameters() if not (p.is_meta or is_part)]
        sample = [p.reshape(-1)[:_SAMPLE_ELEMENTS] for p in compared]
        config = getattr(model, "config", None)
        described = json.loads(config.to_json_string()) if isinstance(config, PretrainedConfig) else {}
        for name in _SET_BY_SAVING:
            described.pop(name, None)
        return {
            "class": type(model).__qualname__,
            "config": _digest(json.dumps(described).encode()),
            "weights": checksum(sample),
        }
    directory = Path(str(model))
    if directory.is_dir():
        files = sorted(
            p for p in directory.iterdir() if p.suffix in (".json", ".safetensors", ".bin", ".model")
        )
        return {"files": _digest(b"".join(_ends_of(file) for file in files))}
    cached = try_to_load_from_cache(str(model), "config.json")
    revision = {"revision": Path(cached).parent.name} if isinstance(cached, str) else {}
    return {"name": redacted(str(model)), **revision}


def _reward_models(reward_funcs: Any) -> dict[str, str]:
    """A cheap description of the reward models among reward functions."""
    funcs = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    return {
        f"model {number}'s {part}": text
        for number, func in enumerate(funcs)
        if isinstance(func, (str, nn.Module))
        for part, text in _model(func).items()
    }


def _config_of(model: Any, args: GRPOConfig) -> PretrainedConfig:
    if isinstance(model, nn.Module):
        return causal_lm(model).config
    revision = (args.model_init_kwargs or {}).get("revision")
    return AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, revision=revision)


def _ends_of(file: Path) -> bytes:
    size, part = file.stat().st_size, _SAMPLE_ELEMENTS * 1024
    with file.open("rb") as opened:
        begin = opened.read(part)
        opened.seek(max(size - part, 0))
        return f"{file.name} {size}".encode() + begin + opened.read(part)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
