"""The names of the natively supported families of models, for messages; no PyTorch is imported."""

from __future__ import annotations

FAMILIES = (
    "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Phi-3", "Gemma 3", "GLM", "GLM-4", "OLMo 2", "OLMo 3",
    "EXAONE 4", "ERNIE 4.5", "HunYuan Dense V1", "SmolLM3", "Granite", "Helium", "Seed-OSS", "CWM",
)  # fmt: skip
"""The families of `architectures.ARCHITECTURES`."""
FAMILY_NAMES = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
