"""The modules that an adapter is put around, where PEFT's choice would not work."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)


def without_routers(model: nn.Module, peft_config: PeftConfig) -> PeftConfig:
    """The configuration, of whose "all-linear" the routers are taken out that are linear layers and return
    more than a product (Llama 4's returns scores, too): PEFT's layer around one fails at the first token."""
    config: Any = peft_config
    if getattr(config, "target_modules", None) != "all-linear" or getattr(config, "exclude_modules", None):
        return peft_config
    routers = {
        name.rsplit(".", 1)[-1]: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is not nn.Linear.forward
        and type(module).__module__.startswith("transformers.models.")
    }
    if not routers:
        return peft_config
    config = copy.deepcopy(config)
    config.exclude_modules = sorted(routers)
    logger.warning(
        f"target_modules='all-linear' leaves out {', '.join(sorted(routers))}: {', '.join(routers.values())} "
        "returns more than a product, so that an adapter around it would fail."
    )
    return config


def refused_by_peft(model: nn.Module, peft_config: PeftConfig, error: Exception) -> ValueError:
    """The error for a configuration that PEFT refuses for a model: its words, and what to set."""
    targets = getattr(peft_config, "target_modules", None)
    return ValueError(
        f"PEFT cannot put {type(peft_config).__name__}(target_modules={targets!r}) into "
        f"{type(model).__name__}: {str(error).rstrip('.')}. Name the modules to adapt in target_modules of "
        "peft_config (lora_target_modules of a run file)."
    )
