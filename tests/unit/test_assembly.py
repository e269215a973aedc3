"""What is set for the whole process before a run."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from transformers.utils import logging as transformers_logging

from colocate.assembly import set_up_process
from colocate.config import GRPOConfig


@pytest.fixture
def process_as_before(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    levels = logging.getLogger("colocate").level, transformers_logging.get_verbosity()
    yield
    torch.use_deterministic_algorithms(False)
    logging.getLogger("colocate").setLevel(levels[0])
    transformers_logging.set_verbosity(levels[1])


def test_seed_full_determinism_and_log_level(tmp_path, process_as_before):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "seed": 7}
    set_up_process(GRPOConfig(**options))
    assert not torch.are_deterministic_algorithms_enabled()
    drawn = torch.rand(3)
    set_up_process(GRPOConfig(**options, full_determinism=True, log_level="error"))
    assert torch.equal(torch.rand(3), drawn)
    assert torch.are_deterministic_algorithms_enabled()
    assert logging.getLogger("colocate").level == logging.ERROR
    assert transformers_logging.get_verbosity() == logging.ERROR
