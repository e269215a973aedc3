"""Kernels compiled before they are needed, side by side.

Triton compiles a kernel where it is first launched, and the program waits for one after the other: a decode
step and a training step have some ten each, of 0.1 to 2 s. Nearly all of that is LLVM, the assembler and a C
compiler, which run without Python's lock. So the code that launches kernels runs once without launching any,
and all kernels that it asks for are compiled at the same time. No list of kernels has to be kept: the same
code launches them later.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from colocate.memory import host

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""Kernels compiled at a time; 0: none ahead, each where it is first launched."""
_ASYNC_COMPILE = "triton.runtime._async_compile"
_rehearsal = threading.Lock()
"""Held by the one rehearsal of the process, as all of them change the same function of Triton's."""


def can_compile_ahead(device: torch.device) -> bool:
    """Whether kernels are compiled for this device, by a Triton that can compile several at a time: on a GPU,
    and not in Triton's interpreter."""
    if device.type != "cuda" or not MAX_THREADS:
        return False
    import triton

    if triton.knobs.runtime.interpret or importlib.util.find_spec(_ASYNC_COMPILE) is None:
        return False
    return importlib.import_module(_ASYNC_COMPILE).active_mode.get() is None  # or the caller compiles ahead


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile this thread's kernels instead of launching them; the block ends when all are ready.

    The kernels' outputs are undefined, so nothing may depend on them: no result, and no index. A kernel that
    fails to compile raises where it is launched, after the block. An exception in the block ends the block
    with a warning and not the run, which then compiles each kernel when it needs it.

    Args:
        device: the kernels are loaded on it.
    """
    from triton.runtime.jit import JITFunction

    async_compile, num_threads = importlib.import_module(_ASYNC_COMPILE), _num_threads()
    with _rehearsal:
        run, thread = JITFunction.run, threading.get_ident()

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            is_rehearsal = threading.get_ident() == thread
            return run(kernel, *args, grid=grid, warmup=warmup or is_rehearsal, **options)

        JITFunction.run = compile_only
        try:
            with _Loading(num_threads, "compile_ahead", _use, (device,)) as executor:
                try:
                    with async_compile.AsyncCompileMode(executor, ignore_errors=True):
                        yield
                finally:  # nothing, but after Ctrl-C: then kernels still wait, and the mode is still on
                    executor.shutdown(wait=False, cancel_futures=True)
                    async_compile.active_mode.set(None)
        except Exception as error:
            logger.warning(
                "Kernels are compiled one after the other, when each is needed: compiling them ahead has "
                f"failed ({type(error).__name__}: {error})."
            )
        finally:
            JITFunction.run = run


def _num_threads() -> int:
    """This process's part of the cores that it may use."""
    num_cores = len(os.sched_getaffinity(0)) // host.num_processes()
    return min(max(num_cores, 1), MAX_THREADS)


def _use(device: torch.device) -> None:
    """Load kernels on this device in this thread, instead of on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class _Loading(ThreadPoolExecutor):
    """Compiles kernels, and loads each in the same thread, which also compiles its launcher in C."""

    def submit(self, compile_kernel: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        def work() -> Any:
            kernel = compile_kernel()
            kernel.run  # noqa: B018 - the property makes the launcher and loads the binary
            return kernel

        return super().submit(work)
