"""LoRA adapters read where PEFT keeps them.

Nothing is merged or copied: a projection's output is W x + sum_i scaling_i * B_i (A_i x), Hu et al. 2021,
https://arxiv.org/abs/2106.09685, with the A_i and B_i that PEFT's own forward would use at this moment.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class Adapter:
    """One low-rank update of a linear layer: x -> scaling * B(A x)."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    bias: Tensor | None  # [out]
    scaling: float
    dropout: float
    """Probability with which training drops an input; an engine drops none."""

    def add_to(self, output: Tensor, x: Tensor) -> None:
        """Add the update for `x` [T, in] to `output` [T, out] in place, in x's type.

        Where x has a 16-bit type, three things are rounded to it: A and B, then t = A x, then output +
        scaling * B t. Sums are in float32. The trainer's forward rounds at the same three places.
        """
        t = F.linear(x, self.a.to(x.dtype))
        output.addmm_(t, self.b.to(x.dtype).t(), alpha=self.scaling)
        if self.bias is not None:
            output.add_(self.bias.to(x.dtype), alpha=self.scaling)


MAX_STACKED = 3
"""A stack holds at most three adapters, as the fused projection of q, k and v has."""
MAX_STACKED_RANK = 256


def padded_rank(rank: int) -> int:
    """The rank with which the engine's kernels compute: a power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


@dataclass(frozen=True)
class AdapterStack:
    """A projection's adapters, whose A can lie one below the other: one product computes every A x.

    They lie below the weights, so that it computes W x, too, or in a place of their own. Each adapter has
    `padded_rank` rows; the contents of rows that it does not fill are not used.
    """

    adapters: tuple[Adapter, ...]
    columns: tuple[slice, ...]
    """The columns of the projection's output that each adapter adds to."""

    @classmethod
    def of(cls, adapters: Sequence[tuple[slice, Adapter]]) -> AdapterStack | None:
        """The stack of `adapters`; None if there are none or they do not fit into one.

        At most three adapters fit, of ranks up to 256, without bias, no two for the same columns.
        """
        starts = [columns.start for columns, _ in adapters]
        fits = 0 < len(starts) == len(set(starts)) <= MAX_STACKED and all(
            adapter.bias is None and len(adapter.a) <= MAX_STACKED_RANK and adapter.b.is_contiguous()
            for _, adapter in adapters
        )
        if not fits:
            return None
        return cls(tuple(adapter for _, adapter in adapters), tuple(columns for columns, _ in adapters))

    @property
    def padded_rank(self) -> int:
        """`padded_rank` of the largest rank: a power of two, and at least 16 as in every Triton product."""
        return max(padded_rank(len(adapter.a)) for adapter in self.adapters)

    @property
    def num_rows(self) -> int:
        return len(self.adapters) * self.padded_rank

    def covers(self, num_columns: int) -> bool:
        """Whether all of the output's `num_columns` columns have an adapter."""
        return sum(len(adapter.b) for adapter in self.adapters) == num_columns

    def rows(self, below: Tensor) -> list[Tensor]:
        """The rows of `below` [num_rows, in] for each adapter's A."""
        starts = range(0, self.num_rows, self.padded_rank)
        return [
            below[start : start + len(adapter.a)]
            for start, adapter in zip(starts, self.adapters, strict=True)
        ]


class ScaledRows(NamedTuple):
    """Rows yet to be multiplied by a power of two each: an input in 8 bits, or its product with weights."""

    values: Tensor  # [T, n], e4m3 if they are an input
    factors: Tensor  # [T] float32


class EightBitWeight(NamedTuple):
    """A weight in 8 bits, and how the input is rounded that is multiplied with it."""

    values: Tensor  # [out, in] e4m3
    factor: Tensor  # [] float32, a power of two: the weight is about values * factor
    input_factor: Tensor  # [] float32, a power of two, by which all inputs are divided
    by_row: bool
    """Whether each row of the input is divided by a factor of its own; `input_factor` is 1 then."""
    dtype: torch.dtype  # of the product


@dataclass(frozen=True)
class AdaptedLinear:
    """The weights, biases and adapters of layers that read the same input, for one product."""

    weight: Tensor  # [out, in], and below it `num_rows_below` rows
    bias: Tensor | None  # [rows of `weight`]
    adapters: Sequence[tuple[slice, Adapter]]
    """Each adapter with the columns of the output that it adds to."""
    stack: AdapterStack | None
    """The adapters whose A are stored in the weights' type; None: they are read where PEFT keeps them."""
    stacked_a: Tensor | None = None  # [rows of `stack`, in]
    """The A of `stack`; None: they lie below the weights."""
    in_8bit: EightBitWeight | None = None
    """The weight for products in 8 bits; None: there are none."""
    is_written_before_use: bool = False
    """Whether a kernel writes `weight` before every product with it: no product may read it any earlier."""

    @property
    def num_rows_below(self) -> int:
        return 0 if self.stack is None or self.stacked_a is not None else self.stack.num_rows


def base_linear(module: nn.Module) -> Any:
    """The linear layer inside PEFT's wrapper, or the module itself."""
    get_base_layer = getattr(module, "get_base_layer", None)
    return get_base_layer() if get_base_layer is not None else module


def active_adapters(module: nn.Module) -> list[Adapter]:
    """The updates to add to the product with the base weight, given the wrapper's present state."""
    if not hasattr(module, "get_base_layer"):
        return []
    lora: Any = module
    if lora.disable_adapters:
        # The base weight still contains what was merged; PEFT would un-merge it in place, we subtract it.
        names, sign = lora.merged_adapters, -1.0
    elif lora.merged:
        return []
    else:
        names, sign = lora.active_adapters, 1.0
    return [
        Adapter(
            a=lora.lora_A[name].weight,
            b=lora.lora_B[name].weight,
            bias=lora.lora_B[name].bias,
            scaling=sign * lora.scaling[name],
            dropout=getattr(lora.lora_dropout[name], "p", 0.0),  # without dropout it is an nn.Identity
        )
        for name in names
        if name in lora.lora_A
    ]


def adapter_state(module: nn.Module) -> tuple[object, ...]:
    """The settings of PEFT's wrapper that `active_adapters` reads; switching an adapter changes them."""
    lora: Any = module
    dropouts = [getattr(dropout, "p", 0.0) for dropout in lora.lora_dropout.values()]
    names = list(lora.merged_adapters), list(lora.active_adapters)
    return lora.disable_adapters, *names, dict(lora.scaling), dropouts


def projection_adapters(modules: Sequence[nn.Module]) -> list[tuple[slice, Adapter]]:
    """The active adapters of layers that read the same input, with their columns of the joint output."""
    adapters: list[tuple[slice, Adapter]] = []
    first = 0
    for module in modules:
        columns = slice(first, first + base_linear(module).out_features)
        adapters += [(columns, adapter) for adapter in active_adapters(module)]
        first = columns.stop
    return adapters


def unreproducible_adapter(model: nn.Module) -> str | None:
    """Describe a PEFT adapter that engines and trainer would not compute as PEFT does; None if there is
    none.

    Nothing calls the wrapper's own forward, so an adapter that works there would be left out silently.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if (reason := why_not_reproduced(config)) is not None:
            return f"PEFT adapter {name!r} is {reason}"
    return None


def why_not_reproduced(config: Any) -> str | None:
    """The reason why an adapter of a PEFT configuration cannot be computed without PEFT's wrapper, sequence
    by sequence; None if it can."""
    name = type(config).__name__
    if getattr(config, "is_prompt_learning", False):
        return (
            f"prompt learning ({name}), which puts virtual tokens before the prompt in the wrapper's "
            "forward; no rollout engine reproduces that. Use an adapter on weights, such as LoraConfig."
        )
    if getattr(config, "alora_invocation_tokens", None):
        return (
            f"an activated LoRA ({name} with alora_invocation_tokens), whose wrapper looks for these tokens "
            "in every prompt; no rollout engine reproduces that. Drop alora_invocation_tokens."
        )
    if getattr(config, "layer_replication", None):
        return (
            f"a {name} with layer_replication, which makes a deeper model, of layers that share weights, "
            "than its configuration describes (layer_types). Drop layer_replication."
        )
    if config.peft_type == "LILY":
        return (
            f"a {name}, which mixes its experts by the mean over all tokens of a batch: a token's "
            "probability would depend on the tokens after it. Use an adapter such as LoraConfig."
        )
    if _has_own_forward(config) and config.peft_type != "ADALORA":
        return (
            f"a {name}, which works in the wrapper's forward; no rollout engine reproduces that. Use an "
            "adapter on weights alone, such as LoraConfig."
        )
    return None


def why_not_trained(config: Any) -> str | None:
    """The reason why an adapter of a PEFT configuration cannot be trained here, though it may be used; None
    if it can."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING

    name = type(config).__name__
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    if hasattr(tuner, "update_and_allocate") and getattr(config, "use_asa", True):
        alternative = "Set use_asa=False" if hasattr(config, "use_asa") else "Use LoraConfig"
        return (
            f"{name} shares ranks out while it trains, and must be told of every step "
            "(update_and_allocate), which nothing here does, with or without a reference (beta). "
            f"{alternative}."
        )
    if getattr(config, "monteclora_config", None):
        return (
            f"{name} with monteclora_config adds a loss of its own to every step, which nothing here does. "
            "Drop monteclora_config."
        )
    if config.peft_type == "TRAINABLE_TOKENS" and not config.token_indices:
        return f"{name} (TRAINABLE_TOKENS) trains no token, as its token_indices is empty."
    return None


def _has_own_forward(config: Any) -> bool:
    """Whether the method's tuner does more in its forward than to call the model inside."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    own = tuner.__mro__[: tuner.__mro__.index(nn.Module)] if tuner is not None else ()
    return any("forward" in vars(kind) for kind in own if kind is not BaseTuner)


def unsupported_adapters(base: nn.Module) -> str | None:
    """Name the first PEFT feature in `base` beyond LoRA on linear layers; None if there is none."""
    if "peft" not in sys.modules:  # no adapter without the library that makes them
        return None
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: list[type[BaseTunerLayer]] = [LoraLinear]
    if "bitsandbytes" in sys.modules:
        from peft.tuners.lora.bnb import Linear4bit as Lora4bitLinear

        kinds.append(Lora4bitLinear)
    for name, module in base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"PEFT keeps its own copy of {name} ({type(module).__name__}, see modules_to_save)"
        if not isinstance(module, BaseTunerLayer):
            continue
        if name.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens"):
            return f"a PEFT adapter sits on {name}"
        if type(module) not in kinds:
            return f"{name} carries a {type(module).__module__}.{type(module).__name__} adapter, not LoRA"
        lora: Any = module
        if lora.lora_variant:
            variant = next(iter(lora.lora_variant.values()))
            return f"{name} uses the LoRA variant {type(variant).__name__}"
        if lora.fan_in_fan_out:
            return f"{name} uses fan_in_fan_out"
    return None


logger = logging.getLogger(__name__)


def without_routers(model: nn.Module, peft_config: PeftConfig) -> PeftConfig:
    """The configuration; "all-linear" in it leaves out routers that are linear layers and return more than a
    product, such as Llama 4's, since PEFT's layer around one fails at the first token."""
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
