"""Empirical Fisher: the squared score at the true label, Lambda = (d log p(y given f)/df) (same)^T."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.curvature.output import OutputCurvature
from laplace.likelihoods.base import Likelihood


def ef(
    likelihood: Likelihood, f: Tensor, y: Tensor, samples: int, generator: torch.Generator | None
) -> OutputCurvature:
    """The outer product of each example's own score."""
    return OutputCurvature(vectors=likelihood.score(f, y).unsqueeze(0), together=True)
