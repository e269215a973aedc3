"""Kernels are compiled ahead by Triton's own compiler, for GPUs that need not be here; none is launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from colocate.kernels import compile_ahead
from colocate.kernels.compile_ahead import can_compile_ahead, compiling

HERE = Path(__file__).parent
KERNELS = [
    "_combine_splits_kernel", "_reduce_split_kernel", "_rms_norm_backward_kernel", "_rms_norm_kernel",
    "_rotate_kernel", "_silu_mul_kernel",
]  # fmt: skip


OTHERS = [pytest.param(capability, marks=pytest.mark.slow) for capability in ("80", "89", "100", "120")]


def run(worker: str, *words: str) -> Any:
    """What a worker prints in JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE.parents[0] / "unit"), str(HERE.parents[0]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, str(HERE / worker), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("capability", ["90", *OTHERS])
def test_what_is_launched_in_the_block_is_compiled_beside_it_once_and_loaded(capability, tmp_path):
    result = run("absent_gpu.py", str(tmp_path), capability)
    # Another thread compiles and launches as ever.
    assert result["compiled"] == {"ahead": KERNELS, "as needed": ["_silu_mul_kernel"]}
    assert result["launched_elsewhere"] == [1] and result["launched_within"] == 1
    assert result["loaded"] == sorted([*KERNELS, "_silu_mul_kernel"])
    # The block has left nothing to compile; seven launches, as the norm has two.
    assert result["compiled_after"] == 0 and result["launched_after"] == 7


MORE = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("glm4", "olmo3", "hunyuan_v1_dense", "gemma3_text")
]


@pytest.mark.parametrize("family", ["qwen2", *MORE])
def test_a_rollout_and_a_step_find_all_their_kernels_compiled_and_all_else_as_it_was(tmp_path, family):
    result = run("rehearsal_worker.py", str(tmp_path), family)
    assert set(result) == {"rollout", "training"}
    for counts in result.values():
        assert counts["ahead"] > 0 and counts["as needed"] == 0, result


def test_bytes_of_keys_and_values_become_float16_without_conversions(tmp_path):
    """A conversion of whole numbers takes four times as long as what `attention_8bit` has instead."""
    ptx = run("unpacking_worker.py", str(tmp_path))
    assert {name: len(texts) for name, texts in ptx.items()} == dict.fromkeys(
        ("_rotate_and_store_kernel", "prefix_kernel", "suffix_kernel"), 1
    )
    for name in ("prefix_kernel", "suffix_kernel"):
        (text,) = ptx[name]
        loop = text[text.index("prmt.b32 low") : text.rindex("prmt.b32 low")]
        assert text.count("prmt.b32 low") >= 16 and not re.search(r"cvt\.rn\.f(16|32)\.[su]", loop), name


def test_a_rehearsal_that_fails_ends_with_a_warning(caplog):
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    with compiling(torch.device("meta")):
        raise torch.OutOfMemoryError("no memory")
    assert JITFunction.run is launch
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "(OutOfMemoryError: no memory)" in record.message


def test_nothing_is_compiled_for_a_cpu_in_the_interpreter_nor_by_a_triton_that_cannot(monkeypatch):
    import triton

    assert not can_compile_ahead(torch.device("cpu"))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert not can_compile_ahead(torch.device("cuda", 0))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert can_compile_ahead(torch.device("cuda", 0))
    with compiling(torch.device("meta")):  # the caller's own
        assert not can_compile_ahead(torch.device("cuda", 0))
    monkeypatch.setattr(compile_ahead, "_ASYNC_COMPILE", "triton.runtime.absent")
    assert not can_compile_ahead(torch.device("cuda", 0))


def test_two_threads_rehearse_one_after_the_other():
    from triton.runtime.jit import JITFunction

    launch, order = JITFunction.run, []

    def rehearse() -> None:
        with compiling(torch.device("meta")):
            order.append("second")

    second = threading.Thread(target=rehearse)
    with compiling(torch.device("meta")):
        second.start()
        second.join(0.2)
        order.append("first")
    second.join()
    assert order == ["first", "second"] and JITFunction.run is launch


@pytest.mark.parametrize("where", ["in the block", "while kernels are compiled"])
def test_after_ctrl_c_kernels_are_launched_and_compiled_as_ever(where, monkeypatch):
    from triton.runtime import _async_compile
    from triton.runtime.jit import JITFunction

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    launch = JITFunction.run
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "while kernels are compiled":
            patch.setattr(_async_compile, "as_completed", interrupt)
        with compiling(torch.device("meta")):
            if where == "in the block":
                interrupt()
    assert JITFunction.run is launch and _async_compile.active_mode.get() is None
    with compiling(torch.device("meta")):
        assert JITFunction.run is not launch


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(24)))
    assert compile_ahead._num_threads() == compile_ahead.MAX_THREADS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_ahead._num_threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert compile_ahead._num_threads() == 1
