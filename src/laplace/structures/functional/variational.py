"""Approximate the Gaussian process by inducing points (VaLLA, Ortega et al. 2023): a sparse variational posterior.

The mean stays the trained network. The function values u = f(Z) at M inducing points have a Gaussian q(u), and the rest
of the function follows the prior given u. Let the rows of U, (r, P), be orthonormal and span the gradients at Z. Let w
be the eigenvalues of G = sum over n of (J_n U^T)^T Lambda_n (J_n U^T), E its eigenvectors, and psi(x) = J(x) U^T E. The
best q is known in closed form for a Gaussian likelihood (Titsias 2009), and so for the quadratic one of Laplace:

    cov(x, x') = 1/delta [ J(x) J(x')^T - psi(x) diag(s w / (delta + s w)) psi(x')^T ],
    log Z >= log p(D) - 1/2 [ scatter + sum of log(1 + s w / delta) + s/delta (tr H - sum of w) ].

Away from Z the variance is the prior's. With more points covariance and bound become the exact ones; if Z spans the
gradients of all data, they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Engine, Moments
from laplace.checks import shown, whole_number
from laplace.errors import InputError, OptionError
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.symmetric import Clipped, cholesky, clip, spectrum
from laplace.structures.base import Contribution, Forms, Pass, Sums
from laplace.structures.functional import inducing as locations
from laplace.structures.functional.gp import GPGaussian, Spectral, SpectralCurvature
from laplace.structures.functional.kernel import kernel
from laplace.structures.functional.nystrom import directions, unit_vectors
from laplace.structures.functional.points import FunctionJacobian, Points
from laplace.structures.functional.structure import Functional, Gradients
from laplace.structures.functional.subset import Subset
from laplace.structures.gaussian import Traces
from laplace.weights.layout import Layout

_SMALLEST = 1e-12  # eigenvalues of Kzz below this share of the largest are rounding
_POOL = 1024  # points of the data to place inducing points by
_STRATEGIES = ("random", "kmeans")
_GIVEN = "given"  # what files say of locations that the user gave: the file does not hold them


class Variational(Functional):
    """Keeps the best posterior given the function values at inducing points.

    Args:
        n_subset: how many inducing points. None takes all points of the data, up to 256.
        seed: the seed for drawing points.
        inducing: where they are: 'random' (drawn from the data), 'kmeans' (centres of clusters of the inputs), or the
            points themselves, in the form of the inputs.
        inducing_steps: how many steps to move them by, to where they explain more of the curvature.

    Raises:
        OptionError: a value is outside its range.
    """

    name = "gp, variational"
    options = ("n_subset", "seed", "inducing", "inducing_steps")
    passes = 2
    keeps_points = False
    prior_structures = ("scalar",)
    forms = Forms(({"U": "rp"},), ({"G": "rr", "trace": ""},), shared="r")

    def __init__(
        self, n_subset: int | None = None, seed: int = 0, inducing: Any = "random", inducing_steps: int = 0
    ) -> None:
        super().__init__(n_subset, seed)
        if isinstance(inducing, str) and inducing not in (*_STRATEGIES, _GIVEN):
            raise OptionError(f"inducing={shown(inducing)} must be 'random', 'kmeans', or the points themselves.")
        self.locations = None if isinstance(inducing, str) else inducing
        self.inducing = inducing if isinstance(inducing, str) else _GIVEN
        self.inducing_steps = whole_number(inducing_steps, "inducing_steps", 0)
        self.placed: Points | None = None  # by the last fit; not in files, which hold no data

    def form(self, own: Sums, whole: Sums) -> str:
        share = float(whole["G"].diagonal().sum() / whole["trace"])
        return f"{len(own['U'])} directions, {share:.1%} of the trace"

    @property
    def drawn(self) -> int:
        return max(self.most, _POOL) if self._moves else self.most

    @property
    def _moves(self) -> bool:
        return self.inducing == "kmeans" or self.inducing_steps > 0

    def vectors(self, curvature: OutputCurvature, repeats: float) -> Tensor:
        return unit_vectors(curvature.squares())

    def place(self, subset: Subset, n_data: int, engine: Engine) -> Points:
        """Return the inducing points."""
        if self.inducing == _GIVEN and self.locations is None:
            raise InputError("these inducing points were given, and a file does not hold them. Give inducing= again.")
        asked = self.n_subset if self.locations is None else None
        points = subset.fewer(self.most).points(n_data, asked, self.vectors)
        if self.locations is not None or self._moves:
            points = self._moved(points, subset.points(n_data, None, _roots), engine)
        self.placed = points
        return points

    def _moved(self, points: Points, data: Points, engine: Engine) -> Points:
        whole = locations.movable(data) if self._moves else None
        if self.locations is not None:
            at = locations.given(self.locations, points.parts[0].inputs, self.n_subset)
        else:
            at = locations.movable(points).inputs
        if self.inducing == "kmeans" and whole is not None:
            at = locations.centres(at, whole)
        assert at.size is not None
        y = points.parts[0].y
        units = unit_vectors(y.new_empty(at.size, y.shape[2]))
        if self.inducing_steps and whole is not None:
            at = locations.trained(at, units, whole, engine, self.inducing_steps, self.seed)
        return locations.as_points(at, units)

    def bytes(self, points: int, vectors: int, layout: Layout, itemsize: int) -> int:
        rows = vectors * points
        return 3 * 8 * rows**2 + (itemsize + 8) * rows * layout.n_params

    def work(self, moments: Moments, layout: Layout, vectors: int) -> tuple[float, float]:
        each, once = super().work(moments, layout, vectors)
        used = sum(m.positions * m.weights for m in moments.parameters)
        return each + used * self.most * vectors, once

    def from_points(self, gradients: Gradients, points: int, layout: Layout) -> Sums:
        values, vectors = spectrum(kernel(gradients, points))
        there = values > _SMALLEST * values[-1]
        if not (values[-1] > 0):
            raise InputError("the gradients at all inducing points are zero. Give other points, or a larger n_subset=.")
        steps = directions(gradients, values[there], vectors[:, there])
        return {f"{name}/U": step for name, step in zip(layout.names, steps, strict=True)}

    def further(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> Pass | None:
        return None if "G" in sums else Explained([sums[f"{name}/U"].double() for name in layout.names])

    def curvature(self, sums: Sums, layout: Layout, dtype: torch.dtype) -> VariationalCurvature:
        steps = [sums[f"{name}/U"] for name in layout.names]
        return VariationalCurvature(steps, sums["G"].double(), sums["trace"].double(), layout, dtype)


def _roots(curvature: OutputCurvature, repeats: float) -> Tensor:  # (K, N, C)
    return curvature.root()


class Explained(Pass):
    """Projects the curvature of all data on the directions U, and takes its trace, in the second run."""

    def __init__(self, steps: Sequence[Tensor]) -> None:  # (r, p) each, float64
        self.steps = steps

    def sums(self, moments: Moments, layout: Layout) -> Contribution:
        trace = moments.trace()
        assert trace is not None
        return {"G": moments.gram_along(self.steps), "trace": trace}


class VariationalCurvature(SpectralCurvature):
    """Holds the directions of each tensor, (r, p), the curvature in them, and the trace of the whole."""

    def __init__(self, steps: Sequence[Tensor], g: Tensor, trace: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__(layout, dtype, independent=False)
        self.steps, self._g, self._trace = steps, g, trace

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor, Clipped]:
        """Return w, (1, r), and the basis E with J U^T E = psi, (1, r, r). Rounded U are not quite orthonormal."""
        root = cholesky(torch.stack([step.double() @ step.double().T for step in self.steps]).sum(0))
        half = torch.linalg.solve_triangular(root, self._g, upper=False)
        values, vectors = spectrum(torch.linalg.solve_triangular(root, half.mT, upper=False))
        values, clipped = clip(values, self.dtype)
        return values.unsqueeze(0), torch.linalg.solve_triangular(root.mT, vectors, upper=True).unsqueeze(0), clipped

    @cached_property
    def unexplained(self) -> Tensor:
        """Return tr H - sum of w, the trace outside the directions."""
        return (self._trace - self.eigh[0].sum()).clamp(min=0)

    def gaussian(self, scale: Tensor, precision: Sequence[Tensor]) -> GPGaussian:
        return GPGaussian(Inducing(self, scale.double(), precision[0].double().reshape(())))


class Inducing(Spectral):
    """Solves in the eigenbasis of the projected curvature, for one prior precision delta of all weights."""

    def __init__(self, curvature: VariationalCurvature, scale: Tensor, delta: Tensor) -> None:
        super().__init__(curvature, scale, delta)
        self.steps, self.missed = curvature.steps, scale * curvature.unexplained / delta

    def log_det_ratio(self) -> Tensor:
        """Return the upper bound of log det(1 + s K) that makes the evidence a lower bound."""
        return super().log_det_ratio() + self.missed

    def rows(self, jacobian: FunctionJacobian) -> Tensor:  # (1, N C, r)
        def rotated() -> Tensor:
            return jacobian.moved(step.double() for step in self.steps).flatten(0, 1) @ self.curvature.eigh[1]

        shrunk = self.values / (1 + self.values)
        return jacobian.once("psi", rotated) * (shrunk / self.delta).sqrt().unsqueeze(1)

    def traces(self, groups: str) -> Traces:
        """Return the first and minus the second derivative of `logdet` in delta, which have a further term here."""
        shrunk, p = self.values / (1 + self.values), self.layout.n_params
        t = (p - shrunk.sum() - self.missed) / self.delta
        m = (p - 2 * shrunk.sum() + shrunk.square().sum() - 2 * self.missed) / self.delta.square()
        return t.reshape(1), m.reshape(1)
