"""The entropy of a class prediction, split into what comes from the weights and what comes from the labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laplace.draws import Draws
from laplace.predictive.links import softmax
from laplace.predictive.outputs import OutputGaussian, OutputSamples


def entropy(p: Tensor) -> Tensor:  # (..., C) -> (...)
    """-sum p log p."""
    return torch.special.entr(p).sum(-1)


def decompose(
    p: Tensor,  # (N, ..., C)
    outputs: OutputGaussian | OutputSamples,
    draws: Draws,
    inverse_link: Callable[[Tensor], Tensor] = softmax,
) -> tuple[Tensor, Tensor]:
    """Epistemic and aleatoric part of entropy(p), (N, ...) each.

    The epistemic part is the mutual information of label and weights, the entropy of the draws' mean minus the mean of
    their entropies, by Monte Carlo. The aleatoric part is what remains of entropy(p): the draws' expected entropy where
    p is their mean (link 'mc'), and that plus the error of the link otherwise.
    """
    if draws.generator is None:
        draws = Draws(draws.n, torch.Generator(p.device).manual_seed(0))
    information = []
    for part in outputs.draws(draws):
        probabilities = inverse_link(part)
        information.append(entropy(probabilities.mean(0)) - entropy(probabilities).mean(0))
    total = entropy(p)
    epistemic = torch.cat(information).clamp(min=0).minimum(total)
    return epistemic, total - epistemic
