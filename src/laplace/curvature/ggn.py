"""Generalised Gauss-Newton, equal to the exact Fisher: Lambda = E over y of the squared score, in closed form."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laplace.curvature.base import Estimator
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature


class GGN(Estimator):
    """The exact GGN. Sends back C vectors per example, C - 1 for softmax."""

    name: ClassVar[str] = "ggn"

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> OutputCurvature:
        return likelihood.fisher(f, y)


class Hessian(GGN):
    """The exact Hessian of the loss in the weights, by Hessian-vector products; in the outputs it is the GGN's."""

    name: ClassVar[str] = "hessian"
    exact_hessian: ClassVar[bool] = True
