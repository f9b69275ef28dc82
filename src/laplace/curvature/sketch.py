"""Sketch the GGN: send back v = L eps with L L^T = Lambda and random signs eps. E[v v^T] = Lambda.

No labels are drawn. For confident networks the variance is far smaller than that of the Monte-Carlo Fisher, whose drawn
label is nearly always the predicted one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laplace.curvature.base import Drawn
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import signs


class Sketch(Drawn):
    """Averages v v^T over `samples` sketches."""

    name: ClassVar[str] = "sketch"

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> OutputCurvature:
        eps = signs(f.shape[0], self.samples, f.shape[1], f, generator)
        v = likelihood.root_times(f, eps, y)
        return OutputCurvature(vectors=v if self.samples == 1 else v * self.samples**-0.5, together=True)
