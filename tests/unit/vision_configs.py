"""Parts of the configurations of small vision-language models, for tests that start or merge them."""

from __future__ import annotations

from typing import Any

VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
    patch_size=14,
)  # fmt: skip
QWEN_VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_heads=2, depth=1, out_hidden_size=32, num_position_embeddings=16
)
MROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
LINEAR_ATTENTION: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
