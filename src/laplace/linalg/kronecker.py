"""A symmetric matrix c (L (x) R) of one tensor's weights, the rows of the tensor by L and the rest of it by R."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kronecker:
    """Holds c (L (x) R), positive definite; of a vector of weights, c L."""

    strength: Tensor  # c: ()
    left: Tensor  # L: (O, O)
    right: Tensor  # R: (I, I)

    def matrix(self) -> Tensor:  # (O I, O I)
        """Write it out."""
        return self.strength * torch.kron(self.left, self.right)

    def diagonal(self) -> Tensor:  # (O I,)
        """Return its diagonal."""
        return self.strength * torch.outer(self.left.diagonal(), self.right.diagonal()).flatten()

    def logdet(self) -> Tensor:
        """Return I log det L + O log det R + O I log c."""
        o, i = len(self.left), len(self.right)
        sides = i * torch.linalg.slogdet(self.left.double())[1] + o * torch.linalg.slogdet(self.right.double())[1]
        return sides + o * i * self.strength.double().log()

    def quadratic(self, vector: Tensor) -> Tensor:  # (O I,) -> ()
        """Return v^T c (L (x) R) v = c <V, L V R> of the vector as a matrix V, (O, I)."""
        v = vector.double().reshape(len(self.left), len(self.right))
        return self.strength.double() * (v * (self.left.double() @ v @ self.right.double())).sum()
