"""Stand-ins for the models and data sets that TRL's tests load from the Hub: same names, random weights.

`from_pretrained` and `load_dataset` take a directory of the name asked for before they ask the Hub, so a
process that starts where `make_stand_ins` has been finds them without being changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import PreTrainedTokenizerFast

ORGANIZATION = "trl-internal-testing"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"Qwen3": "qwen3.jinja"}
"""Chat templates of TRL's package for models whose architecture begins so: tests give those tools."""
SPECIAL_ID = 8192
"""Where the special tokens begin. With so many others a random model hardly ever ends a completion, on
which a test relies; with as many as Qwen's a run would take an hour."""

PROMPTS = [  # a test expects the first twelve in this order
    "Beautiful is better than",
    "Explicit is",
    "Simple is better",
    "Complex",
    "Flat is better than",
    "Sparse is better",
    "Readability",
    "Special cases aren't special",
    "Although practicality beats",
    "Errors should never",
    "Unless explicitly",
    "In the face of ambiguity, refuse",
    "There should be",
    "Although that way may not",
    "Now is better",
    "Never is often better than",
    "If it is hard to explain,",
    "If it is easy",
    "Namespaces are",
]
NUM_TEST_ROWS = 2

_SMALL: dict[str, Any] = dict(
    hidden_size=8, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=32)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", {"num_labels": 1}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", {"head_dim": 8, "tie_word_embeddings": False}),
    "tiny-Qwen3ForSequenceClassification": (
        "Qwen3ForSequenceClassification",
        {"head_dim": 8, "num_labels": 1},
    ),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", {"num_labels": 1}),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", {"head_dim": 8}),
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", {"logit_scale": 0.125}),
    "tiny-GptOssForCausalLM": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeForCausalLM",
        {**_EXPERTS, "n_routed_experts": 4, "head_dim": 2, "attention_bias": True, "use_qk_norm": True},
    ),
    "tiny-NemotronHForCausalLM-nano": (
        "NemotronHForCausalLM",
        {
            **_EXPERTS,
            "hidden_size": 16,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
}

REMOTE_CODE = """\
from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def make_stand_ins(directory: Path) -> None:
    """Write `directory/trl-internal-testing/…`, where it is not there yet."""
    root = directory / ORGANIZATION
    for name, (architecture, sizes) in MODELS.items():
        _once(root / name, lambda path, a=architecture, s=sizes: _write_model(path, a, s))
    _once(root / "tiny-RemoteForCausalLM", _write_remote_model)
    _once(root / "zen", _write_zen)


def _once(path: Path, write: Callable[[Path], None]) -> None:
    if not path.exists():
        path.mkdir(parents=True)
        write(path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with ChatML's special tokens from `SPECIAL_ID` on and unused ones between."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"<unused{i}>" for i in range(SPECIAL_ID - len(alphabet)))]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def _write_model(path: Path, architecture: str, sizes: dict[str, Any]) -> None:
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        **{
            **_SMALL,
            **sizes,
            "vocab_size": SPECIAL_ID + len(SPECIAL_TOKENS),
            "pad_token_id": SPECIAL_ID,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_ID + 2,
        }
    )
    torch.manual_seed(0)
    model = model_class(config)
    _initialize(model)
    model.save_pretrained(path)
    tokenizer = make_tokenizer()
    for beginning, file in TEMPLATES.items():
        if architecture.startswith(beginning):
            tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / file).read_text()
    tokenizer.save_pretrained(path)


def _initialize(model: nn.Module) -> None:
    """Weights far enough from 0 that each of them moves in a run of a few steps."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def _write_remote_model(path: Path) -> None:
    _write_model(path, "LlamaForCausalLM", {})
    (path / "modeling_remote.py").write_text(REMOTE_CODE)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    file.write_text(json.dumps(config))


def _write_zen(path: Path) -> None:
    """The Zen of Python as two configurations of prompts, with a train and a test split each."""
    rows: dict[str, list[Any]] = {
        "standard_prompt_only": PROMPTS,
        "conversational_prompt_only": [
            [{"role": "user", "content": f"What comes after {prompt!r}?"}] for prompt in PROMPTS
        ],
    }
    lines = ["---", "configs:"]
    for name, prompts in rows.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", prompts[:-NUM_TEST_ROWS]), ("test", prompts[-NUM_TEST_ROWS:])):
            file = path / f"{name}-{split}.jsonl"
            file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in part))
            lines += [f"  - split: {split}", f"    path: {file.name}"]
    (path / "README.md").write_text("\n".join([*lines, "---", ""]))
