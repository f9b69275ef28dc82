"""Decompose wide Kronecker factors when the prior is known, and only as exactly as it asks for.

A decomposition in float32 takes half the time of one in float64. Its error is 3e-6 of the largest eigenvalue of s H.
A prior precision delta covers that if it is not far below that eigenvalue, because the precision is s H + delta.
The norms of the factors tell beforehand. The decomposition in float64 is made when a smaller prior first asks for it,
and serves every prior from then on.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from laplace.linalg.conditioning import prior_covers
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import BLURRED, Clipped
from laplace.structures.base import Sums
from laplace.structures.block import Block
from laplace.structures.blockdiag import Eigh
from laplace.structures.kron_block import KronBlock, KronGaussian


class WideKronBlock(Block):
    """Holds the two factors of one parameter tensor, at least one of them wide. The prior is added exactly."""

    def __init__(self, sums: Sums, shape: tuple[int, ...], eigh: Eigh) -> None:
        self.shape, self._sums, self._eigh = shape, sums, eigh
        self._clipped = Clipped()

    def gaussian(self, scale: Tensor, precision: Tensor | Kronecker) -> KronGaussian:
        return self._block(scale, precision).gaussian(scale, precision)

    def matrix(self) -> Tensor:
        return self.exact.matrix()

    @property
    def clipped(self) -> Clipped:
        _ = self.exact
        return self._clipped

    @property
    def blur(self) -> float:
        return self.exact.blur

    @property
    def blur_bound(self) -> float:
        return BLURRED * self._norm

    @cached_property
    def exact(self) -> KronBlock:
        """Return the block with its factors decomposed in float64."""
        return self._made(self._eigh)

    @cached_property
    def rounded(self) -> KronBlock:
        """Return the block with its wide factors decomposed in float32."""
        return self._made(self._eigh.in_float32)

    def _made(self, eigh: Eigh) -> KronBlock:
        before, self._eigh.clipped = self._eigh.clipped, Clipped()
        try:
            return KronBlock(self._sums, self.shape, False, eigh)
        finally:
            self._clipped += self._eigh.clipped
            self._eigh.clipped = before

    def _block(self, scale: Tensor, precision: Tensor | Kronecker) -> KronBlock:
        if "exact" in self.__dict__ or isinstance(precision, Kronecker) or precision.numel() != 1:
            return self.exact
        delta, largest = float(precision.detach()), float(scale.detach()) * self._norm
        return self.rounded if prior_covers(delta, largest) else self.exact

    @cached_property
    def _norm(self) -> float:
        """Return a number that no eigenvalue of H exceeds."""
        found = 1.0
        for key, factor in self._sums.items():
            if key == "count":
                found /= float(factor)
            elif not key.endswith("_sketch"):  # whose trace is there as well
                found *= float(factor.abs().sum(-1).max() if factor.dim() == 3 else factor.max())
        return found
