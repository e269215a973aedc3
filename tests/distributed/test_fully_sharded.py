"""Two processes that split a model without a layout by FSDP2 train and generate what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fully_sharded_worker import ADAPTED, CASES, build
from safetensors.torch import load_file
from small_runs import read_metrics
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from processes import run_ranks

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where two processes wrote what they found."""
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(2, Path(__file__).with_name("fully_sharded_worker.py"), directory, timeout_s=240)
    return directory


def of_ranks(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", [*CASES, "bf16", "bf16, routers in float32"])
def test_steps_and_tokens_are_those_of_one_process(directory, family):
    for rank in of_ranks(directory):
        found = rank[family]
        assert len(found) > 20 or family.startswith("bf16")
        assert {name: x for name, x in found.items() if not x < 1e-5} == {}


def weights_of(path: Path, directory: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(path / "shards", directory / "whole.pt")
    return torch.load(directory / "whole.pt", weights_only=True)


def test_a_run_equals_that_of_one_process(directory, tmp_path):
    one = build(tmp_path / "one", 1)
    start = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    one.train()
    expected = dict(one.model.named_parameters())
    state = weights_of(directory / "run" / "checkpoint-5", tmp_path)
    assert max((expected[name] - start[name]).abs().max().item() for name in start) > 5e-3
    saved = AutoModelForCausalLM.from_pretrained(directory / "run", dtype="auto")
    assert type(saved) is type(one.model) and saved.config.architectures == ["GPT2LMHeadModel"]
    exported = dict(saved.named_parameters())
    assert exported.keys() == expected.keys()
    for name, parameter in expected.items():
        # Ranks sum in another order, and Adam's first steps divide a gradient by its own size.
        torch.testing.assert_close(state[f"weights/{name}"], parameter.detach(), atol=1e-5, rtol=0)
        assert torch.equal(exported[name], state[f"weights/{name}"]), name
    ours, theirs = read_metrics(directory / "run"), read_metrics(tmp_path / "one")
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert mine.get(name) == pytest.approx(other.get(name), abs=1e-5, rel=1e-5), name


def test_an_adapter_over_split_weights_is_that_of_one_process(directory, tmp_path):
    """LoRA is whole on every rank, and so is what PEFT saves of it."""
    one = build(tmp_path / "one", 1, **ADAPTED)
    one.train()
    saved = load_file(directory / "adapter" / "checkpoint-2" / "adapter_model.safetensors")
    expected = load_file(tmp_path / "one" / "checkpoint-2" / "adapter_model.safetensors")
    assert saved.keys() == expected.keys() and len(saved) == 4
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-3, name
        torch.testing.assert_close(saved[name], tensor, atol=1e-5, rtol=0)


def test_a_resumed_run_ends_bit_for_bit_like_one_in_one_go(directory, tmp_path):
    resumed, straight = (
        weights_of(directory / name / "checkpoint-5", tmp_path) for name in ("resumed", "run")
    )
    assert resumed.keys() == straight.keys()
    assert {name.split("/")[0] for name in straight} == {"weights", "state"}
    for name, tensor in straight.items():
        assert torch.equal(resumed[name], tensor), name


def test_one_process_goes_on_from_the_parts_of_two(directory, tmp_path):
    one = build(tmp_path / "one", 1)
    one.load_checkpoint(directory / "run" / "checkpoint-5")
    for name, tensor in weights_of(directory / "run" / "checkpoint-5", tmp_path).items():
        if name.startswith("weights/"):
            assert torch.equal(one.model.get_parameter(name.removeprefix("weights/")), tensor)


def test_a_run_ends_with_the_weights_of_its_best_checkpoint(directory):
    best, last = (directory / "best" / f"checkpoint-{step}/model.safetensors" for step in (1, 2))
    expected, after = load_file(best), load_file(last)
    ended = load_file(directory / "best" / "model.safetensors")
    assert ended.keys() == expected.keys()
    assert all(torch.equal(ended[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(ended[name], tensor) for name, tensor in after.items())


def test_what_cannot_be_split_is_refused_by_name(directory):
    for rank in of_ranks(directory):
        told = rank["refusals"]
        assert "attn.c_attn uses fan_in_fan_out" in told["adapter"] and "Set shard=1" in told["adapter"]
        assert "engine='rollout_server' cannot be sent weights" in told["server"]
        assert "decode_shard=2 lets 2 processes decode together" in told["together"]
        assert "cannot run this model: GPT2LMHeadModel has no layout" in told["native"]
        assert "one of 2 parts" in told["saving"] and "trainer.save_model()" in told["saving"]


def test_a_rank_without_memory_ends_the_run_and_says_what_to_set(directory):
    """It is not repeated, and rank 0, which waits for rank 1 in a block's gathering, is not left there."""
    of_rank_0, of_rank_1 = ((directory / f"{rank}.txt").read_text() for rank in range(2))
    assert "RuntimeError: OutOfMemoryError: full. With FSDP2 a pass" in of_rank_1
    assert "Lower max_tokens_per_microbatch" in of_rank_1
    assert of_rank_0.startswith("PeerError: rank 1 ") and "has failed: RuntimeError: OutOfMemory" in of_rank_0
