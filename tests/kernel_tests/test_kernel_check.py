"""Fast kernels are tried where Triton is of a release that they were never tested with."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
import triton
from engine_models import make_model
from hopper import needs_hopper

from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.checks import fallbacks, kernel_check
from colocate.kernels.checks.fallbacks import TESTED
from colocate.kernels.checks.kernel_check import CHECKS, TOLERANCE, CheckOutcome
from colocate.weights.layouts import Layout, layout_for


@pytest.fixture(autouse=True)
def nothing_tried_yet():
    for cached in (kernel_check.outcome, fallbacks._log_once):
        cached.cache_clear()
    yield
    for cached in (kernel_check.outcome, fallbacks._log_once):
        cached.cache_clear()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_agree_with_pytorch(dtype):
    assert kernel_check.outcome(0, dtype).failures == {}


def test_what_ends_the_process_is_each_kernels_reason(monkeypatch):
    outcome = kernel_check.outcome(2**15, torch.bfloat16)  # there is no such GPU
    assert outcome.failures.keys() == CHECKS.keys()
    assert all("Error: " in reason for reason in outcome.failures.values())
    assert kernel_check.outcome(2**15, torch.bfloat16) is outcome  # once in a process


def test_kernels_that_never_end_have_failed(monkeypatch):
    monkeypatch.setattr(kernel_check, "LIMIT_S", 0.01)
    assert set(kernel_check.outcome(0, torch.bfloat16).failures.values()) == {"no end after 0.01 s"}


def raising() -> torch.Tensor:
    raise RuntimeError("PassManager::run failed\nand much more")


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        ((1, 1, 1), None),
        ((1 + TOLERANCE / 2,) * 3, None),
        ((1 + 2 * TOLERANCE,) * 3, "its error is 0.02 of the result"),
        ((torch.nan,) * 3, "its error is nan of the result"),
        ((1, 1, 1.001), "two runs have different results"),
        (None, "RuntimeError: PassManager::run failed"),
    ],
)
def test_a_kernel_that_is_wrong_moves_or_raises_cannot_be_used(factors, reason):
    def check(generator, dtype):
        expected = torch.ones(8, dtype=torch.float64)
        if factors is None:
            return raising, expected
        results = itertools.cycle([expected * factor for factor in factors])
        return lambda: next(results), expected

    assert kernel_check._why_not(check, torch.Generator(), torch.bfloat16) == reason


class OnGpu(Layout):
    device = torch.device("cuda", 0)
    dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("version", "capability", "failures", "is_tried", "said"),
    [
        ("3.6.0", (9, 0), {}, False, None),
        ("3.99.0", (8, 0), {}, False, "Triton 3.99.0 was never tested with these kernels on a GPU."),
        ("3.99.0", (9, 0), {}, True, "agree with PyTorch here"),
        ("3.99.0", (9, 0), {"swiglu": "it is wrong"}, True, "failed here: swiglu: it is wrong."),
    ],
)
def test_an_engine_tries_them_and_does_without_what_fails(
    version, capability, failures, is_tried, said, caplog, monkeypatch
):
    tried = []
    outcome = lambda *of: tried.append(of) or CheckOutcome(failures, 3.0)  # noqa: E731
    monkeypatch.setattr(kernel_check, "outcome", outcome)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch, "__version__", f"{TESTED['PyTorch'][0]}.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backend = TritonBackend()
    with caplog.at_level(logging.INFO, logger="colocate"):
        for _ in range(2):  # as two engines of a process
            backend.tell_fallbacks(OnGpu(**vars(layout_for(make_model("qwen2")))))
    assert set(tried) == ({(0, torch.bfloat16)} if is_tried else set())
    assert set(backend.broken) == set(failures)
    of_triton = [record for record in caplog.records if "Triton" in record.message]
    assert len(of_triton) == (said is not None)
    for record in of_triton:
        assert said in record.message and (record.levelname == "WARNING") is bool(failures)
