"""What Triton's interpreter does otherwise than a GPU, mended; test_interpreter.py has a program for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def mended() -> Iterator[None]:
    """In this context the interpreter does what compiled kernels do."""
    with pytest.MonkeyPatch.context() as patch:
        _count_to_loaded_numbers(patch)
        _mask_by_scalars(patch)
        _find_places_among_nans(patch)
        _carry_into_exponents(patch)
        yield


def _count_to_loaded_numbers(patch: pytest.MonkeyPatch) -> None:
    """`range` up to a loaded number: numpy 2.4 makes none of an array of one element, as Triton 3.6 asks."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


def _mask_by_scalars(patch: pytest.MonkeyPatch) -> None:
    """Masks that a scalar's comparison is part of: they are kept as integers, which Triton 3.9 refuses."""
    builder = interpreter.InterpreterBuilder
    for name in ("create_masked_load", "create_masked_store"):
        patch.setattr(builder, name, _with_bits(getattr(builder, name), 1 if name.endswith("load") else 2))


def _with_bits(access: Callable[..., Any], position: int) -> Callable[..., Any]:
    """`access` with the mask, its argument at `position` behind `self`, as bits."""

    def accessed(self: Any, *arguments: Any, **options: Any) -> Any:
        mask = arguments[position]
        bits = interpreter.TensorHandle(np.asarray(mask.data).astype(bool), tl.int1)
        return access(self, *arguments[:position], bits, *arguments[position + 1 :], **options)

    return accessed


def _find_places_among_nans(patch: pytest.MonkeyPatch) -> None:
    """`argmax` where all is NaN: some place on a GPU, an exception in the interpreter from Triton 3.8 on."""
    original = interpreter.ReduceOps.min_max

    def found(self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        def place(data: np.ndarray, axis: int | None, keepdims: bool) -> Any:
            all_nan = np.isnan(data).all(axis=axis, keepdims=True)
            return idx_reduce_op(np.where(all_nan, 0, data), axis=axis, keepdims=keepdims)

        with np.testing.suppress_warnings() as warnings:
            warnings.filter(RuntimeWarning, "All-NaN")
            return original(self, values, val_reduce_op, idx_reduce_op and place)

    patch.setattr(interpreter.ReduceOps, "min_max", found)


def _carry_into_exponents(patch: pytest.MonkeyPatch) -> None:
    """Rounding to e4m3 where it reaches the next power of two: Triton 3.6 drops the carry."""
    original = interpreter._convert_float

    def converted(data: np.ndarray, from_dtype: Any, to_dtype: Any, rounding: Any) -> np.ndarray:
        if from_dtype != tl.float32 or to_dtype != tl.float8e4nv:
            return original(data, from_dtype, to_dtype, rounding)
        rounded = torch.from_numpy(data.view("float32").copy()).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", converted)
