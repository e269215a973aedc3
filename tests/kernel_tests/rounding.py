"""What tests of kernels have in common: values, and what counts as the same rounding."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st


def examples(number: int) -> settings:
    return settings(
        max_examples=number,
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


# The interpreter takes a second for what a GPU does in a moment.
few = examples(40 if torch.cuda.is_available() else 12)
# Triton's interpreter cuts bfloat16 off instead of rounding it; there float16 shows where values are rounded.
dtypes = st.sampled_from(
    [torch.float16, torch.float32, *([torch.bfloat16] if torch.cuda.is_available() else [])]
)
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, in rows of a wider tensor whose rest is NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def steps_apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How many representable numbers further, of 16-bit floats; 0 where they differ by at most 1e-6."""
    bits = [value.contiguous().view(torch.int16).int() for value in (x, y)]
    ordered = [torch.where(b < 0, -(b & 0x7FFF), b) for b in bits]
    return (ordered[0] - ordered[1]).abs().masked_fill_((x.float() - y.float()).abs() <= 1e-6, 0)


def assert_rounds_like(actual: torch.Tensor, expected: torch.Tensor, num_float32_ulps: float) -> None:
    """PyTorch's result, but where a last bit in float32 makes a 16-bit value round the other way.

    That happens to few values, and moves them by one step. Two roundings follow one another: if it happens
    to the first one, a product with the rounded value moves by less than two steps before it is rounded
    itself, and so by two at most.
    """
    assert not actual.isnan().any()
    if actual.dtype == torch.float32:
        rtol = num_float32_ulps * ULP[torch.float32]
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)
        return
    apart = steps_apart(actual, expected)
    num_apart = [int((apart >= num_steps).sum()) for num_steps in (1, 2, 3)]
    at_most = [0.01 * actual.numel() + 2, 1e-5 * actual.numel() + 2, 0]
    assert all(num <= most for num, most in zip(num_apart, at_most, strict=True)), (
        f"of {actual.numel()} elements, {num_apart} are 1, 2, 3 steps or more apart; at most {at_most} may be"
    )


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> None:
    """`exact` (float64) rounded once to the type, after float32 arithmetic on terms as large as `scale`."""
    smallest = 2.0**-24 if actual.dtype == torch.float16 else 0.0  # the spacing of subnormal numbers
    allowed = 0.5001 * ULP[actual.dtype] * exact.abs() + 16 * ULP[torch.float32] * scale + smallest
    assert_within(actual, exact, allowed)


def assert_within(actual: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> None:
    assert not actual.isnan().any()
    excess = (actual.double() - exact).abs() - allowed
    assert bool((excess <= 0).all()), f"off by {float(excess.max()):.3g} more than rounding explains"
