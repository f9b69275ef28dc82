"""Any log p(y given f) that is twice differentiable in f: score and Lambda by autograd.

Lambda is minus the second derivative at the label, with its negative eigenvalues, if any, set to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from laplace.curvature.output import OutputCurvature
from laplace.draws import Draws
from laplace.errors import InputError, OptionError, UnsupportedError, warn
from laplace.likelihoods.base import Likelihood
from laplace.predictive.links import Link, MonteCarlo
from laplace.predictive.response import Latent, Outputs, Response

_DRAWS = 256  # of f, over which p(y given f) is averaged
_LATENT = Latent()

LogProb = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[Tensor, int, torch.Generator | None], Tensor]


def from_log_prob(
    fn: LogProb,
    inverse_link: Callable[[Tensor], Tensor] | None = None,
    sample: Sampler | None = None,
    name: str | None = None,
) -> Custom:
    """The likelihood with log p = fn(f, y), twice differentiable in f.

    Args:
        fn: outputs (N, C) and labels (N, ...) in, one number per example (N,) out.
        inverse_link: f (..., C) to what it stands for; with it, `la(x)` is its mean over draws, without, mean and
            covariance of the outputs.
        sample: `sample(f, n_samples, generator)` draws labels, which curvature 'mc' alone needs.
        name: what saved states are compared by: that of the function, if left out.

    Returns:
        A likelihood for `Laplace`.

    Raises:
        OptionError: what is no function.
        InputError: in `fit`, a function that returns another shape, or NaN.
    """
    for what, given in {"fn": fn, "inverse_link": inverse_link, "sample": sample}.items():
        if not callable(given) and (given is not None or what == "fn"):
            raise OptionError(f"{what} is a {type(given).__name__}; a function is needed: from_log_prob(fn).")
    return Custom(fn, inverse_link, sample, name)


class Custom(Likelihood):
    """A likelihood that is known by its log-density alone: see `from_log_prob`."""

    name = "from_log_prob"
    joint = True

    def __init__(
        self,
        fn: LogProb,
        inverse_link: Callable[[Tensor], Tensor] | None,
        sample: Sampler | None,
        name: str | None,
    ) -> None:
        self.fn, self._inverse_link, self._sample, self._warned = fn, inverse_link, sample, False
        self._called = name or getattr(fn, "__qualname__", type(fn).__name__)
        if inverse_link is not None:
            self.links = {"mc": Link(MonteCarlo(inverse_link), "covariance")}

    @property
    def described(self) -> str:
        return f"{self.name}({self._called})"

    @property
    def response(self) -> Response:
        return _LATENT if self._inverse_link is None else self

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.shape[:1] != f.shape[:1]:
            raise InputError(
                f"labels of shape {tuple(y.shape)} came for outputs {tuple(f.shape)}: one row each needed."
            )
        value = self.fn(f, y)
        if not isinstance(value, Tensor) or value.shape != f.shape[:1]:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"the function given to from_log_prob returned {shape} for outputs {tuple(f.shape)}; one number per "
                f"example, ({len(f)},), is needed. Sum over the outputs, not over the examples."
            )
        if not value.isfinite().all():
            raise InputError("the function given to from_log_prob returned NaN or infinite values for these labels.")
        return y

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        return self.fn(f, y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            f = f.detach().clone().requires_grad_()
            return torch.autograd.grad(self.fn(f, y).sum(), f)[0]

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        if y is None:
            raise UnsupportedError("from_log_prob has a Lambda at labels only; here outputs without labels came.")
        values, vectors = torch.linalg.eigh(self._bend(f, y).double())
        rounding = values.abs().amax(-1, keepdim=True) * torch.finfo(f.dtype).eps * 100
        below = (values < -rounding).any(-1)
        if below.any() and not self._warned:
            self._warned = True
            warn(
                f"-d2 log p / df2 of {self.described} has negative eigenvalues at {int(below.sum())} of {len(f)} "
                "examples; they are set to zero there, and wherever else they come up."
            )
        columns = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # (N, C, K)
        return OutputCurvature(vectors=columns.permute(2, 0, 1).to(f.dtype))

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        if self._sample is None:
            raise UnsupportedError(
                "curvature='mc' draws labels. Write from_log_prob(fn, sample=...), or take curvature='ggn' or 'sketch'."
            )
        return self._sample(f, n_samples, generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f if self._inverse_link is None else self._inverse_link(f)

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Of what the outputs stand for, as a normal with its mean and variance: that of y is not known."""
        if p is None:
            return _LATENT.distribution(outputs, p, sigma)
        variance = self.uncertainty(outputs, p, sigma, Draws(_DRAWS))[0]
        return Normal(p, variance.clamp(min=torch.finfo(p.dtype).tiny).sqrt())

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """The variance of what the outputs stand for, and nothing of y itself."""
        if p is None:
            return _LATENT.uncertainty(outputs, p, sigma, draws)
        variance = torch.cat([self.inverse_link(part).var(0) for part in outputs.draws(_seeded(outputs))])
        return variance, torch.zeros_like(variance)

    def log_predictive(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Tensor:
        """log of the mean of p(y given f) over draws of f, which are the same each time."""
        parts, start = [], 0
        for drawn in outputs.draws(_seeded(outputs)):
            rows = y[start : start + drawn.shape[1]]
            start += drawn.shape[1]
            parts.append(torch.stack([self.fn(f, rows) for f in drawn]).logsumexp(0) - math.log(len(drawn)))
        return torch.cat(parts)

    def _bend(self, f: Tensor, y: Tensor) -> Tensor:  # (N, C, C)
        """-d2 log p / df2."""
        with torch.enable_grad():
            f = f.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.fn(f, y).sum(), f, create_graph=True)
            if not slope.requires_grad:  # linear in f
                return f.new_zeros(*f.shape, f.shape[1])
            rows = [
                torch.autograd.grad(column.sum(), f, retain_graph=True, allow_unused=True)[0]
                for column in slope.unbind(1)
            ]
        bend = -torch.stack([torch.zeros_like(f) if row is None else row for row in rows], 1)
        if not bend.isfinite().all():
            raise InputError("the second derivative of the function given to from_log_prob is NaN or infinite.")
        return (bend + bend.mT) / 2


def _seeded(outputs: Outputs) -> Draws:
    return Draws(_DRAWS, torch.Generator(outputs.mean.device).manual_seed(0))
