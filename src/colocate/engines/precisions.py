"""In how many bits the native engine can generate."""

from __future__ import annotations

ROLLOUT_PRECISIONS = ("bf16", "fp8_kv", "fp8")
"""The values of the option `rollout_precision`."""
