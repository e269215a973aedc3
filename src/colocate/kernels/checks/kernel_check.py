"""Tries fast kernels against PyTorch, for a Triton that they were never tested with.

    python -m colocate.kernels.checks.kernel_check DEVICE_INDEX DTYPE

It prints in JSON, kernel by kernel, why it cannot be used, or null. It runs in a process of its own: a kernel
that a new compiler has broken may hang, or leave its process without a usable GPU.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT_S = 300
"""A check that takes longer has failed: kernels that wait for each other never end."""
TOLERANCE = 1e-2
"""The largest norm of an error over the norm of the result. Rounding to bfloat16 leaves 2e-3."""
NUM_RUNS = 3
"""Every run must give the same bits: kernels that do not wait for each other differ from run to run."""

Check = Callable[[torch.Generator, torch.dtype], tuple[Callable[[], Tensor], Tensor]]
"""Draws the operands of a kernel: returns what runs it, and its result in float32 by PyTorch."""


class CheckOutcome(NamedTuple):
    """Results of the fast kernels, compared with PyTorch's."""

    failures: dict[str, str]
    """Reasons why kernels cannot be used, by name; empty: all agree with PyTorch."""
    seconds: float


@functools.cache
def outcome(device_index: int, dtype: torch.dtype) -> CheckOutcome:
    """Try the fast kernels on this GPU with tensors of this 16-bit type, once in a process."""
    start_s = time.perf_counter()
    command = [sys.executable, "-m", __name__, str(device_index), str(dtype).removeprefix("torch.")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return CheckOutcome(dict.fromkeys(CHECKS, f"no end after {LIMIT_S} s"), float(LIMIT_S))
    seconds = time.perf_counter() - start_s
    if done.returncode:  # such as by a signal
        errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*Error: ", line)]
        reason = errors[-1] if errors else f"the process that tried it ended with {done.returncode}"
        return CheckOutcome(dict.fromkeys(CHECKS, reason), seconds)
    found = json.loads(done.stdout.splitlines()[-1])
    return CheckOutcome({kernel: reason for kernel, reason in found.items() if reason is not None}, seconds)


def main() -> None:
    device, dtype = torch.device("cuda", int(sys.argv[1])), getattr(torch, sys.argv[2])
    torch.cuda.set_device(device)
    found = {kernel: _why_not(check, torch.Generator(device), dtype) for kernel, check in CHECKS.items()}
    print(json.dumps(found))


def _why_not(check: Check, generator: torch.Generator, dtype: torch.dtype) -> str | None:
    """The reason why this kernel cannot be used; None: it can."""
    try:
        run, expected = check(generator.manual_seed(0), dtype)
        results = [run() for _ in range(NUM_RUNS)]
        error = ((results[0].float() - expected).norm() / expected.norm()).item()
        if not error <= TOLERANCE:
            return f"its error is {error:.2g} of the result"
        if not all(torch.equal(result, results[0]) for result in results):
            return "two runs have different results"
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _draw(
    generator: torch.Generator, num_rows: int, depth: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x [num_rows, depth] and weights [width, depth]."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    x = torch.randn(num_rows, depth, **options)
    return x.to(dtype), (torch.randn(width, depth, **options) / depth**0.5).to(dtype)


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    return F.silu(gate) * up


def _streamed(generator: torch.Generator, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Tensor]:
    """Products in one and in several parts, and a gated one, each longer than its ring."""
    from colocate.kernels.matmul import streamed

    x, weight = _draw(generator, 8, 8960, 1536, dtype)
    wide, both = _draw(generator, 64, 1536, 2 * 4864, dtype)

    def run() -> Tensor:
        results = [streamed.product(x, weight).sum(0), streamed.product(wide, both).sum(0)]
        return torch.cat([result.flatten().float() for result in (*results, streamed.swiglu(wide, both))])

    expected = (x.float() @ weight.float().T, wide.float() @ both.float().T, _gated(wide, both))
    return run, torch.cat([result.flatten() for result in expected])


def _swiglu(generator: torch.Generator, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Tensor]:
    """The gated product of few rows, and that of many rows in large and in narrow tiles."""
    from colocate.kernels.matmul import swiglu

    x, weight = _draw(generator, 512, 1536, 2 * 8960, dtype)
    few, _ = _draw(generator, 128, 1536, 1, dtype)
    return (
        lambda: torch.cat((swiglu.swiglu(x, weight), swiglu.swiglu(few, weight))),
        torch.cat((_gated(x, weight), _gated(few, weight))),
    )


def _head(generator: torch.Generator, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Tensor]:
    """Logits, of a vocabulary that is no whole number of tiles, and what a sampler reduces of them."""
    from colocate.kernels.decode import head, sampling

    hidden, weight = _draw(generator, 256, 1536, 18_001, dtype)
    out = torch.empty(len(hidden), len(weight), device=hidden.device)

    def run() -> Tensor:
        parts = head.logits_and_parts(hidden, weight, 1.0, out)
        return torch.cat((out, parts.maxima, parts.sums), dim=1)

    logits = hidden.float() @ weight.float().T
    padded = F.pad(logits, (0, -len(weight) % sampling.PART_SIZE), value=-torch.inf)
    tiles = padded.view(len(hidden), -1, sampling.PART_SIZE)
    maxima = tiles.amax(dim=2)
    sums = (tiles - maxima[..., None]).exp().sum(dim=2)
    return run, torch.cat((logits, maxima, sums), dim=1)


CHECKS: dict[str, Check] = {"streamed": _streamed, "swiglu": _swiglu, "head": _head}
"""Checks by the kernel's module."""

if __name__ == "__main__":
    main()
