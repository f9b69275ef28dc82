"""Read the inputs of layers, some examples at a time: a convolution's patches are many times its input."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from laplace.backprop.covariances import Basis, rotate_left
from laplace.linalg.conditioning import float32_products_suffice
from laplace.linalg.symmetric import NARROW, exact, gram, plain_gram, total

_PRODUCTS = 2**22  # numbers in the matrix products that are summed at a time
_SMALL = 2**15  # numbers up to which float64 costs no more than asking whether float32 suffices


class Activations(ABC):
    """Reads the inputs a[n, gr, i, t] of a layer for some examples at a time."""

    shape: tuple[int, int, int, int]  # (N, Gr, I, T)
    nbytes: int  # that they occupy while they are kept

    @abstractmethod
    def read(self, part: slice) -> Tensor:
        """Return a of some examples, (n, Gr, I, T)."""

    @abstractmethod
    def features(self, part: slice, index: Tensor) -> Tensor:
        """Return some of the Gr * I features of some examples, (n, F, T)."""

    @abstractmethod
    def gram(self) -> Tensor:
        """Return the sum over examples and positions of a a^T, (Gr, I, I)."""

    @abstractmethod
    def mean(self) -> Tensor:
        """Return the mean over positions, (N, Gr, I, 1)."""

    def turned(self, part: slice, basis: Basis | None, dtype: torch.dtype) -> Tensor:
        """Return Q^T a of some examples, (n, Gr, I, T)."""
        return rotate_left(self.read(part).to(dtype), basis)

    def contracted(self, part: slice, g: Tensor) -> Tensor:  # (K, n, Gr, O, T) -> (K, n, Gr, O, I)
        """Return sum_t g a^T of some examples."""
        return contract(self.read(part).to(g.dtype), g)


class Stored(Activations):
    """Holds activations that are already in memory."""

    def __init__(self, a: Tensor) -> None:  # (N, Gr, I, T)
        n, groups, i, t = a.shape
        self.a, self.shape, self.nbytes = a, (n, groups, i, t), a.nbytes

    def read(self, part: slice) -> Tensor:
        return self.a[part]

    def features(self, part: slice, index: Tensor) -> Tensor:
        return self.a[part].flatten(1, 2)[:, index]

    def gram(self) -> Tensor:
        return grams(self.a)

    def mean(self) -> Tensor:
        return self.a.mean(3, keepdim=True)


class Ones(Activations):
    """Stands for a constant input 1, that of a bias."""

    nbytes = 0

    def __init__(self, g: Tensor) -> None:  # (K, N, 1, O, 1)
        self.like, self.shape = g, (g.shape[1], 1, 1, 1)

    def read(self, part: slice) -> Tensor:
        return self.like.new_ones(len(range(self.shape[0])[part]), 1, 1, 1)

    def features(self, part: slice, index: Tensor) -> Tensor:
        return self.read(part)[:, 0].expand(-1, len(index), -1)

    def gram(self) -> Tensor:
        return self.like.new_full((1, 1, 1), float(self.shape[0]))

    def mean(self) -> Tensor:
        return self.read(slice(None))


def contract(a: Tensor, g: Tensor) -> Tensor:  # (n, Gr, I, T), (K, n, Gr, O, T) -> (K, n, Gr, O, I)
    """Return sum_t g a^T, in groups."""
    k, n, groups, o, t = g.shape
    left = g.permute(1, 2, 0, 3, 4).reshape(n, groups, k * o, t)
    return (left @ a.mT).reshape(n, groups, k, o, -1).permute(2, 0, 1, 3, 4)


def grams(x: Tensor) -> Tensor:  # (M, Gr, D, T) -> (Gr, D, D)
    """Return the sum over m and t of x x^T, per group. Copies x only where there is a single position."""
    m, groups, d, t = x.shape
    if t == 1 and groups == 1:
        return gram(x.reshape(m, d)).unsqueeze(0)
    if t >= 8 and d <= NARROW and x.numel() > _SMALL and m * t >= 2 * d:
        found = _summed_over_examples(x)
        if x.dtype == torch.float64 or not exact(m, d, t) or float32_products_suffice(found):
            return found
    x = x.double() if exact(m, d, t) else x
    if groups > 1 and t < 8:
        rows = x.permute(1, 0, 3, 2).reshape(groups, m * t, d)
        return rows.mT @ rows
    if t < 8:
        return plain_gram(x.squeeze(1).mT.reshape(m * t, d)).unsqueeze(0)
    if groups == 1 and _PRODUCTS // (d * d) < 8:  # one product per example would be larger than its factors
        return total(
            plain_gram(part.squeeze(1).mT.reshape(-1, d)) for part in x.split(max(1, _PRODUCTS // (d * t)))
        ).unsqueeze(0)
    return _summed_over_examples(x)


def _summed_over_examples(x: Tensor) -> Tensor:  # (M, Gr, D, T) -> (Gr, D, D)
    """Return `grams` from one product per example. Narrow ones are added in float64, which costs nothing more."""
    _, groups, d, _ = x.shape
    dtype = torch.float64 if d <= NARROW else x.dtype
    return total((part @ part.mT).sum(0, dtype=dtype) for part in x.split(max(1, _PRODUCTS // (groups * d * d))))
