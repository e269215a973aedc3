"""Which operations of a layer are kernels, and that kernels are called as the operations are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rounding import draw
from transformers.activations import ACT2FN

from colocate.kernels.layer import norms, rotary
from colocate.kernels.matmul import gate
from colocate.kernels.train import attention_merge, operations
from colocate.weights.low_rank import LowRank

EPS = 1e-6


def inputs(dtype: torch.dtype) -> dict[str, tuple[Callable[..., object], list[object]]]:
    """A call of each operation, at sizes that no block of a kernel divides."""
    num_heads, num_kv_heads, head_dim, num_tokens, width = 5, 2, 16, 7, 100
    normal = partial(draw, torch.Generator().manual_seed(0), dtype=dtype)
    x, grad, residual = normal(3, num_tokens, width)
    gate_up, weight = normal(num_tokens, 2 * width), normal(width)
    q_norm, k_norm = normal(2, head_dim)
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, other_q = normal(2, num_tokens, num_heads, head_dim)
    k, v = normal(2, num_tokens, num_kv_heads, head_dim)
    angles = list(normal(2, num_tokens, head_dim))
    lse, other_lse = normal(2, num_heads, num_tokens).to(torch.promote_types(dtype, torch.float32))
    silu = ACT2FN["silu"]
    low_rank = LowRank(
        (normal(num_tokens, 4), normal(num_tokens, 3)), (normal(width, 4), normal(width, 3)), (0.5, 2.0)
    )
    grad_low_rank = LowRank((normal(num_tokens, 3),), (normal(3, width).T,), (1.0,))
    return {
        "rms_norm": (operations.rms_norm, [x, weight, EPS]),
        "rms_norm_backward": (operations.rms_norm_backward, [grad, x, weight, EPS, residual]),
        "rms_norm_backward in place": (
            operations.rms_norm_backward,
            [grad, x, weight, EPS, residual, None, torch.empty_like(x)],
        ),
        "rotate": (operations.rotate, [qkv, *angles, num_heads, q_norm, k_norm, EPS]),
        "rotate_backward": (
            operations.rotate_backward,
            [q, k, v, qkv, *angles, q_norm, k_norm, EPS],
        ),
        "rotate_backward without norms": (
            operations.rotate_backward,
            [q, k, v, qkv, *angles, None, None, EPS],
        ),
        "gate": (operations.gate, [silu, gate_up]),
        "gate_backward": (operations.gate_backward, [grad, silu, gate_up]),
        "gate of GELU": (operations.gate, [ACT2FN["gelu_pytorch_tanh"], gate_up]),
        "gate_backward of GELU": (
            operations.gate_backward,
            [grad, ACT2FN["gelu_pytorch_tanh"], gate_up],
        ),
        "gate with adapters": (operations.gate, [silu, gate_up, low_rank]),
        "gate_backward with adapters": (
            operations.gate_backward,
            [grad, silu, gate_up, low_rank, grad_low_rank],
        ),
        "gate_backward with adapters of gate and up": (
            operations.gate_backward,
            [grad, silu, gate_up, low_rank],
        ),
        "merge_attention": (operations.merge_attention, [q, lse, other_q, other_lse]),
    }


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Names of the kernels' functions that operations have called."""
    called: list[str] = []

    def recorded(function: Callable[..., object], *args: object, **options: object) -> object:
        called.append(function.__name__)
        return function(*args, **options)

    for module, names in (
        (norms, ("rms_norm", "rms_norm_backward")),
        (rotary, ("rotate", "rotate_backward")),
        (gate, ("silu_mul", "silu_mul_low_rank", "silu_mul_backward", "silu_mul_low_rank_backward")),
        (attention_merge, ("merge_attention",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, partial(recorded, getattr(module, name)))
    return called


def moved(argument: object, device: torch.device) -> object:
    if isinstance(argument, LowRank):
        factors = tuple(factor.to(device) for factor in argument.factors)
        return LowRank(tuple(part.to(device) for part in argument.reduced), factors, argument.scalings)
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


def assert_same(actual: object, expected: object, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    tensors = (actual, expected) if isinstance(actual, tuple) else ((actual,), (expected,))
    for one, two in zip(*tensors, strict=True):
        if two is None:
            assert one is None
        else:
            assert one.dtype == two.dtype
            torch.testing.assert_close(one.cpu(), two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in sorted(inputs(torch.float32))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        # Triton's interpreter multiplies no matrices of bfloat16.
        if torch.cuda.is_available() or not ("adapters" in name and dtype == torch.bfloat16)
    ],
)
def test_operations_run_kernels(name, dtype, device, launches, monkeypatch):
    operation, arguments = inputs(dtype)[name]
    expected = operation(*arguments)
    assert not launches
    if device.type == "cpu":
        monkeypatch.setattr(operations, "_have_kernels", lambda *tensors: True)
    _, arguments = inputs(dtype)[name]
    arguments = [moved(a, device) for a in arguments]
    assert_same(operation(*arguments), expected, dtype)
    assert len(launches) == 1


@pytest.mark.gpu
def test_other_activations_and_types_run_without_kernels(launches):
    gate_up = torch.randn(3, 8, device="cuda").bfloat16()
    expected = F.gelu(gate_up[:, :4]) * gate_up[:, 4:]
    assert torch.equal(operations.gate(F.gelu, gate_up), expected)
    weight = torch.ones(4, device="cuda")  # a norm in float32, as QLoRA's preparation leaves it
    assert operations.rms_norm(gate_up[:, :4], weight, EPS).dtype == torch.float32
    assert operations.gate(F.silu, gate_up.double()).dtype == torch.float64
    assert not launches
