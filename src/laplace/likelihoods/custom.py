"""Any log p(y given f) that is twice differentiable in f: score and Lambda by autograd.

Lambda is minus the second derivative at the label, with its negative eigenvalues, if any, set to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from laplace.errors import InputError, OptionError, UnsupportedError, warn
from laplace.keywords import named_options
from laplace.likelihoods.base import Likelihood
from laplace.linalg.output_curvature import OutputCurvature
from laplace.linalg.sampling import Draws
from laplace.predictive.links import Link, MonteCarlo
from laplace.predictive.outputs import OutputSamples
from laplace.predictive.queries import Covariances
from laplace.predictive.response import Latent, Outputs, Response

_DRAWS = 256  # of f, over which p(y given f) is averaged
_LATENT = Latent()

LogProb = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[Tensor, int, torch.Generator | None], Tensor]


@named_options
def from_log_prob(
    fn: LogProb,
    inverse_link: Callable[[Tensor], Tensor] | None = None,
    sample: Sampler | None = None,
    name: str | None = None,
) -> Custom:
    """Make a likelihood from a function log p(y given f). Score and Lambda come from autograd.

    Lambda is minus the second derivative of log p at the label; negative eigenvalues are set to zero, with a warning.

    Args:
        fn: Takes outputs (N, C) and labels (N, ...), returns log p for each example, (N,). Must be twice differentiable
            in the outputs.
        inverse_link: Maps f (..., C) to what it stands for, such as probabilities. With it, `la(x)` is the mean of the
            inverse link over draws of f; without it, the mean and covariance of the outputs.
        sample: `sample(f, n_samples, generator)` draws labels. Only curvature 'mc' needs it.
        name: Identifies the function when saved states are compared. The function's own name by default.

    Returns:
        A likelihood for `Laplace`.

    Raises:
        OptionError: an argument that should be a function is not one.
        InputError: in `fit`, the function returned another shape, or NaN.
    """
    for what, given in {"fn": fn, "inverse_link": inverse_link, "sample": sample}.items():
        if not callable(given) and (given is not None or what == "fn"):
            raise OptionError(f"{what} is a {type(given).__name__}; a function is needed: from_log_prob(fn).")
    return Custom(fn, inverse_link, sample, name)


class ByAutograd(Likelihood):
    """Makes a likelihood of `log_prob` alone: a subclass writes that, and no more.

    Score and Lambda come from autograd; Lambda is minus the second derivative at the label, with its negative
    eigenvalues, if any, set to zero. Two methods are optional: `inverse_link`, whose mean over draws `la(x)` then
    returns (or through your own `links`), and `sample`, which curvature 'mc' needs.
    """

    joint = True
    _warned = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a subclass a name of its own."""
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @cached_property
    def links(self) -> Mapping[str, Link]:  # type: ignore[override]
        """Return 'mc' if it is known what outputs stand for, else nothing."""
        known = type(self).inverse_link is not ByAutograd.inverse_link
        return {"mc": Link(MonteCarlo(self.inverse_link), Covariances)} if known else {}

    @property
    def response(self) -> Response:
        return self if self.links else _LATENT

    @property
    def _source(self) -> str:
        """Say where log p comes from, for messages."""
        return f"{type(self).__name__}.log_prob"

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.shape[:1] != f.shape[:1]:
            raise InputError(
                f"labels have shape {tuple(y.shape)}, the outputs {tuple(f.shape)}; one label per row is needed."
            )
        value = self.log_prob(f, y)
        if not isinstance(value, Tensor) or value.shape != f.shape[:1]:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"{self._source} returned {shape} for outputs {tuple(f.shape)}; one number per "
                f"example, ({len(f)},), is needed. Sum over the outputs, not over the examples."
            )
        if not value.isfinite().all():
            raise InputError(
                f"{self._source} returned NaN or infinite values for these labels. Check that the labels are allowed, "
                "and avoid log(0) and overflow (logsumexp, log1p, logsigmoid)."
            )
        self._require_own_rows(f, y, value)
        return y

    def _require_own_rows(self, f: Tensor, y: Tensor, value: Tensor) -> None:  # (N, C), (N, ...), (N,)
        """Refuse a log p of an example that depends on other examples, as labels (N,) do that meet outputs (N, 1)."""
        if len(f) < 2:
            return
        some = 2 if len(f) > 2 else 1
        alone, together = self.log_prob(f[:some], y[:some]).detach().reshape(-1), value.detach()[:some]
        if alone.shape == together.shape and torch.allclose(alone, together, rtol=1e-3, atol=1e-4):
            return
        shapes = f"labels {tuple(y.shape)}, outputs {tuple(f.shape)}"
        raise InputError(
            f"{self._source} of the first example depends on other examples: {shapes}. "
            + (
                "These are broadcast to a table of all pairs; write y.unsqueeze(-1)."
                if y.dim() == 1 and f.shape[1] == 1
                else "Compute each number from the same row of outputs and labels."
            )
        )

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            f = f.detach().clone().requires_grad_()
            return torch.autograd.grad(self.log_prob(f, y).sum(), f)[0]

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        if y is None:
            raise UnsupportedError(
                f"the curvature of {self.name} depends on the labels; write fisher(f, y), with labels."
            )
        values, vectors = torch.linalg.eigh(self._negative_hessian(f, y).double())
        rounding = values.abs().amax(-1, keepdim=True) * torch.finfo(f.dtype).eps * 100
        below = (values < -rounding).any(-1)
        if below.any() and not self._warned:
            self._warned = True
            warn(
                f"-d2 log p / df2 of {self.described} has negative eigenvalues at {int(below.sum())} of {len(f)} "
                "examples. They are set to zero, here and in every later batch."
            )
        columns = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # (N, C, K)
        return OutputCurvature(vectors=columns.permute(2, 0, 1).to(f.dtype))

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        raise UnsupportedError(
            f"curvature='mc' draws labels. Write {type(self).__name__}.sample, or take curvature='ggn' or 'sketch'."
        )

    def inverse_link(self, f: Tensor) -> Tensor:
        return f

    def distribution(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, link: str = "") -> Distribution:
        """Return a normal with mean and variance of what the outputs stand for. The distribution of y is unknown."""
        if p is None:
            return _LATENT.distribution(outputs, p, sigma)
        variance = self.uncertainty(outputs, p, sigma, Draws(_DRAWS))[0]
        return Normal(p, variance.clamp(min=torch.finfo(p.dtype).tiny).sqrt())

    def uncertainty(self, outputs: Outputs, p: Tensor | None, sigma: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the variance of what the outputs stand for, and zeros: the noise of y is unknown."""
        if p is None:
            return _LATENT.uncertainty(outputs, p, sigma, draws)
        how = _seeded(outputs)
        weights = outputs.weights_of_draws(how)
        drawn = [OutputSamples(self.inverse_link(part), weights) for part in outputs.draws(how)]
        variance = torch.cat([part.variance for part in drawn])
        return variance, torch.zeros_like(variance)

    def log_predictive(self, outputs: Outputs, p: Tensor | None, y: Tensor, sigma: Tensor) -> Tensor:
        """Return the log of the mean of p(y given f) over draws of f. The draws are seeded, so calls agree."""
        parts, start, how = [], 0, _seeded(outputs)
        weights = outputs.weights_of_draws(how)
        for drawn in outputs.draws(how):
            rows = y[start : start + drawn.shape[1]]
            start += drawn.shape[1]
            each = torch.stack([self.log_prob(f, rows) for f in drawn])  # (S, n)
            shares = each.new_full((len(each),), 1 / len(each)) if weights is None else weights.to(each)
            parts.append((each + shares.log().unsqueeze(1)).logsumexp(0))
        return torch.cat(parts)

    def _negative_hessian(self, f: Tensor, y: Tensor) -> Tensor:  # (N, C, C)
        """Return -d2 log p / df2."""
        with torch.enable_grad():
            f = f.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_prob(f, y).sum(), f, create_graph=True)
            if not slope.requires_grad:  # linear in f
                return f.new_zeros(*f.shape, f.shape[1])
            rows = [
                torch.autograd.grad(column.sum(), f, retain_graph=True, allow_unused=True)[0]
                for column in slope.unbind(1)
            ]
        bend = -torch.stack([torch.zeros_like(f) if row is None else row for row in rows], 1)
        if not bend.isfinite().all():
            raise InputError(
                f"the second derivative of {self._source} is NaN or infinite. Write it with functions that are twice "
                "differentiable at these outputs."
            )
        return (bend + bend.mT) / 2


class Custom(ByAutograd):
    """Makes a likelihood from a function: see `from_log_prob`."""

    name = "from_log_prob"

    def __init__(
        self,
        fn: LogProb,
        inverse_link: Callable[[Tensor], Tensor] | None,
        sample: Sampler | None,
        name: str | None,
    ) -> None:
        self.fn, self._inverse_link, self._sample = fn, inverse_link, sample
        self._called = name or getattr(fn, "__qualname__", type(fn).__name__)
        self.links = {} if inverse_link is None else {"mc": Link(MonteCarlo(inverse_link), Covariances)}

    @property
    def described(self) -> str:
        return f"{self.name}({self._called})"

    @property
    def _source(self) -> str:
        return "the function given to from_log_prob"

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        return self.fn(f, y)

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        if self._sample is None:
            raise UnsupportedError(
                "curvature='mc' draws labels. Write from_log_prob(fn, sample=...), or take curvature='ggn' or 'sketch'."
            )
        return self._sample(f, n_samples, generator)

    def inverse_link(self, f: Tensor) -> Tensor:
        return f if self._inverse_link is None else self._inverse_link(f)


def _seeded(outputs: Outputs) -> Draws:
    return Draws(_DRAWS, torch.Generator(outputs.mean.device).manual_seed(0))
