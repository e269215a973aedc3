"""A rank reads its part of a checkpoint: the weights of the whole model split, and no byte of the others'."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import make_model
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from colocate.policy.model import loading
from colocate.policy.model.loading import prepare_model
from colocate.weights import part_loading
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import split_weights

CASES = ["llama-biases", "qwen2", "qwen3"]


@pytest.fixture
def checkpoint(tmp_path, request):
    def save(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        make_model(name, vocab_size=96).to(dtype).save_pretrained(tmp_path / name, **options)
        return str(tmp_path / name)

    return save


@pytest.fixture
def loads(monkeypatch) -> Counter:
    """How often a model was loaded whole, and how many numbers were read of parts."""
    counts: Counter = Counter()
    load_model, read = loading.load_model, part_loading._read

    def counted_load(*args: Any, **kwargs: Any) -> Any:
        counts["whole"] += 1
        return load_model(*args, **kwargs)

    def counted_read(*args: Any) -> torch.Tensor:
        tensor = read(*args)
        counts["numbers"] += tensor.numel()
        return tensor

    monkeypatch.setattr(loading, "load_model", counted_load)
    monkeypatch.setattr(part_loading, "_read", counted_read)
    return counts


def prepared(model: Any, index: int, *, bf16: bool = False, peft_config: Any = None, **options: Any) -> Any:
    settings = SimpleNamespace(
        model_init_kwargs=options or None,
        trust_remote_code=False,
        bf16=bf16,
        disable_dropout=False,
        gradient_checkpointing=False,
        gradient_checkpointing_kwargs=None,
    )
    part = WeightPart(index, 2)
    return prepare_model(model, settings, torch.device("cpu"), None, peft_config, part)[0]


def assert_same(found: Any, expected: Any) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, theirs.pop(name)), name
        assert parameter.stride() == expected.get_parameter(name).stride()
    assert not theirs
    for (name, buffer), (_, other) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert found.training == expected.training
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert found.config.to_dict() == expected.config.to_dict()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several"])
def test_a_part_that_was_read_is_that_of_the_whole_model(checkpoint, loads, monkeypatch, name, bf16, options):
    directory = checkpoint(name, torch.bfloat16 if bf16 else torch.float32, **options)
    whole = make_model(name, vocab_size=96)
    num_read = []
    for index in range(2):
        found = prepared(directory, index, bf16=bf16, revision="main")  # as the command line passes it
        num_read.append(loads.pop("numbers"))
        assert not loads["whole"]
        with monkeypatch.context() as patch:
            patch.setattr(loading, "part_of_checkpoint", lambda *args, **kwargs: None)
            assert_same(found, prepared(directory, index, bf16=bf16))
        loads.clear()
    num_whole = sum(parameter.numel() for parameter in whole.parameters())
    vectors = sum(parameter.numel() for parameter in whole.parameters() if parameter.ndim == 1)
    assert num_whole <= sum(num_read) <= num_whole + vectors  # norms and some biases are every rank's


def test_an_adapter_is_added_to_a_part(checkpoint, loads):
    found = prepared(checkpoint("qwen3"), 0, peft_config=LoraConfig(r=2, target_modules="all-linear"))
    assert not loads["whole"]
    projection = found.base_model.model.model.layers[0].self_attn.q_proj
    num_rows = len(projection.lora_B.default.weight)  # adapters are whole on every rank
    assert num_rows == 2 * len(projection.base_layer.weight)


def test_what_must_be_loaded_whole_is(checkpoint, loads, caplog):
    expected = make_model("qwen3", vocab_size=96)
    split_weights(expected, WeightPart(1, 2))
    # Finer than bf16: the masters are made from it.
    prepared(checkpoint("qwen3"), 1, bf16=True)
    assert loads["whole"] == 1
    prepared(checkpoint("qwen3"), 1, attn_implementation="eager")
    assert loads["whole"] == 2
    # Under names that transformers converts.
    directory = checkpoint("qwen3")
    weights = load_file(f"{directory}/model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(renamed, f"{directory}/model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO", "colocate"):
        prepared(directory, 1)
    assert loads["whole"] == 3
    assert "is loaded whole on every rank and then split: its files name no 'model." in caplog.text


def test_an_index_that_names_a_file_that_is_not_there(checkpoint):
    directory = checkpoint("qwen3", max_shard_size="20KB")
    path = f"{directory}/model.safetensors.index.json"
    with open(path) as file:
        index = json.load(file)
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "lost.safetensors"
    with open(path, "w") as file:
        json.dump(index, file)
    with pytest.raises(OSError, match=r"lost\.safetensors"):
        prepared(directory, 0)
