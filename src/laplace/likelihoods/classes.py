"""Hold what the likelihoods over classes share: they predict a vector of probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Categorical as Classes
from torch.distributions import Distribution

from laplace.likelihoods.base import Likelihood
from laplace.linalg.sampling import Draws, uniforms
from laplace.predictive.entropy import decompose, entropy
from laplace.predictive.response import Outputs


class OneOfSeveral(Likelihood):
    """Is the base of likelihoods over classes: predictions are class probabilities."""

    drawn_uncertainty = True

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        assert p is not None
        return Classes(probs=p)

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        assert p is not None
        return decompose(entropy(p), outputs, draws, self.inverse_link)

    def entropy(self, outputs: Outputs, p: Tensor | None, sigma: Tensor) -> Tensor:
        assert p is not None
        return entropy(p)

    def log_predictive(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Tensor:
        assert p is not None
        if y.dim() > 1:  # class probabilities
            return (y.to(p) * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1) / y.to(p).sum(-1).clamp(min=1e-30)
        return log_of_classes(p, self._index(y))

    def _index(self, y: Tensor) -> Tensor:
        """Return labels that are safe to index with."""
        return y


def drawn_classes(p: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:  # (N, K) -> (S, N)
    """Draw classes from probabilities p (float64)."""
    u = uniforms(p.shape[0], n_samples, 1, p, generator).transpose(0, 1).squeeze(-1)
    cdf = p.cumsum(-1)
    labels = torch.searchsorted(cdf, u.contiguous() * cdf[:, -1:], right=True)
    return labels.clamp(max=p.shape[1] - 1).T


def log_of_classes(p: Tensor, y: Tensor) -> Tensor:  # (N, K), (N,) -> (N,)
    """Return log p_y; finite even where p_y is zero."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log().gather(1, y.unsqueeze(1)).squeeze(1)
