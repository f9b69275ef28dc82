"""Join the curvature of earlier tasks to a prior, in other ways than the library does.

    factors    (A_1 + ... + A_t) / (n_1 + ... + n_t)  (x)  (B_1 + ... + B_t): the library
    counted    t times that: what comes out if the means A / n are added, and not the sums A
    products   B_1 (x) A_1 / n_1 + ... + B_t (x) A_t / n_t: the sum of the tasks' own curvatures, without cross terms

With one earlier task, all three are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.posterior.posterior import Fit, added
from laplace.posterior.task_prior import CurvedPrior, Earlier
from laplace.weights.layout import Layout

JOININGS = ("factors", "counted", "products")


def prior_after(fits: Sequence[Fit], precision: Tensor, joining: str) -> CurvedPrior:
    """Return the prior for the next task, from the Kronecker factors of each task at its own weights.

    It is centred at the weights of the last task. `precision` is delta, which is added to the joined curvature.
    """
    last, sums = fits[-1], fits[0].sums
    for fit in fits[1:]:
        sums = added(sums, fit.sums)
    if joining == "counted":
        sums = last.structure.scaled(sums, torch.tensor(float(len(fits))))
    whole = replace(last, sums=sums, data={}, n_data=sum(fit.n_data for fit in fits))
    if joining != "products":
        return CurvedPrior(precision, last.mean, Earlier(whole))
    return ProductsPrior(precision, last.mean, Earlier(whole), Products.of(fits))


@dataclass(frozen=True)
class Products:
    """Holds the factors of all tasks for each tensor: A divided by its count, (T, I, I), and B, (T, O, O)."""

    factors: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, fits: Sequence[Fit]) -> Products:
        """Collect the factors of linear layers. The A of a bias is 1."""
        found = []
        for name in fits[0].layout.names:
            own = [{key: fit.sums[f"{name}/{key}"] for key in ("A", "B", "count")} for fit in fits]
            a = torch.cat([sums["A"] / sums["count"].to(sums["A"]) for sums in own])
            found.append((a.float(), torch.cat([sums["B"] for sums in own]).float()))
        return cls(tuple(found))

    def quadratic(self, offset: Tensor, layout: Layout) -> Tensor:
        """Return offset^T (sum of B (x) A) offset. The gradient is twice the product that the value needs anyway."""
        total = offset.new_zeros((), dtype=torch.float64)
        for part, shape, (a, b) in zip(layout.split(offset), layout.shapes, self.factors, strict=True):
            delta = part.reshape(shape[0], -1)  # (O, I)
            with torch.no_grad():
                times = (b @ delta.to(b) @ a).sum(0)
            value = (delta * times).sum()
            total = total + 2 * value - value.detach()
        return total


@dataclass(frozen=True, repr=False)
class ProductsPrior(CurvedPrior):
    """Pulls to the earlier weights by the exact sum of products.

    The sum has no common eigenbasis, so its determinant is out of reach: delta is tuned with that of the added factors.
    """

    products: Products

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:
        offset = theta - self.mean.to(theta)
        own = self.precision.to(offset)
        if own.numel() == 1:
            isotropic = own.reshape(()) * offset.square().sum()
        else:
            pairs = zip(own, layout.split(offset), strict=True)
            isotropic = torch.stack([value * part.square().sum() for value, part in pairs]).sum()
        return self.products.quadratic(offset, layout) + isotropic.double()
