"""Kernels that do not run with a model, a GPU or a version: what is said of them, and how often."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from engine_models import make_model

from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.checks import fallbacks
from colocate.kernels.checks.fallbacks import (
    TESTED,
    Fallback,
    of_products_8bit,
    of_rollout,
    of_training,
    of_versions,
    why_not_flash,
)
from colocate.kernels.checks.kernel_check import CheckOutcome
from colocate.policy.attention import cudnn_attention
from colocate.policy.stack import stack
from colocate.weights.layouts import Layout, layout_for

TORCH, TRITON = TESTED["PyTorch"][-1], TESTED["Triton"][-1]
GELU = torch.nn.GELU()
MODEL: dict[str, Any] = dict(dtype=torch.bfloat16, head_size=128, activation=torch.nn.SiLU())
ROLLOUT: dict[str, Any] = dict(MODEL, capability=(9, 0))
TRAINING: dict[str, Any] = dict(MODEL, norm_dtype=torch.bfloat16, has_windows=False, why_not_cudnn=None)


@pytest.fixture(autouse=True)
def nothing_said_yet():
    fallbacks._log_once.cache_clear()
    yield
    fallbacks._log_once.cache_clear()


def check(found: list[Fallback], said: str | None, *, is_costly: bool) -> None:
    assert len(found) == (said is not None)
    for fallback in found:
        assert re.search(str(said), fallback.line) and fallback.is_costly is is_costly


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (dict(capability=(8, 0)), r"SwiGLU .* H200\), and this GPU has 8.0"),
        (dict(capability=(12, 0)), "this GPU has 12.0"),
        (dict(activation=GELU), "gate .* compute SiLU and .*, and the model has GELU"),
        (dict(head_size=320), "Attention .* up to 256 values, a multiple of 8, and these have 320"),
        (dict(head_size=36), "and these have 36"),
    ],
)
def test_of_rollout(change: dict[str, Any], said: str | None):
    check(of_rollout(**(ROLLOUT | change)), said, is_costly="head_size" in change)


@pytest.mark.parametrize(
    ("versions", "outcome", "said", "is_costly"),
    [
        ((f"{TORCH}.0+cu130", f"{TRITON}.0"), None, None, False),
        ((f"{TORCH}.1", f"{TRITON}.1+git3"), None, None, False),
        ((f"{TORCH}.0", None), None, None, False),
        (("2.99.0+cu140", f"{TRITON}.0"), None, r"PyTorch 2.99.0\+cu140 was never tested .* GPU\.$", False),
        ((f"{TORCH}.0", "3.99.0"), None, r"Triton 3.99.0 was never tested .* GPU\.$", False),
        ((f"{TORCH}.0", "3.5.1"), None, r"Triton 3.5.1 was never tested", False),
        (
            (f"{TORCH}.0", "3.99.0"),
            CheckOutcome({}, 14.6),
            r"3.99.0 .* agree with PyTorch here \(15 s\)\.$",
            False,
        ),
        (
            (f"{TORCH}.0", "3.99.0"),
            CheckOutcome({"head": "two runs have different results"}, 14.6),
            r"without those that failed here: head: two runs have different results\.$",
            True,
        ),
    ],
)
def test_of_versions(versions, outcome, said, is_costly):
    check(of_versions(*versions, outcome), said, is_costly=is_costly)


def test_of_products_8bit():
    check(of_products_8bit(torch.bfloat16), None, is_costly=True)
    check(of_products_8bit(torch.float32), "Products in 8 bits .* is in torch.float32", is_costly=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        (dict(has_windows=True), "FlashAttention: .* sliding window"),
        (dict(why_not_cudnn="it is not here"), "FlashAttention: it is not here"),
        (dict(activation=GELU), "gate .* GELU"),
        (dict(head_size=264, why_not_cudnn="not for 264"), "padded matrix products: .* 264"),
        (dict(norm_dtype=torch.float32), "norms .* torch.float32 and the model is in torch.bfloat16"),
    ],
)
def test_of_training(change: dict[str, Any], said: str | None):
    check(of_training(**(TRAINING | change)), said, is_costly=bool({"head_size", "norm_dtype"} & set(change)))


@pytest.mark.parametrize("head_size", [8, 64, 80, 256])
def test_flash_takes(head_size):
    assert why_not_flash(torch.float16, head_size) is why_not_flash(torch.bfloat16, head_size) is None


def test_each_line_is_said_once_and_costly_ones_as_warnings(caplog):
    with caplog.at_level(logging.INFO, logger="colocate"):
        for _ in range(2):
            fallbacks.tell([Fallback("a little"), Fallback("much", is_costly=True)])
    assert [(r.levelname, r.message) for r in caplog.records] == [("INFO", "a little"), ("WARNING", "much")]


def test_engine_and_stack_say_it_on_a_gpu_and_nothing_on_a_cpu(caplog, monkeypatch):
    class OnGpu(Layout):
        device = torch.device("cuda", 0)

    model = make_model("mistral-window")
    layout = layout_for(model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "__version__", f"{TESTED['PyTorch'][0]}.0")
    with caplog.at_level(logging.INFO, logger="colocate"):
        stack.tell_fallbacks(model)
        TritonBackend().tell_fallbacks(layout)
        assert not caplog.records
        on_gpu = OnGpu(**vars(layout))
        monkeypatch.setattr(stack, "layout_for", lambda model: on_gpu)
        for _ in range(2):
            stack.tell_fallbacks(model)
            TritonBackend().tell_fallbacks(on_gpu)
    assert [(r.levelname, r.message.split(":")[0]) for r in caplog.records] == [
        ("WARNING", "Attention in training takes padded matrix products"),
        ("WARNING", "Attention in rollouts takes padded products and small tiles"),
        ("INFO", "In rollouts SwiGLU and the output head are two kernels each, and few rows take cuBLAS"),
    ]
    assert caplog.text.count("and the model is in torch.float32") == 3


@pytest.mark.parametrize(("major", "reason"), [(8, "H100 and H200"), (9, "pip install")])
def test_why_not_cudnn(major, reason, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_capability", lambda device: (major, 0))
    monkeypatch.setattr(cudnn_attention, "_is_installed", lambda: False)
    device = torch.device("cuda", 0)
    assert reason in (cudnn_attention.why_not_cudnn(device, torch.bfloat16, 128) or "")
    monkeypatch.setattr(cudnn_attention, "_is_installed", lambda: True)
    assert cudnn_attention.has_cudnn(device, torch.bfloat16, 128) is (major == 9)
