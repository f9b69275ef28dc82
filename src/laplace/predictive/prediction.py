"""What `la.predict` returns: one distribution, its summaries, and the two kinds of uncertainty apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Dirichlet, Distribution, MultivariateNormal, Normal

from laplace.checks import shown
from laplace.draws import Draws
from laplace.errors import OptionError
from laplace.predictive.links import softmax
from laplace.predictive.outputs import OutputGaussian, OutputSamples


@dataclass(frozen=True)
class Prediction:
    """p(y given x, data).

    Attributes:
        distribution: a `torch.distributions` object with the observation noise included.
        mean: E[y] for regression and counts, (N, C); the probabilities of classes or labels, (N, C).
        epistemic: what more data could take away: variance (N, C) of E[y given f], or, for classes, the mutual
            information (N,) of y and weights; of each label by itself (N, C) for binary labels.
        aleatoric: what it could not: the noise variance (N, C), or the rest of the entropy.
        outputs: the distribution of the outputs f, an `OutputGaussian` or `OutputSamples`.
        inverse_link: from outputs f to what they stand for.
    """

    distribution: Distribution
    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    outputs: OutputGaussian | OutputSamples = field(repr=False)
    inverse_link: Callable[[Tensor], Tensor] = field(default=softmax, repr=False)

    @property
    def total(self) -> Tensor:
        """Epistemic and aleatoric together: the predictive's variance, or its entropy."""
        return self.epistemic + self.aleatoric

    @property
    def is_regression(self) -> bool:
        """Whether y is continuous."""
        return isinstance(self.distribution, (Normal, MultivariateNormal))

    def quantile(self, q: float | Tensor) -> Tensor:
        """The q-quantile of y (regression), or of each probability or rate under the posterior (all others).

        Probabilities and rates are those of 1,000 seeded draws: of the Dirichlet of a bridge, else of the outputs,
        whose mean is that of link 'mc' (the other links approximate it).

        Args:
            q: a number strictly between 0 and 1, or Q of them.

        Returns:
            (N, C), or (Q, N, C).

        Raises:
            OptionError: a q outside its range.
        """
        try:
            levels = torch.as_tensor(q, dtype=self.mean.dtype, device=self.mean.device)
        except (TypeError, ValueError, RuntimeError):
            levels = torch.tensor(torch.nan)
        if levels.dim() > 1 or not len(levels.reshape(-1)) or not ((levels > 0) & (levels < 1)).all():
            raise OptionError(f"q={shown(q)} must be a number, or a vector of numbers, strictly between 0 and 1.")
        if self.is_regression:
            spread = self.total.sqrt()
            return self.mean + spread * torch.special.ndtri(levels).reshape(*levels.shape, *[1] * spread.dim())
        if isinstance(self.distribution, Dirichlet):
            return _dirichlet_draws(self.distribution.concentration).to(levels).quantile(levels, 0)
        draws = self.outputs.draws(Draws(1000, torch.Generator(self.mean.device).manual_seed(0)))
        return torch.cat([self.inverse_link(d).quantile(levels, 0) for d in draws], dim=-2)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds `level` of the probability.

        Args:
            level: strictly between 0 and 1.

        Returns:
            Its lower and its upper end, (N, C) each.

        Raises:
            OptionError: a level outside its range.
        """
        try:
            inside = 0 < float(level) < 1
        except (TypeError, ValueError, RuntimeError):
            inside = False
        if not inside:
            raise OptionError(f"level={shown(level)} must lie strictly between 0 and 1, as in interval(0.95).")
        tails = self.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]))
        return tails[0], tails[1]

    def numpy(self) -> dict[str, Any]:
        """Mean, epistemic and aleatoric uncertainty as numpy arrays."""
        parts = {"mean": self.mean, "epistemic": self.epistemic, "aleatoric": self.aleatoric}
        return {key: value.detach().cpu().numpy() for key, value in parts.items()}

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __repr__(self) -> str:
        kind = type(self.distribution).__name__
        n, c = self.mean.shape
        return (
            f"Prediction({n} inputs, {c} outputs, {kind}, mean epistemic {float(self.epistemic.mean()):.3g}, "
            f"mean aleatoric {float(self.aleatoric.mean()):.3g})"
        )


def _dirichlet_draws(alpha: Tensor) -> Tensor:  # (N, C) -> (1000, N, C)
    """Seeded draws, through logarithms: gammas of small alpha are below the smallest number."""
    a, rng = alpha.detach().cpu().double().numpy(), np.random.default_rng(0)
    size = (1000, *a.shape)
    logs = np.log(rng.standard_gamma(a + 1, size)) + np.log(1 - rng.random(size)) / a
    return torch.from_numpy(logs).softmax(-1)
