"""The names of the natively supported families of models, for messages; no PyTorch is imported."""

from __future__ import annotations

FAMILIES = (
    "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Phi-3", "SmolLM3", "Granite", "Seed-OSS", "CWM",
)  # fmt: skip
"""The families of `layouts.ARCHITECTURES`."""
FAMILY_NAMES = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
