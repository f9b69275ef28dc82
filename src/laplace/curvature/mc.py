"""Monte-Carlo Fisher: the squared score at labels drawn from the model, an unbiased estimate of the GGN."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.curvature.output import OutputCurvature
from laplace.likelihoods.base import Likelihood


def mc(
    likelihood: Likelihood, f: Tensor, y: Tensor, samples: int, generator: torch.Generator | None
) -> OutputCurvature:
    """The mean over `samples` drawn labels of the score's outer product."""
    return OutputCurvature(vectors=likelihood.drawn_scores(f, y, samples, generator) * samples**-0.5, together=True)
