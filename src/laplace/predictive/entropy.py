"""The entropy of a class prediction, split into what comes from the weights and what comes from the labels."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.draws import Draws
from laplace.predictive.outputs import OutputGaussian, OutputSamples


def entropy(p: Tensor) -> Tensor:  # (..., C) -> (...)
    """-sum p log p."""
    return torch.special.entr(p).sum(-1)


def decompose(
    p: Tensor,  # (N, C)
    outputs: OutputGaussian | OutputSamples,
    draws: Draws,
) -> tuple[Tensor, Tensor]:
    """Epistemic (mutual information of label and weights) and aleatoric (expected entropy) part of entropy(p), (N,).

    Monte Carlo gives both parts of the entropy of the draws' own mean; where p comes from another approximation of the
    same integral, they are scaled so that their sum is the entropy of p.
    """
    if draws.generator is None:
        draws = Draws(draws.n, torch.Generator(p.device).manual_seed(0))
    expected, mean = [], []
    for part in outputs.draws(draws):
        probabilities = part.softmax(-1)
        expected.append(entropy(probabilities).mean(0))
        mean.append(entropy(probabilities.mean(0)))
    share = (torch.cat(expected) / torch.cat(mean).clamp(min=torch.finfo(p.dtype).tiny)).clamp(0, 1)
    total = entropy(p)
    return total * (1 - share), total * share
