"""The options of the native engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from colocate.engines.options import EngineOptions
from colocate.options.requirements import AT_LEAST_ONE, IN_COMPLETIONS, OneOf

ROLLOUT_PRECISIONS = ("bf16", "fp8_kv", "fp8")


@dataclass
class NativeOptions(EngineOptions):
    """The options that the native engine alone reads."""

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    rollout_precision: Annotated[str, OneOf(ROLLOUT_PRECISIONS), IN_COMPLETIONS] = "bf16"
    """The bits with which the native engine generates. "bf16": as the model's weights are. "fp8_kv": keys and
    values are stored in 8 bits, which halves the KV cache. "fp8": the products for q, k, v and in the MLP
    multiply in 8 bits, too. Training stays as it is; completions are corrected token by token."""
    decode_shard: Annotated[int | None, AT_LEAST_ONE] = None
    """The number of processes that decode together, of those that share the weights (shard=2, 4 or 8): a
    divisor of shard. Fewer than shard gather weights for each rollout: they need memory for them and spend
    less time in sums, and 1 can play episodes of several turns. None: as many as shard."""
