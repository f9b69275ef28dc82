"""Approximate the Gaussian process by Nystrom (ELLA, Deng et al. 2022): all data, projected on a few directions.

The top eigenvectors q of the kernel J_M J_M^T of M points give directions U = J_M^T q / sqrt(lambda) of weight space,
(P, r). A second run over all data gives G = sum over n of (J_n U)^T Lambda_n (J_n U), (r, r). The posterior covariance
of outputs is J U (s G + U^T D U)^-1 U^T J^T, and the evidence takes log det(s G + U^T D U) - log det(U^T D U). If U
spans all weights, this is the full posterior.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.backprop.gradients import Jacobian, Moments
from laplace.checks import whole_number
from laplace.errors import InputError, warn
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.symmetric import cholesky, spectrum
from laplace.structures.base import Contribution, Forms, Pass, Sums
from laplace.structures.functional.kernel import kernel
from laplace.structures.functional.points import FunctionJacobian
from laplace.structures.functional.structure import Functional, FunctionCurvature, FunctionGaussian, Gradients, refuse
from laplace.weights.layout import Layout

DEFAULT_RANK = 100
_SMALLEST = 1e-10  # eigenvalues below this share of the largest are rounding
_CLOSE = 1e-5  # eigenvalues that differ by less, relatively, count as equal


class Nystrom(Functional):
    """Keeps the curvature of all data in a few directions, which are found on a subset of the points.

    Args:
        n_subset: how many points to draw. None takes all, up to 256.
        seed: the seed for drawing the points.
        rank: how many directions to keep. None means 100.

    Raises:
        OptionError: a value is outside its range.
    """

    name = "gp, nystrom"
    options = ("n_subset", "seed", "rank")
    passes = 2
    keeps_points = False
    forms = Forms(({"U": "rp"},), ({"G": "rr"},), shared="r")

    def __init__(self, n_subset: int | None = None, seed: int = 0, rank: int | float | None = None) -> None:
        super().__init__(n_subset, seed)
        self.rank = None if rank is None else whole_number(rank, "rank")

    def form(self, own: Sums, whole: Sums) -> str:
        return f"{len(own['U'])} directions"

    def vectors(self, curvature: OutputCurvature, repeats: float) -> Tensor:
        return unit_vectors(curvature.squares())

    def bytes(self, points: int, vectors: int, layout: Layout, itemsize: int) -> int:
        rows = vectors * points
        rank = min(rows, DEFAULT_RANK if self.rank is None else self.rank)
        return 3 * 8 * rows**2 + (itemsize + 8) * rank * layout.n_params + 8 * rank**2 * (len(layout.names) + 3)

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        each, once = super().work(moments, layout, vectors)
        used = sum(m.positions * m.weights for m in moments.parameters)
        return each + used * (DEFAULT_RANK if self.rank is None else self.rank), once

    def from_points(self, gradients: Gradients, points: int, layout: Layout) -> Sums:
        values, vectors = spectrum(kernel(gradients, points))
        rank = self._rank(values)
        steps = directions(gradients, values[-rank:], vectors[:, -rank:])
        return {f"{name}/U": step for name, step in zip(layout.names, steps, strict=True)}

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        return None if "G" in sums else Projected([sums[f"{name}/U"] for name in layout.names])

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> NystromCurvature:
        return NystromCurvature([sums[f"{name}/U"] for name in layout.names], sums["G"], layout, dtype)

    def _rank(self, values: Tensor) -> int:
        """Return how many directions to keep: at most the kernel's rank, plus those with the last eigenvalue."""
        if self.rank is not None and self.rank > len(values):
            raise InputError(
                f"rank={self.rank} is more than the {len(values)} gradients of the kept points (points times outputs). "
                f"Give a rank of at most {len(values)}, or a larger n_subset."
            )
        there = int((values > _SMALLEST * values[-1]).sum())
        if there == 0:
            raise InputError(
                "the gradients at all kept points are zero: there is no direction to keep. Give other data, or a "
                "larger n_subset=."
            )
        if self.rank is not None and self.rank > there:
            warn(f"rank={self.rank} is more than the rank of the kept points' kernel: {there} directions are kept.")
        last = values[-min(there, DEFAULT_RANK if self.rank is None else self.rank)]
        return int((values > (1 - _CLOSE) * last).sum())  # keep equal ones together: a choice would be arbitrary


def unit_vectors(outputs: Tensor) -> Tensor:  # (N, C) -> (C, N, C)
    """Return the vectors that give the gradients of all outputs."""
    n, c = outputs.shape
    return torch.eye(c, dtype=outputs.dtype, device=outputs.device).unsqueeze(1).expand(-1, n, -1)


def directions(gradients: Gradients, values: Tensor, vectors: Tensor) -> list[Tensor]:  # (r,), (M C, r) -> (r, p) each
    """Return orthonormal directions of weight space from eigenpairs of the kernel: J^T q / sqrt(lambda)."""
    weights = (vectors * values.rsqrt()).T  # (r, M C)
    steps: list[Tensor] = []
    start, dtype = 0, weights.dtype
    for uses in gradients():
        c, n, _ = uses[0].shape
        part, dtype = weights[:, start : start + n * c].unflatten(1, (n, c)), uses[0].g.dtype
        terms = [use.double().back(part) for use in uses]
        steps = [step + term for step, term in zip(steps, terms, strict=True)] if steps else terms
        start += n * c
    return [step.to(dtype) for step in steps]


class Projected(Pass):
    """Projects the curvature of all data on the directions U, in the second run."""

    def __init__(self, steps: Sequence[Tensor]) -> None:  # (r, p) each
        self.steps = steps

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        return {"G": moments.gram_along(self.steps)}


class NystromCurvature(FunctionCurvature):
    """Holds the directions of each tensor, (r, p), and the curvature in them."""

    commutes = False  # traces of a weight covariance do not give the evidence's derivatives

    def __init__(self, steps: Sequence[Tensor], g: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.steps, self.g, self.layout, self.dtype = steps, g.double(), layout, dtype
        self.blocks = [step.double() @ step.double().T for step in steps]  # U^T U of each tensor

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> NystromGaussian:
        deltas = [d.double().reshape(()) for d in precision]
        prior = torch.stack([d * block for d, block in zip(deltas, self.blocks, strict=True)]).sum(0)
        return NystromGaussian(self, prior, scale.double() * self.g + prior, deltas)


class NystromGaussian(FunctionGaussian):
    """Is N(0, (s G + U^T D U)^-1) in the directions U."""

    def __init__(self, curvature: NystromCurvature, prior: Tensor, precision: Tensor, deltas: Sequence[Tensor]) -> None:
        self.curvature, self.deltas = curvature, deltas
        self.prior, self.root = cholesky(prior), cholesky(precision)

    def logdet(self) -> Tensor:
        ratio = 2 * (self.root.diagonal().log() - self.prior.diagonal().log()).sum()
        sizes = self.curvature.layout.sizes
        return ratio + torch.stack([n * d.log() for n, d in zip(sizes, self.deltas, strict=True)]).sum()

    def traces(self, groups: str) -> tuple[Tensor, Tensor]:
        refuse("traces of a covariance of the weights")

    def variance(self, jacobian: Jacobian) -> Tensor:
        return self._rows(jacobian).square().sum(-1).to(self.curvature.dtype)

    def covariance(self, jacobian: Jacobian) -> Tensor:
        x = self._rows(jacobian)
        return (x @ x.mT).to(self.curvature.dtype)

    def product(self, jacobian: Jacobian, v: Tensor) -> Tensor:
        x = self._rows(jacobian)
        return (x @ (x.mT @ v.double().unsqueeze(-1))).squeeze(-1).to(self.curvature.dtype)

    def joint(self, jacobian: Jacobian) -> Tensor:
        n, c, _ = (x := self._rows(jacobian)).shape
        x = x.flatten(0, 1)
        return (x @ x.T).reshape(n, c, n, c).to(self.curvature.dtype)

    def _rows(self, jacobian: Jacobian) -> Tensor:  # (N, C, r), X with X X^T the covariance
        assert isinstance(jacobian, FunctionJacobian)
        moved = jacobian.once("moved", lambda: jacobian.moved(self.curvature.steps).double())
        x = torch.linalg.solve_triangular(self.root.mT, moved.flatten(0, 1), upper=True, left=False)
        return x.unflatten(0, moved.shape[:2])
