"""What tests of kernels for compute capability 9.0 have in common; as a program, compiles some.

python hopper.py < jobs.json > compiled.json
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_MEMORY_BYTES = 227 * 1024
"""What one program may have."""

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="products of warp groups are those of compute capability 9.0",
)

Job = dict[str, Any]
"""What to compile: `module` and `kernel`; `dtype` of the tensors that the copy engine moves, their `blocks`;
`constants`, the compile-time arguments; `types` of others, which are integers if not named."""


def compile_all(jobs: Sequence[Job], cache: Path) -> list[dict[str, Any]]:
    """Compile kernels, which takes no GPU, and check that they fit into shared memory and registers.

    In a process of its own: here Triton may have been imported as an interpreter.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        check=False,
    )
    assert done.returncode == 0 and "FP_FUSION" not in done.stderr, done.stderr
    compiled = json.loads(done.stdout)
    for one in compiled:
        assert one["shared_bytes"] <= SHARED_MEMORY_BYTES and not one["spills"], one
    return compiled


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    compiled = []
    for job in json.load(sys.stdin):
        kernel = getattr(importlib.import_module(job["module"]), job["kernel"])
        constants, dtype = job["constants"], job["dtype"]
        signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
        signature |= job.get("types", {})
        for name, block in job["blocks"].items():
            element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
            layout = gl.NVMMASharedLayout.get_default_for(block, element)
            signature[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        result = triton.compile(
            GluonASTSource(kernel, signature, at, {}),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4},
        )
        ptx = result.asm["ptx"]
        compiled.append(
            {
                "shared_bytes": result.metadata.shared,
                "spills": "st.local" in ptx,
                "num_products": ptx.count("wgmma.mma_async"),
            }
        )
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main()
