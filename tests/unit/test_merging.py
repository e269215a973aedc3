"""Adapters merged from files to files, against PEFT; and adapters that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from colocate.checkpoints.saved_model import find_model
from colocate.checkpoints.sealed import writing_directory
from colocate.inference.loading import load
from colocate.weights.adapter_files import note_base, read_adapter
from colocate.weights.merging import copy_model, merge_adapter
from tiny import make_model, make_tokenizer

LORAS: dict[str, dict[str, Any]] = {
    "attention": dict(target_modules=["q_proj", "v_proj"]),
    "all, another scale": dict(target_modules="all-linear", lora_alpha=5, use_rslora=True),
    "ranks and scales of their own": dict(
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 7},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
    ),
    "random at its start": dict(target_modules=["q_proj"], init_lora_weights="orthogonal"),
    "a head of its own": dict(target_modules=["o_proj"], modules_to_save=["lm_head"]),
}


def save_base(
    directory: Path, dtype: torch.dtype = torch.float32, *, shard: str = "5GB", **options: Any
) -> Path:
    make_model(**options).to(dtype).save_pretrained(directory, max_shard_size=shard)
    make_tokenizer().save_pretrained(directory)
    return directory


def save_adapter(base: Path, directory: Path, *, with_base: bool = True, **options: Any) -> Path:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype="auto"),
        LoraConfig(r=4, **{"lora_alpha": 8, **options}),
    )
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(directory)
    if with_base:
        note_base(directory, str(base))
    return directory


def merge(adapter: Path, base: Path, out: Path, **options: Any) -> list[str]:
    out.mkdir()
    return list(merge_adapter(read_adapter(str(adapter)), str(base), out, **options))


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS.keys())
def test_merged_weights_are_those_of_peft(tmp_path, lora, dtype):
    base = save_base(tmp_path / "base", dtype, shard="8KB")
    adapter = save_adapter(base, tmp_path / "adapter", **lora)
    lines = merge(adapter, base, tmp_path / "merged")
    assert len(lines) == len(list(base.glob("*.safetensors"))) > 3, "a line for each file"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    expected, before = merged_by_peft(base, adapter), AutoModelForCausalLM.from_pretrained(base).state_dict()
    changed = 0
    for name, weight in merged.state_dict().items():
        assert weight.dtype == dtype
        # PEFT multiplies in the adapter's type: with its autocast that is float32, as here.
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
        changed += not torch.equal(weight.float(), before[name])
    assert changed == sum(int(line.split(": ")[1].split()[0]) for line in lines)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def nested(file: Path) -> None:
    file.write_text("[" * 100_000)


def without_b(file: Path) -> None:
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "lora_B" not in name}, file)


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        ("adapter/adapter_model.safetensors", cut_short),
        ("adapter/adapter_model.safetensors", nested),
        ("adapter/adapter_model.safetensors", without_b),
        ("adapter/adapter_config.json", cut_short),
        ("adapter/adapter_config.json", nested),
        ("adapter/base_model.json", cut_short),
        ("base/config.json", cut_short),
        ("base/model.safetensors", cut_short),
        ("base/model.safetensors.index.json", nested),
    ],
)
@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "put on"])
def test_a_damaged_file_is_named(tmp_path, place, damage, is_merged):
    """By the command that merges, and by those that put an adapter on its model."""
    base = save_base(tmp_path / "base", shard="8KB" if "index" in place else "5GB")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    damage(tmp_path / place)
    with pytest.raises((ValueError, OSError), match=str(tmp_path / place)):
        if is_merged:
            merge(adapter, base, tmp_path / "merged")
        else:
            load(find_model(str(adapter)), {"use_cpu": True})


def test_no_more_than_one_file_is_in_memory(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base", shard="8KB")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    held, most = [], []

    def note(tensors, path, **options):
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        most.append(Path(path).name)
        save_file(tensors, path, **options)

    monkeypatch.setattr("colocate.weights.merging.save_file", note)
    merge(adapter, base, tmp_path / "merged")
    assert max(held) < sum(held) / 3 and len(set(most)) == len(most)


def test_an_adapter_of_another_architecture_is_refused_by_names_or_shapes(tmp_path):
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    other = save_base(tmp_path / "gpt2", architecture="gpt2")
    with pytest.raises(ValueError, match=r"4 of the 4 weights .* not in that model, such as 'model.layers.0"):
        merge(adapter, other, tmp_path / "a")
    wider = save_base(tmp_path / "wider", hidden_size=48)
    with pytest.raises(
        ValueError, match=r"another shape there, such as .*\(32, 48\) in the model, \(32, 32\)"
    ):
        merge(adapter, wider, tmp_path / "b")
    shallow = save_base(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"2 of the 4 weights"):
        merge(adapter, shallow, tmp_path / "c")


def test_another_model_of_the_same_shapes_is_refused_by_its_fingerprint(tmp_path):
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    other = save_base(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"has the same names and shapes, and the fingerprint"):
        merge(adapter, other, tmp_path / "a")
    merge(adapter, other, tmp_path / "b", is_any_base=True)
    # The same weights in other files are the same model.
    recut = save_base(tmp_path / "recut", shard="8KB")
    merge(adapter, recut, tmp_path / "c")
    unknown = save_adapter(base, tmp_path / "unknown", with_base=False, **LORAS["attention"])
    merge(unknown, other, tmp_path / "d")  # an adapter of another program does not say


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_modules=["q_proj"], use_dora=True), "use_dora=True"),
        (dict(target_modules=["q_proj"], lora_bias=True), "lora_bias=True"),
        (dict(target_modules=["q_proj"], init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (dict(target_modules=["q_proj"], init_lora_weights="olora"), "init_lora_weights='olora'"),
        (dict(target_modules=["q_proj"], alora_invocation_tokens=[5]), "alora_invocation_tokens"),
        (dict(target_modules=["embed_tokens"]), "lora_embedding_A"),
    ],
)
def test_what_is_more_than_lora_is_refused_with_who_can_merge_it(tmp_path, options, message):
    base = save_base(tmp_path / "base", architecture="llama", attention_bias=True)
    adapter = save_adapter(base, tmp_path / "adapter", **options)
    with pytest.raises(ValueError, match=rf"(?s){message}.*merge_and_unload"):
        read_adapter(str(adapter))


def test_weights_that_cannot_be_merged(tmp_path):
    base = save_base(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    with pytest.raises(FileNotFoundError, match=r"no adapter: it has no adapter_config.json"):
        read_adapter(str(base))
    tied = save_base(tmp_path / "tied", architecture="qwen2")
    config = json.loads((tied / "config.json").read_text())
    for number, heads in enumerate(
        [
            {"modules_to_save": ["embed_tokens"]},
            {"modules_to_save": ["lm_head"]},
            {"target_modules": ["lm_head"]},
        ]
    ):
        own_head = save_adapter(tied, tmp_path / f"head{number}", **{"target_modules": ["q_proj"], **heads})
        (tied / "config.json").write_text(json.dumps(config, separators=(",", ":")))
        with pytest.raises(ValueError, match="one matrix for its embeddings and its head"):
            merge(own_head, tied, tmp_path / f"a{number}")
    quantised = shutil.copytree(base, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match="are quantised"):
        merge(adapter, quantised, tmp_path / "b")
    (quantised / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors files"):
        merge(adapter, quantised, tmp_path / "c")
    file = adapter / "adapter_model.safetensors"
    broken = {name: tensor * float("inf") for name, tensor in load_file(file).items()}
    save_file(broken, file)
    with pytest.raises(ValueError, match="not finite once"):
        merge(adapter, base, tmp_path / "d")


def test_a_model_that_lacks_a_file_is_neither_merged_into_nor_copied(tmp_path):
    base = save_base(tmp_path / "base", shard="8KB")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    files = sorted(base.glob("*.safetensors"))
    files[2].unlink()
    (tmp_path / "copy").mkdir()
    for attempt in (
        lambda: merge(adapter, base, tmp_path / "a"),
        lambda: copy_model(str(base), tmp_path / "copy"),
    ):
        with pytest.raises(ValueError, match=rf"lacks 1 of the {len(files)} files .* '{files[2].name}'"):
            attempt()
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize("place", ["new", "made/by the way/new", ".", "link", "dangling"])
def test_a_directory_is_there_whole_or_not_at_all(tmp_path, monkeypatch, place):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if place in ("link", "dangling"):
        (here / place).symlink_to(tmp_path / "elsewhere")
    if place == "link":
        (tmp_path / "elsewhere").mkdir()
    with pytest.raises(KeyboardInterrupt), writing_directory(Path(place)) as directory:
        (directory / "half").write_text("")
        raise KeyboardInterrupt
    assert not list((tmp_path / "here" / place).glob("*")) and not list(tmp_path.rglob("*.partial"))
    with writing_directory(Path(place)) as directory:
        (directory / "whole").write_text("")
    assert [path.name for path in (tmp_path / "here" / place).iterdir()] == ["whole"]
    with pytest.raises(ValueError, match="exists already"), writing_directory(tmp_path / "here" / place):
        raise AssertionError("nothing is written there")


def test_files_of_a_merged_model_keep_their_names_and_what_lies_beside_them(tmp_path):
    base = save_base(tmp_path / "base", shard="8KB")
    adapter = save_adapter(base, tmp_path / "adapter", **LORAS["attention"])
    make_tokenizer().save_pretrained(adapter)
    (base / "optimizer.pt").write_text("not the model's")
    merge(adapter, base, tmp_path / "merged")
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert names == {file.name for file in base.iterdir()} - {"optimizer.pt"}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        with safe_open(file, "pt") as ours, safe_open(base / file.name, "pt") as theirs:
            assert set(ours.keys()) == set(theirs.keys()) and ours.metadata() == {"format": "pt"}
