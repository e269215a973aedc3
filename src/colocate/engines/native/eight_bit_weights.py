"""Weights in 8 bits for a rollout's products with q, k, v, gate, up and down.

They are made from the trainer's when a rollout begins, which moves 5 bytes per weight, in an arena like the
cache's, so captured graphs find the same addresses in every rollout. The output projection and the head stay
in the model's type.

Each group of weights that read the same input is divided by one power of two. e4m3's steps are relative, so a
factor for each block of 128 would only help weights less than 2^-14 of the largest. The same holds for the
inputs of q, k, v, gate and up: a norm's outputs are at most √hidden times its largest weight, so their factor
is known in advance. The inputs of down have no such bound, nor have inputs that no norm makes: each row is
divided by a factor of its own, so that a completion does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from colocate.engines.native.rollout_weights import RolloutWeights, WeightMemory, aligned, num_inputs
from colocate.kernels.fp8 import e4m3
from colocate.weights.adapters import EightBitWeight, base_linear
from colocate.weights.layouts import Layout
from colocate.weights.quantized import is_4bit

LEAST_CAPABILITY = (8, 9)
"""The compute capability from which on GPUs have e4m3 numbers."""
SIDE = 16
"""The number that divides the sides of matrices in 8 bits: cuBLAS wants pointers and sides aligned to 16
bytes, and has refused 15 rows (github.com/pytorch/pytorch/issues/167882)."""
ROWS_AT_A_TIME = 4096
"""Rows of a weight that are quantised at a time where no kernel does it."""


def check_gpu(rollout_precision: str, layout: Layout, capability: tuple[int, int], gpu: str) -> None:
    """Refuse 8 bits if a `gpu` of this compute capability, or the model, has no products in 8 bits. The
    layout may be of this rank's part, or on the meta device."""
    if rollout_precision != "fp8":
        return
    if capability < LEAST_CAPABILITY:
        raise ValueError(
            "rollout_precision='fp8' multiplies e4m3 numbers, which GPUs have from compute capability "
            f"{_dotted(LEAST_CAPABILITY)} on; {gpu} has {_dotted(capability)}. Set "
            "rollout_precision='fp8_kv'."
        )
    sides = {side for modules, _ in _groups(layout) for side in _shape(modules, layout)}
    odd = [str(side) for side in sorted(sides) if side % SIDE]
    if odd:
        raise ValueError(
            f"rollout_precision='fp8': products in 8 bits take matrices whose sides are multiples of {SIDE}, "
            f"and those of q, k, v, gate, up and down have {', '.join(odd)}. Set rollout_precision='fp8_kv'."
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class EightBitWeights(WeightMemory[EightBitWeight]):
    """The weights of a rollout in 8 bits."""

    def __init__(self) -> None:
        super().__init__("rollout weights in 8 bits")

    def needed_bytes(self, layout: Layout) -> int:
        """Bytes of the weights and their factors."""
        return sum(sum(map(aligned, _sizes(modules, layout))) for modules, _ in _groups(layout))

    def allocate(self, layout: Layout) -> None:
        """Take the memory. Contents are undefined until `prepare`.

        Raises:
            ArenaExhausted: the device has too little free memory; memory taken earlier stays taken.
        """
        self._take(self.needed_bytes(layout), layout.device)

    @torch.no_grad()
    def prepare(self, layout: Layout, weights: RolloutWeights) -> None:
        """Quantise the weights as they are now, from where `weights` has them."""
        assert self._storage is not None, "there is no memory for the weights in 8 bits"
        self._places.clear()
        offset = 0
        for modules, norm in _groups(layout):
            places = []
            for size in _sizes(modules, layout):
                places.append(self._storage[offset : offset + size])
                offset += aligned(size)
            shape = _shape(modules, layout)
            values = places[0].view(e4m3.DTYPE).view(shape)
            factor, input_factor = (place.view(torch.float32) for place in places[1:])
            source = weights.of(modules, layout.part).read()[: shape[0]]
            low, high = source.aminmax()
            factor[0] = e4m3.factors(e4m3.exponents_for(torch.maximum(-low, high)))
            _quantize(source, factor[0], values)
            input_factor[0] = 1.0 if norm is None else _norm_factor(norm, shape[1], layout.norm_offset)
            self._places[base_linear(modules[0])] = EightBitWeight(
                values, factor[0], input_factor[0], norm is None, layout.dtype
            )

    def of(self, modules: Sequence[nn.Module]) -> EightBitWeight | None:
        """The weight of layers that read the same input; None: it stays in the model's type."""
        return self._places.get(base_linear(modules[0]))


def _quantize(source: Tensor, factor: Tensor, out: Tensor) -> None:
    if source.is_cuda:
        from colocate.kernels.fp8.quantize import scaled  # triton comes with CUDA builds of torch

        scaled(source.contiguous(), factor, out)  # parts of down lie transposed
        return
    for part, place in zip(source.split(ROWS_AT_A_TIME), out.split(ROWS_AT_A_TIME), strict=True):
        place.view(torch.uint8).copy_((part.float() / factor).to(e4m3.DTYPE).view(torch.uint8))


def _norm_factor(norm: Tensor, hidden_size: int, offset: float | None) -> Tensor:
    """The power of two, [] float32, by which every output of a norm with weight [hidden] is at most 448."""
    largest = math.sqrt(hidden_size) * (norm.detach() + (offset or 0.0)).abs().max().float()
    return e4m3.factors(e4m3.exponents_for(largest))


def _groups(layout: Layout) -> Iterator[tuple[Sequence[nn.Module], Tensor | None]]:
    """Layers in 8 bits that read the same input, and the weight of the norm whose output they read; None:
    they read no norm's output."""
    for layer in layout.layers:
        for modules, norm in ((layer.qkv, layer.input_norm), (layer.gate_up, layer.mlp_norm)):
            yield modules, None if norm is None else norm.weight  # type: ignore[misc]  # norms have weights
        yield (layer.down,), None


def _shape(modules: Sequence[nn.Module], layout: Layout) -> tuple[int, int]:
    """Rows and columns of this rank's part of layers that read the same input."""
    linears = [base_linear(module) for module in modules]
    rows = (linear.out_features if is_4bit(linear) else len(linear.weight) for linear in linears)
    return sum(rows), num_inputs(modules, layout.part)


def _sizes(modules: Sequence[nn.Module], layout: Layout) -> tuple[int, int, int]:
    """Bytes of a weight, its factor and its input's, each aligned as cuBLAS wants it
    (pytorch/issues/141749)."""
    rows, columns = _shape(modules, layout)
    return rows * columns, 4, 4
