"""Kernels compiled ahead for a GPU that is not here: prints in JSON what was compiled, loaded and launched.

    python absent_gpu.py CACHE CAPABILITY

Run without Triton's interpreter. Triton's driver is a stand-in, which has a GPU of the compute capability
(such as 90) and notes what it is asked to load and to launch; compiler, assembler and cache are Triton's own.
"""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from colocate.kernels.compile_ahead import compiling
from colocate.kernels.layer import norms, rotary
from colocate.kernels.matmul import gate
from colocate.kernels.train import softmax

compiled: dict[str, list[str]] = {"ahead": [], "as needed": []}
loaded: list[str] = []
launched: list[str] = []


class Driver:
    """The part of Triton's driver that compiling, loading and launching ask for."""

    def __init__(self, capability: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.launcher_cls = lambda src, metadata: lambda *args: launched.append(src.name)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**20},
            load_binary=lambda name, *_: (loaded.append(name) or name, name, 32, 0, 1024),
        )


def note(*, src: Any, **_: Any) -> None:
    is_ahead = threading.current_thread().name.startswith("compile_ahead")
    compiled["ahead" if is_ahead else "as needed"].append(src.name)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch() -> None:
    """Some of the kernels of a training step."""
    x, weight, table = tensor(64, 1536), tensor(1536), tensor(64, 128)
    for _ in range(2):  # as a second layer would
        norms.rms_norm(x, weight, 1e-6)
    norms.rms_norm_backward(x, x, weight, 1e-6)
    gate.silu_mul(tensor(64, 17920))
    rotary.rotate(tensor(64, 16, 128), table, table, 12, None, None, 1e-6)
    rows = [tensor(64, dtype=torch.float32) for _ in range(3)]
    products, targets = tensor(64, 151936, dtype=torch.float32), tensor(64, dtype=torch.int64)
    softmax.softmax_statistics(
        products, targets, None, 1.0, None, log_z=rows[0], logprobs=rows[1], entropies=rows[2]
    )


def main(cache: str, capability: str) -> None:
    triton.knobs.cache.dir = cache
    triton.knobs.compilation.listener = note
    driver.set_active(Driver(int(capability)))
    others: list[int] = []

    def elsewhere() -> None:
        gate.silu_mul_backward(tensor(64, 8960), tensor(64, 17920))
        others.append(len(launched))

    with compiling(torch.device("meta")):
        launch()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        num_launched = len(launched)
    ahead = {name: sorted(names) for name, names in compiled.items()}
    launch()
    print(
        json.dumps(
            {
                "compiled": ahead,
                "loaded": sorted(loaded),
                "launched_elsewhere": others,
                "launched_within": num_launched,
                "compiled_after": sum(map(len, compiled.values())) - sum(map(len, ahead.values())),
                "launched_after": len(launched) - num_launched,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
