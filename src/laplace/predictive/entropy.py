"""The entropy of a class prediction, split into the part due to the weights and the part due to the labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laplace.linalg.sampling import Draws
from laplace.predictive.links import softmax
from laplace.predictive.outputs import OutputGaussian, OutputSamples


def entropy(p: Tensor) -> Tensor:  # (..., C) -> (...)
    """Return -sum p log p."""
    return torch.special.entr(p).sum(-1)


def entropy_of_label(p: Tensor) -> Tensor:
    """Return -p log p - (1 - p) log(1 - p), elementwise; accurate for small p too."""
    return torch.special.entr(p) + torch.special.xlog1py(p - 1, -p)


def decompose(
    total: Tensor,  # (N, ...)
    outputs: OutputGaussian | OutputSamples,
    draws: Draws,
    inverse_link: Callable[[Tensor], Tensor] = softmax,
) -> tuple[Tensor, Tensor]:
    """Return the epistemic and aleatoric part of the entropy of a prediction, (N, ...) each.

    The epistemic part is the mutual information of label and weights: the entropy of the draws' mean minus the mean of
    their entropies, by Monte Carlo. The aleatoric part is the rest: the draws' expected entropy if the prediction is
    their mean (link 'mc'), and that plus the error of the link otherwise.
    """
    information = []
    for part in outputs.draws(draws.seeded(total.device)):
        probabilities = inverse_link(part).double()  # float64: if the draws hardly differ, the two entropies cancel
        information.append(entropy(probabilities.mean(0)) - entropy(probabilities).mean(0))
    epistemic = torch.cat(information).to(total.dtype).clamp(min=0).minimum(total)
    return epistemic, total - epistemic
