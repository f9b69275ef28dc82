"""Fit a posterior over functions: the first run over the data draws points, and the sums come from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from laplace.backprop.gradients import Forward
from laplace.errors import UnsupportedError
from laplace.inference.accumulate import Accumulator
from laplace.likelihoods.base import Targets
from laplace.network.inputs import Inputs
from laplace.posterior.posterior import Fit
from laplace.structures import Sums
from laplace.structures.functional.points import Points
from laplace.structures.functional.structure import Functional
from laplace.structures.functional.subset import Subset


class SubsetAccumulator(Accumulator):
    """Adds up the log-likelihood over all data, and draws a random subset of its points."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.structure, Functional)
        self.functional = self.structure
        self._draw_anew()

    def _draw_anew(self) -> None:
        self.subset = Subset(self.functional.drawn, self.functional.seed)
        self.points: Points | None = None

    def _forget(self) -> None:
        super()._forget()
        self._draw_anew()

    def fit(self, mean: Tensor) -> Fit:
        return replace(super().fit(mean), points=self.points if self.functional.keeps_points else None)

    def _keep(self, inputs: Inputs, forward: Forward, targets: Targets, of: Tensor | None) -> None:
        if forward.positions.several:
            raise UnsupportedError(
                "hessian_structure='gp' keeps whole examples, and this network has outputs at positions. Take 'kron', "
                "'diag', 'full' or another structure of the weights."
            )
        if self.points is None:
            n = len(forward.outputs)
            self.subset.see(inputs, self._curvature(forward, targets, of), self._places(n))
        else:
            super()._keep(inputs, forward, targets, of)

    def _from_points(self) -> Sums:
        if self.points is not None:
            return {}
        if self.reduce.size > 1:
            self.subset = self.subset.joined(self.reduce.agree(lambda: self.subset.parts))
        points = self.functional.place(self.subset, self.n_all, self.engine)
        self._require_room(len(points), points.parts[0].y.shape[1])
        gradients = partial(points.gradients, self.engine, self.budget.chunk)
        self.points = points
        return self.functional.from_points(gradients, len(points), self.layout)

    def _require_room(self, points: int, vectors: int) -> None:
        """Refuse matrices that do not fit into memory."""
        self.budget.require(
            self.functional.bytes(points, vectors, self.layout, self._like.element_size()),
            self._like.device,
            f"hessian_structure='gp' of {points:,} points with {vectors:,} vectors each",
            "Take a smaller n_subset, independent_outputs=True, or hessian_structure='kron' or 'diag'.",
        )
