"""Eight processes train what one does, whether they share the weights or each has them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eight_processes_worker import SHARDS, build
from small_runs import read_metrics
from transformers import AutoModelForCausalLM

from processes import TORCHRUN, run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    launcher = [*TORCHRUN[:-1], "--nproc-per-node=8"]
    run_python(*launcher, Path(__file__).with_name("eight_processes_worker.py"), directory, timeout_s=500)
    return directory


@pytest.fixture(scope="module")
def one(directory):
    trainer = build(directory / "one", 1)
    start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = max((p - start[name]).abs().max().item() for name, p in trainer.model.named_parameters())
    assert moved > 5e-3  # fifty times the tolerance
    return trainer


@pytest.mark.parametrize("shard", SHARDS)
def test_eight_processes_equal_one(directory, one, shard):
    saved = AutoModelForCausalLM.from_pretrained(directory / str(shard), dtype="auto")
    found = dict(saved.named_parameters())
    for name, parameter in one.model.named_parameters():
        # Ranks sum in another order, and Adam's first steps divide a gradient by its own size.
        torch.testing.assert_close(found[name].data, parameter.data, rtol=0, atol=1e-4)
    ours, theirs = read_metrics(directory / str(shard)), read_metrics(directory / "one")
    assert [record["step"] for record in ours] == [1, 2, 3]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "reward", "kl"):
            assert mine[name] == pytest.approx(other[name], abs=1e-5, rel=1e-4), name
