"""LoRA kernels against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import assert_within, examples

from colocate.kernels.matmul.lora import expand
from colocate.weights.adapters import Adapter, AdapterStack

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Triton's interpreter cuts bfloat16 off instead of rounding it; there float16 shows where values are rounded.
TYPES = [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # half a step


def adapter(generator, num_in: int, num_out: int, rank: int, dtype=torch.float32) -> Adapter:
    def normal(*shape):
        return torch.randn(shape, generator=generator, device=generator.device)

    scaling = float(torch.rand((), generator=generator, device=generator.device)) * 4 - 2
    a, b = normal(rank, num_in) / num_in**0.5, normal(num_out, rank) / rank**0.5
    return Adapter(a=a.to(dtype), b=b.to(dtype), bias=None, scaling=scaling, dropout=0.0)


def project(x, y, adapters) -> torch.Tensor:
    """y after the kernel, y and t being columns of one product; y itself stays."""
    stack = AdapterStack.of(adapters)
    product = y.new_full((len(y), y.shape[1] + stack.num_rows), torch.nan)
    product[:, : y.shape[1]] = y
    for number, adapter in enumerate(stack.adapters):
        first = y.shape[1] + number * stack.padded_rank
        product[:, first : first + len(adapter.a)] = x @ adapter.a.to(x.dtype).T
    expand(product[:, : y.shape[1]], product[:, y.shape[1] :], stack)
    return product[:, : y.shape[1]]


def assert_close_to_exact(output, x, y, adapters) -> None:
    """Within the roundings that are allowed: of t to the type, and of the sum."""
    dtype, exact, bound = x.dtype, y.double(), torch.zeros_like(y, dtype=torch.float64)
    for columns, adapter in adapters:
        a, b = adapter.a.to(dtype).double(), adapter.b.to(dtype).double()
        t = x.double() @ a.t()
        exact[:, columns] += adapter.scaling * (t @ b.t())
        # float32's own rounding grows with the number of terms; 4 of them are ample for sums of this size.
        t_error = t.abs() * EPS[dtype] + 4 * EPS[torch.float32] * (x.double().abs() @ a.abs().t())
        update_error = t_error @ b.abs().t() + 4 * EPS[torch.float32] * (t.abs() @ b.abs().t())
        bound[:, columns] += abs(adapter.scaling) * update_error
    bound += (exact.abs() + bound) * EPS[dtype] * 1.01 + 1e-7
    assert_within(output, exact, bound)


@examples(25)
@given(
    num_rows=st.integers(1, 70),
    num_in=st.sampled_from([5, 64, 300, 1100]),
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    ranks=st.lists(st.sampled_from([0, 1, 3, 8, 16, 32, 65, 130, 256]), min_size=3, max_size=3),
    dtype=st.sampled_from(TYPES),
    adapter_dtype=st.sampled_from([torch.float32, None]),
    seed=st.integers(0, 2**31),
)
def test_any_shapes_ranks_and_missing_adapters(
    device, num_rows, num_in, widths, ranks, dtype, adapter_dtype, seed
):
    generator = torch.Generator(device).manual_seed(seed)
    adapters, first = [], 0
    for width, rank in zip(widths, ranks, strict=False):
        if rank:
            adapters.append(
                (
                    slice(first, first + width),
                    adapter(generator, num_in, width, rank, adapter_dtype or dtype),
                )
            )
        first += width
    if not adapters:
        return
    x = torch.randn(num_rows, num_in + 3, generator=generator, device=device).to(dtype)[:, :num_in]
    y = torch.randn(num_rows, first, generator=generator, device=device).to(dtype)
    output = project(x, y, adapters)
    assert_close_to_exact(output, x, y, adapters)
    untouched = torch.ones(first, dtype=torch.bool)
    for columns, _ in adapters:
        untouched[columns] = False
    assert torch.equal(output[:, untouched], y[:, untouched])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 128, 512, 1024])
@pytest.mark.parametrize(
    ("num_in", "widths"),
    [(3584, [3584, 512, 512]), (3584, [18944, 18944]), (18944, [3584])],
    ids=["qkv", "gate_up", "down"],
)
def test_model_shapes(device, num_rows, num_in, widths):
    generator = torch.Generator(device).manual_seed(num_rows)
    adapters, first = [], 0
    for width in widths:
        adapters.append((slice(first, first + width), adapter(generator, num_in, width, 32)))
        first += width
    x = torch.randn(num_rows, num_in, generator=generator, device=device).bfloat16()
    y = torch.randn(num_rows, first, generator=generator, device=device).bfloat16()
    assert_close_to_exact(project(x, y, adapters), x, y, adapters)


def test_what_cannot_be_stacked(device):
    generator = torch.Generator(device).manual_seed(0)
    one = adapter(generator, 8, 8, 4)
    assert AdapterStack.of([]) is None
    assert AdapterStack.of([(slice(0, 8), one)]) is not None
    assert AdapterStack.of([(slice(0, 8), one), (slice(0, 8), one)]) is None, "two adapters on one layer"
    assert AdapterStack.of([(slice(0, 8), adapter(generator, 8, 8, 257))]) is None
    with_bias = Adapter(one.a, one.b, torch.zeros(8, device=device), 1.0, 0.0)
    assert AdapterStack.of([(slice(0, 8), with_bias)]) is None
