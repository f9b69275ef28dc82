"""Compute the empirical Fisher, Lambda = u u^T with the score u = d log p(y given f)/df at the true label."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laplace.curvature.base import Estimator
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature


class EF(Estimator):
    """Takes the outer product of each example's score. Sends back one vector per example."""

    name: ClassVar[str] = "ef"
    empirical: ClassVar[bool] = True

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> OutputCurvature:
        return OutputCurvature(vectors=likelihood.score(f, y).unsqueeze(0), together=True)
