"""A LoRA adapter as PEFT saves it: the model that it belongs to, and its updates of weights.

An update adds scaling * B A to a weight W [out, in] (Hu et al. 2021, https://arxiv.org/abs/2106.09685), with
scaling = alpha / r, or alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023,
https://arxiv.org/abs/2312.03732). If a tensor has the matrices of many experts, each expert has its own A and
B, which lie in one pair of tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.weights.file_reading import DamagedFile, read_object
from colocate.weights.weight_files import StoredTensor, fingerprint, found_file, header_of, weight_files

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_FILE = "base_model.json"
"""The facts in an adapter's directory about the model below it besides PEFT's own files."""

ADAPTED = "base_model.model."
"""The prefix that PEFT puts before a module's name."""
_BEYOND_LORA = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "trainable_token_indices"),
    *(
        "use_qalora",
        "use_bdlora",
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
        "monteclora_config",
    ),
)
"""Settings of PEFT's LoRA with which an update is more than scaling * B A."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is; PiSSA's and OLoRA's take a part out of it."""


@dataclass(frozen=True)
class Experts:
    """The way in which a parameter holds the matrices of E experts."""

    num_experts: int
    is_transposed: bool
    """[E, in, out] rather than [E, out, in]."""


@dataclass(frozen=True)
class Update:
    """The update of one weight by an adapter: `scaling` times the product of two tensors in its file."""

    a_key: str  # [r, in], or [E r, in] with the first expert's rows first
    b_key: str  # [out, r], or [out, r E] with the experts' first columns first
    scaling: float
    shape: tuple[int, ...]
    experts: Experts | None = None

    def delta(self, own: Any) -> Tensor:
        """The update in float32, as `shape` says, from the adapter's open file."""
        import torch

        a, b = own.get_tensor(self.a_key).float(), own.get_tensor(self.b_key).float()
        if self.experts is None:
            return (b @ a) * self.scaling
        num_experts = self.experts.num_experts
        of_experts = a.view(num_experts, -1, a.shape[1]), b.view(len(b), -1, num_experts)
        order = "eri,ore->eio" if self.experts.is_transposed else "eri,ore->eoi"
        return torch.einsum(order, *of_experts) * self.scaling


@dataclass(frozen=True)
class Piece:
    """The part of an update that falls on one tensor of the model's files (`stored_names`)."""

    update: Update
    convert: Callable[[Tensor], dict[str, Tensor]]
    """The updates of the tensors in which the files hold a parameter, by name."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Replacement:
    """A tensor in an adapter's file that stands in for one of the base's (`modules_to_save`, trained
    biases)."""

    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedAdapter:
    """A LoRA adapter on the disk.

    Attributes:
        name: its directory, or its name on the Hub.
        base: the model that it was trained on, as its configuration names it.
        updates: by the names of the weights that they are added to: those of the model's modules, or, of
            an adapter `with_stored_names`, those in the model's files, which may hold a parameter in pieces.
        replacements: by the names of the weights that they stand in for.
        base_fingerprint: `weight_files.fingerprint` of the model that it was trained on; None: not known.
        has_parameters: whether updates are of parameters that PEFT does not name (`target_parameters`), so
            that only `with_stored_names` tells which.
    """

    name: str
    path: Path
    base: str
    revision: str | None
    updates: Mapping[str, Update | Piece]
    replacements: Mapping[str, Replacement]
    base_fingerprint: str | None
    has_parameters: bool = False

    def check_fits(self, base: str, stored: Mapping[str, StoredTensor], *, is_any_base: bool = False) -> None:
        """Refuse a base that this adapter was not trained on; with `is_any_base` only other names and
        shapes."""
        changed: dict[str, tuple[int, ...]] = {name: update.shape for name, update in self.updates.items()}
        changed |= {name: replacement.shape for name, replacement in self.replacements.items()}
        missing = [name for name in changed if name not in stored]
        differing = [name for name in changed if name in stored and stored[name].shape != changed[name]]
        trained_on = f"The adapter {self.name} was trained on {self.base!r} and does not fit {base!r}"
        if missing:
            raise ValueError(
                f"{trained_on}: {len(missing)} of the {len(changed)} weights that it changes are not in that "
                f"model, such as {missing[0]!r}. Name the model it was trained on with --base."
            )
        if differing:
            name = differing[0]
            raise ValueError(
                f"{trained_on}: {len(differing)} of the {len(changed)} weights that it changes have another "
                f"shape there, such as {name!r}: {stored[name].shape} in the model, {changed[name]} in the "
                "adapter. Name the model it was trained on with --base."
            )
        if self.base_fingerprint is None or is_any_base:
            return
        found = fingerprint({tensor.path for tensor in stored.values()})
        if found != self.base_fingerprint:
            raise ValueError(
                f"The adapter {self.name} was trained on {self.base!r}, whose weights have the fingerprint "
                f"{self.base_fingerprint[:12]}; {base!r} has the same names and shapes, and the fingerprint "
                f"{found[:12]}: other values, or another type. Name the model it was trained on with --base, "
                "or set --any_base if these are the same weights saved anew."
            )


def read_adapter(name: str) -> SavedAdapter:
    """Read an adapter's configuration and headers; its tensors stay on the disk.

    Args:
        name: its directory, or its name on the Hub.

    Raises:
        FileNotFoundError: there is no adapter.
        DamagedFile: one of its files cannot be read.
        ValueError: it is no LoRA, or one whose updates are not scaling * B A.
    """
    config_file, path = found_file(name, CONFIG), found_file(name, WEIGHTS)
    if config_file is None or path is None:
        missing = CONFIG if config_file is None else WEIGHTS
        raise FileNotFoundError(f"{name} is no adapter: it has no {missing}.")
    config = read_object(config_file)
    _check_config(name, config)
    updates: dict[str, Update] = {}
    replacements: dict[str, Replacement] = {}
    stored = header_of(path)
    if not stored:
        raise DamagedFile(path, "adapter", "it holds no tensors")
    for key, tensor in stored.items():
        module, _, part = key.removeprefix(ADAPTED).partition(".lora_")
        if not part:
            replacements[module.replace(".base_layer.", ".")] = Replacement(key, tensor.shape)
        elif part == "A.weight":
            b_key = key.replace(".lora_A.", ".lora_B.")
            _check_pair(path, key, tensor, b_key, stored.get(b_key))
            rank, scaling = _rank_and_scaling(config_file, config, module)
            # A tensor of many experts has the rows of all of them.
            if tensor.shape[0] != rank and not config.get("target_parameters"):
                why = f"{key!r} of {tensor.shape} is of another rank than the {rank} in {CONFIG}"
                raise DamagedFile(path, "adapter", why)
            shape = (stored[b_key].shape[0], tensor.shape[1])
            updates[f"{module}.weight"] = Update(key, b_key, scaling, shape)
        elif part != "B.weight":
            raise ValueError(beyond(name, f"it has the tensor {key!r}"))
        elif (a_key := key.replace(".lora_B.", ".lora_A.")) not in stored:
            raise DamagedFile(path, "adapter", f"{key!r} has no {a_key!r}")
    return SavedAdapter(
        name=name,
        path=path,
        base=str(config.get("base_model_name_or_path") or ""),
        revision=config.get("revision"),
        updates=updates,
        replacements=replacements,
        base_fingerprint=_noted_fingerprint(name),
        has_parameters=bool(config.get("target_parameters")),
    )


def note_base(directory: Path, base: str, revision: str | None = None) -> None:
    """Note next to an adapter the weights that it was trained on, so that it is never put onto others.

    Nothing is written where the base's files are not found: it may have been made in Python.
    """
    files = weight_files(base, revision, is_local_only=True) if base else []
    if files:
        noted = {"base_model_name_or_path": base, "revision": revision, "fingerprint": fingerprint(files)}
        (directory / BASE_FILE).write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")


def _noted_fingerprint(name: str) -> str | None:
    noted = found_file(name, BASE_FILE)
    return None if noted is None else read_object(noted).get("fingerprint")


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(beyond(name, f"it is of the kind {kind}"))
    for option in _BEYOND_LORA:
        if config.get(option):
            raise ValueError(beyond(name, f"it has {option}={config[option]!r}"))
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ValueError(beyond(name, f"it has init_lora_weights={start!r}, which changes the base"))


def beyond(name: str, what: str) -> str:
    """The error for an adapter that PEFT alone can merge."""
    return (
        f"The adapter {name} is not a plain LoRA: {what}. PEFT merges what it has trained: "
        "PeftModel.from_pretrained(base, adapter).merge_and_unload()."
    )


def _check_pair(path: Path, a_key: str, a: StoredTensor, b_key: str, b: StoredTensor | None) -> None:
    """Raise DamagedFile unless two tensors are the factors [r, in] and [out, r] of an update."""
    if b is None:
        raise DamagedFile(path, "adapter", f"{a_key!r} has no {b_key!r}")
    if a.dtype is None or b.dtype is None:
        raise DamagedFile(path, "adapter", f"{a_key!r} or {b_key!r} is of a type that no model is trained in")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise DamagedFile(
            path, "adapter", f"{a_key!r} of {a.shape} and {b_key!r} of {b.shape} have no product"
        )


def _rank_and_scaling(config_file: Path, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """The rank of a module's update and the factor that it is multiplied with, as PEFT reads them."""
    from peft.utils.other import get_pattern_key

    def of(name: str, patterns: str) -> Any:
        given = config.get(patterns) or {}
        if not isinstance(given, dict):
            raise DamagedFile(config_file, "adapter's configuration", f"{patterns} is {given!r:.50}")
        return given.get(get_pattern_key(list(given), module), config.get(name))

    rank, alpha = of("r", "rank_pattern"), of("lora_alpha", "alpha_pattern")
    if type(rank) is not int or rank < 1:
        raise DamagedFile(config_file, "adapter's configuration", f"a rank is {rank!r:.50}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise DamagedFile(config_file, "adapter's configuration", f"a lora_alpha is {alpha!r:.50}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
