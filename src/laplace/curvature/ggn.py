"""Compute the generalised Gauss-Newton matrix: Lambda = E over y of score score^T, in closed form.

It equals the exact Fisher.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laplace.curvature.base import Estimator
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature


class GGN(Estimator):
    """Computes the exact GGN. Sends back C vectors per example, C - 1 for softmax."""

    name: ClassVar[str] = "ggn"

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> OutputCurvature:
        return likelihood.fisher(f, y)


class Hessian(GGN):
    """Computes the exact Hessian of the loss in the weights, by Hessian-vector products. Lambda is that of the GGN."""

    name: ClassVar[str] = "hessian"
    exact_hessian: ClassVar[bool] = True
