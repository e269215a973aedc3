"""A configuration of FSDP or DeepSpeed, translated into colocate's own options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colocate.options.values import shown

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

_CHECKPOINTING = (
    "activation_policy decides which activations are kept, and gradient_checkpointing for models "
)
ACTIVATIONS = _CHECKPOINTING + "that are not supported natively"


@dataclass(frozen=True)
class ShardingRequest:
    """The options that one configuration asks for."""

    source: str
    """The configuration's name and what it says, as messages name it: "accelerate's DeepSpeed configuration
    (zero_stage=3)"."""
    options: Mapping[str, Any]
    """Options by name: `shard` ("auto": the weights may be split; 1; "none"), `offload_optimizer`, `bf16`."""
    remarks: tuple[str, ...] = field(default=())
    """Remarks for the user, each a clause."""

    @property
    def line(self) -> str:
        """The sentence that tells the user what was read as what."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return "; ".join((f"{self.source} is read as {options}", *self.remarks)) + "."


def is_true(name: str, value: Any) -> bool:
    """A truth value of JSON, YAML or an environment variable."""
    text = str(value).lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise ValueError(f"{name}={shown(value)} must be true or false.")


def read_mapping(name: str, value: Any) -> tuple[str, Mapping[str, Any]]:
    """A mapping, or the JSON file of that name that holds one; with the text by which messages name it."""
    if isinstance(value, Mapping):
        return f"{name}={{...}}", value
    path = Path(str(value))
    if not path.is_file():
        raise ValueError(f"{name}={shown(value)} is neither a mapping nor a file that holds one as JSON.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}={shown(value)} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}={shown(value)} holds a {type(content).__name__}, but must hold a mapping.")
    return f"{name}={path.name}", content
