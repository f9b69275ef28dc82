"""Read the inputs of layers, some examples at a time: a convolution's patches are many times its input."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from laplace.linalg.conditioning import float32_products_suffice
from laplace.linalg.symmetric import NARROW, exact, gram, plain_gram, total

_PRODUCTS = 2**22  # numbers in the matrix products that are summed at a time
_SMALL = 2**15  # numbers up to which float64 costs no more than asking whether float32 suffices


class Activations(Protocol):
    """Inputs a[n, gr, i, t] of a layer, read for some examples at a time."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (N, Gr, I, T)."""
        ...

    def read(self, part: slice) -> Tensor:
        """Return a of some examples, (n, Gr, I, T)."""
        ...

    def features(self, part: slice, index: Tensor) -> Tensor:
        """Return some of the Gr * I features of some examples, (n, F, T)."""
        ...

    def gram(self) -> Tensor:
        """Return the sum over examples and positions of a a^T, (Gr, I, I)."""
        ...

    def mean(self) -> Tensor:
        """Return the mean over positions, (N, Gr, I, 1)."""
        ...

    @property
    def nbytes(self) -> int:
        """Return how many bytes they occupy while they are kept."""
        ...


class Stored:
    """Activations that are already in memory."""

    def __init__(self, a: Tensor) -> None:  # (N, Gr, I, T)
        self.a = a

    @property
    def shape(self) -> tuple[int, int, int, int]:
        n, groups, i, t = self.a.shape
        return n, groups, i, t

    def read(self, part: slice) -> Tensor:
        return self.a[part]

    def features(self, part: slice, index: Tensor) -> Tensor:
        return self.a[part].flatten(1, 2)[:, index]

    def gram(self) -> Tensor:
        return grams(self.a)

    def mean(self) -> Tensor:
        return self.a.mean(3, keepdim=True)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes


class Ones:
    """A constant input 1, that of a bias."""

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
