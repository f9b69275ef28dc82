"""`Prediction`, which `la.predict` returns: a distribution, its summaries, and the two kinds of uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Dirichlet, Distribution, MultivariateNormal, Normal

from laplace.checks import shown
from laplace.errors import OptionError
from laplace.linalg.sampling import Draws
from laplace.predictive.links import softmax
from laplace.predictive.outputs import OutputGaussian, OutputSamples


@dataclass(frozen=True)
class Prediction:
    """p(y given x, data): the predictive distribution at N inputs.

    Attributes:
        distribution: A `torch.distributions` object that includes the observation noise.
        mean: E[y] for regression and counts, (N, C); the probabilities of classes or labels, (N, C).
        epistemic: Uncertainty that more data could remove. Regression and counts: the variance of E[y given f], (N, C).
            Classes: the mutual information of y and the weights, (N,). Binary labels: the same for each label, (N, C).
        aleatoric: Uncertainty that more data could not remove: the noise variance, (N, C), or the rest of the entropy.
        outputs: The distribution of the outputs f, an `OutputGaussian` or `OutputSamples`.
        inverse_link: Maps outputs f to what they stand for.
        quantiles: Maps `outputs` and quantiles of a standard normal to quantiles of `inverse_link(f)`; returns None, or
            is None, if there is no closed form.
    """

    distribution: Distribution
    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    outputs: OutputGaussian | OutputSamples = field(repr=False)
    inverse_link: Callable[[Tensor], Tensor] = field(default=softmax, repr=False)
    quantiles: Callable[[OutputGaussian, Tensor], Tensor | None] | None = field(default=None, repr=False)

    @property
    def total(self) -> Tensor:
        """Return the epistemic plus the aleatoric part: the variance or the entropy of the predictive distribution."""
        return self.epistemic + self.aleatoric

    @property
    def is_regression(self) -> bool:
        """Whether y is continuous."""
        return isinstance(self.distribution, (Normal, MultivariateNormal))

    def quantile(self, q: float | Tensor) -> Tensor:
        """Return the q-quantile of y for regression; for other models, of each probability or rate under the posterior.

        Exact for regression, and for rates, labels and ordered classes under a Gaussian over outputs. For probabilities
        of several classes, the quantiles are those of 1,000 seeded draws: from the Dirichlet of a bridge link,
        otherwise from the outputs. The mean of these draws is that of link 'mc', which the other links approximate.
        Below 0.001 and above 0.999, the result is the outermost draw.

        Args:
            q: A number strictly between 0 and 1, or Q of them.

        Returns:
            (N, C), or (Q, N, C) for a vector of Q levels.

        Raises:
            OptionError: q is not strictly between 0 and 1.
        """
        try:
            levels = torch.as_tensor(q, dtype=torch.float64, device=self.mean.device)
        except (TypeError, ValueError, RuntimeError):
            levels = torch.tensor(torch.nan)
        if levels.dim() > 1 or not len(levels.reshape(-1)) or not ((levels > 0) & (levels < 1)).all():
            raise OptionError(f"q={shown(q)} must be a number, or a vector of numbers, strictly between 0 and 1.")
        found = self._at(levels.reshape(-1), torch.special.ndtri(levels.reshape(-1)))
        return found.reshape(*levels.shape, *found.shape[1:])

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval that holds `level` of the probability.

        Args:
            level: A number strictly between 0 and 1.

        Returns:
            The lower and the upper end, (N, C) each.

        Raises:
            OptionError: the level is not strictly between 0 and 1.
        """
        try:
            inside = 0 < float(level) < 1
        except (TypeError, ValueError, RuntimeError):
            inside = False
        if not inside:
            raise OptionError(f"level={shown(level)} must lie strictly between 0 and 1, as in interval(0.95).")
        level = float(level)
        tail = (1 - level) / 2
        levels = torch.tensor([tail, 1 - tail], dtype=torch.float64, device=self.mean.device)
        z = torch.special.ndtri(levels[:1]) if level > 0.5 else -math.sqrt(2) * torch.erfinv(levels.new_tensor([level]))
        low, high = self._at(levels, torch.cat([z, -z]))  # the upper end by symmetry: 1 - tail is rounded
        return low, high

    def _at(self, levels: Tensor, z: Tensor) -> Tensor:  # (Q,), (Q,) -> (Q, N, C)
        """Return the quantiles at `levels`; z are the standard normal's quantiles there. In float64 until the end."""
        if self.is_regression:
            spread = self.total.double().sqrt()
            return (self.mean.double() + spread * z.reshape(-1, *[1] * spread.dim())).to(self.mean.dtype)
        if isinstance(self.distribution, Dirichlet):
            return _dirichlet_draws(self.distribution.concentration).to(levels).quantile(levels, 0).to(self.mean.dtype)
        if self.quantiles is not None and isinstance(self.outputs, OutputGaussian):
            exact = self.quantiles(self.outputs, z)
            if exact is not None:
                return exact.to(self.mean.dtype)
        draws = self.outputs.draws(Draws(1000, torch.Generator(self.mean.device).manual_seed(0)))
        return torch.cat([self.inverse_link(d).double().quantile(levels, 0) for d in draws], dim=-2).to(self.mean.dtype)

    def numpy(self) -> dict[str, Any]:
        """Return mean, epistemic and aleatoric uncertainty as numpy arrays."""
        parts = {"mean": self.mean, "epistemic": self.epistemic, "aleatoric": self.aleatoric}
        return {key: value.detach().cpu().numpy() for key, value in parts.items()}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the mean, so that `np.asarray(prediction)` works."""
        return array_of(self.mean, dtype, copy)

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __repr__(self) -> str:
        kind = type(self.distribution).__name__
        n, c = self.mean.shape
        return (
            f"Prediction({n} inputs, {c} outputs, {kind}, mean epistemic {float(self.epistemic.mean()):.3g}, "
            f"mean aleatoric {float(self.aleatoric.mean()):.3g})"
        )


def array_of(mean: Tensor, dtype: Any, copy: bool | None) -> np.ndarray:
    """Return a tensor as numpy asks for it. `copy` None allows a copy, False refuses one."""
    values = mean.detach()
    if values.dtype is torch.bfloat16:  # numpy has no such dtype
        values = values.float()
    if copy is False and (values.device.type != "cpu" or values.dtype is not mean.dtype):
        raise ValueError(
            f"a mean of {mean.dtype} on {mean.device} needs a copy to become an array; leave out copy=False."
        )
    return np.array(values.cpu().numpy(), dtype=dtype, copy=copy)


def _dirichlet_draws(alpha: Tensor) -> Tensor:  # (N, C) -> (1000, N, C)
    """Return seeded draws. Computed in logarithms, because gamma variates of small alpha underflow."""
    a, rng = alpha.detach().cpu().double().numpy(), np.random.default_rng(0)
    size = (1000, *a.shape)
    logs = np.log(rng.standard_gamma(a + 1, size)) + np.log(1 - rng.random(size)) / a
    return torch.from_numpy(logs).softmax(-1)
