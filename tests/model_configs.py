"""The shapes of the models that recipes name, as their config.json on the Hub has them."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config


def _sizes(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def _qwen2(*sizes: int, num_key_value_heads: int, vocab_size: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        **_sizes(*sizes, tied=tied),
        num_key_value_heads=num_key_value_heads,
        vocab_size=vocab_size,
        max_position_embeddings=32768,
    )


def _qwen3(*sizes: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        **_sizes(*sizes, tied=tied),
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    )


def _llama(*sizes: int, head_dim: int, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        **_sizes(*sizes, tied=tied),
        num_key_value_heads=8,
        head_dim=head_dim,
        vocab_size=128256,
        max_position_embeddings=131072,
    )


# hidden size, size within the MLP, layers, attention heads
CONFIGS: dict[str, PretrainedConfig] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(
        896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tied=True
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(
        1536, 8960, 28, 12, num_key_value_heads=2, vocab_size=151936, tied=True
    ),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(
        2048, 11008, 36, 16, num_key_value_heads=2, vocab_size=151936, tied=True
    ),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064, tied=False),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(
        3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064, tied=False
    ),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, num_key_value_heads=8, vocab_size=152064, tied=False),
    "Qwen/Qwen2.5-72B-Instruct": _qwen2(
        8192, 29568, 80, 64, num_key_value_heads=8, vocab_size=152064, tied=False
    ),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 8192, 16, 32, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 8192, 28, 24, tied=True, head_dim=128),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 14336, 32, 32, head_dim=128),
    "meta-llama/Llama-3.1-70B-Instruct": _llama(8192, 28672, 80, 64, head_dim=128),
}
