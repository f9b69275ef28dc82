"""Split the entropy of a class prediction into the part due to the weights and the part due to the labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laplace.linalg.sampling import Draws
from laplace.linalg.softmax import softmax
from laplace.predictive.mixtures import Outputs

_LEAST = 2**-53 - 1  # of r, whose logarithm is finite


def entropy(p: Tensor) -> Tensor:  # (..., C) -> (...)
    """Return -sum p log p."""
    return torch.special.entr(p).sum(-1)


def entropy_of_label(p: Tensor) -> Tensor:
    """Return -p log p - (1 - p) log(1 - p), elementwise; accurate for small p too."""
    return torch.special.entr(p) + torch.special.xlog1py(p - 1, -p)


def decompose(
    total: Tensor,  # (N, ...)
    outputs: Outputs,
    draws: Draws,
    inverse_link: Callable[[Tensor], Tensor] = softmax,
) -> tuple[Tensor, Tensor]:
    """Return the epistemic and aleatoric part of the entropy of a prediction, (N, ...) each.

    The epistemic part is the mutual information of label and weights, by Monte Carlo: the entropy of the draws' mean
    minus the mean of their entropies. The aleatoric part is the rest of the total: the draws' expected entropy if the
    prediction is their mean (link 'mc'), and that plus the error of the link otherwise. Both are never negative.

    If the draws hardly differ, the two entropies cancel. So their difference is added up from terms that are not
    negative: with r = p / mean - 1 for a probability p of a draw, it is the sum of mean * E[(1 + r) log(1 + r) - r].

    Of several networks without posteriors, this is the mutual information of label and network, exactly.
    """
    information, draws = [], draws.seeded(total.device)
    weights = outputs.weights_of_draws(draws)
    for part in outputs.draws(draws):
        p = inverse_link(part).double()  # (S, n, ..., K)
        mean = _mean(p, weights)
        r = (p / mean.clamp(min=torch.finfo(p.dtype).tiny) - 1).clamp(min=_LEAST)
        information.append((mean * _mean(torch.log1p(r) * (1 + r) - r, weights)).sum(-1))
    epistemic = torch.cat(information).to(total.dtype).clamp(min=0).minimum(total)
    return epistemic, total - epistemic


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:  # (S, ...), (S,) -> (...)
    return values.mean(0) if weights is None else torch.tensordot(weights.to(values), values, 1)
