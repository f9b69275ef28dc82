"""Estimate the Fisher by Monte Carlo: score score^T at labels drawn from the model. It has no bias from the GGN."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laplace.curvature.base import Drawn
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature


class MC(Drawn):
    """Averages the outer product of the score over `samples` drawn labels."""

    name: ClassVar[str] = "mc"

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> OutputCurvature:
        scores = likelihood.drawn_scores(f, y, self.samples, generator)
        return OutputCurvature(vectors=scores * self.samples**-0.5, together=True)
