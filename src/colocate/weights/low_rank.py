"""The low-rank term that adapters add to a product, as factors that are not multiplied out yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_RANK = 64
"""Largest rank with which a kernel adds the factors' product while it reads the first term. With a larger
rank the additional arithmetic takes longer than the pass over memory that it saves."""


@dataclass(frozen=True)
class LowRank:
    """A sum that is still in factors, its columns in as many blocks of equal width as there are factors:

        block i = scalings[i] * reduced[i] factors[i]^T

    The factors are a few MB where the sum would be hundreds: a kernel that reads the product anyway can add
    it on the way, without a pass of its own over the product.
    """

    reduced: tuple[Tensor, ...]
    """[T, rank] each."""
    factors: tuple[Tensor, ...]
    """[width, rank] each, of any strides and type; products take them in the type of `reduced`."""
    scalings: tuple[float, ...]

    def parts(self) -> list[tuple[Tensor, Tensor, float]]:
        """(reduced [T, rank], factor [width, rank], scaling) of each block."""
        return list(zip(self.reduced, self.factors, self.scalings, strict=True))

    def halves(self) -> list[tuple[Tensor, Tensor, float]]:
        """`parts` as one block of gate and one of up, even if both are one matrix with one adapter."""
        parts = self.parts()
        if len(parts) == 1:
            ((reduced, factor, scaling),) = parts
            parts = [(reduced, half, scaling) for half in factor.chunk(2)]
        return parts

    def added_to(self, product: Tensor) -> Tensor:
        """`product` [T, blocks * width] plus this sum, rounded once."""
        output = product.clone()
        blocks = output.chunk(len(self.factors), dim=1)
        for block, (reduced, factor, scaling) in zip(blocks, self.parts(), strict=True):
            block.addmm_(reduced, factor.T.to(reduced.dtype), alpha=scaling)
        return output
