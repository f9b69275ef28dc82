"""Empirical Fisher: the squared score at the true label, Lambda = (d log p(y given f)/df) (same)^T."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laplace.curvature.base import Estimator
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature


class EF(Estimator):
    """The outer product of each example's own score. Sends back one vector per example."""

    name: ClassVar[str] = "ef"

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> OutputCurvature:
        return OutputCurvature(vectors=likelihood.score(f, y).unsqueeze(0), together=True)
