"""The state in a checkpoint is data: reading it runs no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from colocate.checkpoints import snapshot
from colocate.checkpoints.sealed import CheckpointError


class RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("save", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))])
def test_reading_runs_no_code(tmp_path, save):
    save({"parts": RunsCode(tmp_path / "mark")}, tmp_path / "rank0.pt")
    with pytest.raises(CheckpointError, match=r"rank0\.pt is not read: it holds something else than tensors"):
        snapshot.load_rank_state(tmp_path, 0, {})
    assert not (tmp_path / "mark").exists()


def test_generators_and_numpys_numbers_survive_as_data(tmp_path):
    class Part:
        def state_dict(self):
            return {"scalar": np.float64(0.1), "array": np.arange(3.0), "pair": (np.int64(2), None)}

        def load_state_dict(self, state):
            self.loaded = state

    part = Part()
    np.random.seed(5), np.random.random(3)
    snapshot.save_rank_state(tmp_path, 0, {"part": part})
    expected = np.random.random(4)
    np.random.seed(6)
    snapshot.load_rank_state(tmp_path, 0, {"part": part})
    assert (np.random.random(4) == expected).all()
    assert part.loaded["scalar"] == 0.1 and part.loaded["pair"] == (2, None)
    assert part.loaded["array"].tolist() == [0.0, 1.0, 2.0]


def test_the_generator_of_a_gpu_survives_on_a_machine_with_fewer_of_them(tmp_path, monkeypatch):
    def see(*generators, current):
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(generators))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.random, "_lazy_call", lambda call, **_: call())
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: torch.cuda.current_device())
    other, own, only = (torch.Generator().manual_seed(seed) for seed in (1, 2, 3))
    see(other, own, current=1)
    snapshot.save_rank_state(tmp_path, 0, {})
    expected = torch.rand(4, generator=own)
    see(only, current=0)
    snapshot.load_rank_state(tmp_path, 0, {})
    assert torch.equal(torch.rand(4, generator=only), expected)
