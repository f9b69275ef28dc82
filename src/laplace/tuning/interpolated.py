"""Guess the score of any prior precision, noise and temperature from the output variances of a few posteriors.

The precision is s H + delta D, with s from noise and temperature, and one factor delta. So the output variances are
V(delta / s) / s: three hyperparameters act through a function of one number. log V of each validation example is
interpolated in log(delta / s) by a cubic spline, through the posteriors that were scored. A guess needs neither the
network nor a factorisation. It is only used to say where to score next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.likelihoods import Targets
from laplace.posterior.posterior import Posterior
from laplace.predictive.outputs import OutputGaussian
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.held_out import joined_targets
from laplace.tuning.scores import Tally
from laplace.tuning.space import Space
from laplace.tuning.validation import Validation

_NODES = 100  # about how many posteriors a search scores; as many variances per output have to fit into memory
_CHUNK = 2**20  # variances that are interpolated at a time
_SAME = 1e-9  # difference of log(delta / s) below which a node is not added again


class Interpolated:
    """Scores posteriors, keeps the variances of their outputs, and guesses the scores of others."""

    def __init__(self, validation: Validation, space: Space) -> None:
        self.validation, self.space, self.likelihood = validation, space, space.posterior.fit.likelihood
        self._variances: dict[float, Tensor] = {}  # log(delta / s): log of s times the variances, (N, C)
        self._mean: Tensor | None = None  # (N, C)
        self._targets: Targets | None = None
        self._spline: tuple[Tensor, Tensor, Tensor] | None = None  # nodes, values there, second derivatives

    @classmethod
    def of(cls, validation: Validation, space: Space) -> Interpolated | None:
        """Return one if output variances determine the score: a regression with one output, or independent ones."""
        posterior, how = space.posterior, validation.how
        fit = posterior.fit
        if (
            len(dict.fromkeys(space.kinds)) < 2
            or space.groups not in (None, "scalar")
            or not isinstance(posterior.prior, GaussianPrior)
            or how.pred_type == "nn"
            or (how.loss, how.approximation, validation.outside) != (None, None, None)
            or validation.reduce.size > 1
            or fit.owners is not None
            or (fit.likelihood.joint and fit.n_outputs > 1)
            or not fit.likelihood.has_noise
            or getattr(fit.structure, "damping", False)
        ):
            return None
        return cls(validation, space)

    def scores(self, posteriors: Sequence[Posterior]) -> Tensor:  # (G,)
        """Return the scores as `Validation.scores` does, and keep the variances."""
        tallies = [Tally(self.validation.how, self.likelihood) for _ in posteriors]
        parts: list[list[Tensor]] = [[] for _ in posteriors]
        means, labels = [], []
        for forward, targets in self.validation.inside:
            means.append(forward.outputs)
            labels.append(targets)
            found = self.validation.gaussians(posteriors, forward)
            for tally, kept, posterior, outputs in zip(tallies, parts, posteriors, found, strict=True):
                tally.add((outputs, None), targets, posterior.sigma)
                kept.append(outputs.variance.double() * posterior.scale)
        if self._mean is None:
            whole = joined_targets(labels)  # in float64: rounding would look like progress to a search among guesses
            self._mean, self._targets = torch.cat(means).double(), Targets(whole.y.double(), whole.weights)
        if self.fits:
            for posterior, kept in zip(posteriors, parts, strict=True):
                self._add(_ratio(posterior), torch.cat(kept).clamp(min=1e-300).log())
        return torch.tensor([tally.value() for tally in tallies], dtype=torch.float64)

    @property
    def fits(self) -> bool:
        """Return whether the variances of about as many posteriors as a search scores fit into memory."""
        assert self._mean is not None
        return 8 * _NODES * self._mean.numel() <= self.validation.budget.chunk

    def guesses(self, points: Sequence[Tensor]) -> Tensor:  # (K,) each -> (G,)
        """Return what the scores of points of the space are by interpolation."""
        assert self._mean is not None
        step = max(1, _CHUNK // self._mean.numel())
        return torch.cat([self._guesses(part) for part in torch.stack([*points]).split(step)]).cpu()

    def _guesses(self, x: Tensor) -> Tensor:  # (G, K) -> (G,)
        f, targets, posterior = self._mean, self._targets, self.space.posterior
        assert f is not None
        assert targets is not None
        of = dict(zip(self.space.kinds, x.unbind(1), strict=True))
        sigma = of["sigma_noise"].exp() if "sigma_noise" in of else posterior.sigma.to(x).expand(len(x))
        s = self.likelihood.curvature_scale(posterior.fit.scaling, sigma)
        s = s / (of["temperature"].exp() if "temperature" in of else posterior.temperature)
        delta = of["prior_precision"] if "prior_precision" in of else _log_precision(posterior).to(x)
        variance = (self._at(delta - s.log()).exp() / s[:, None, None]).flatten(0, 1)  # (G N, C)
        times = (len(x), *[1] * (targets.y.dim() - 1))
        outputs = OutputGaussian(f.repeat(len(x), 1), variance.to(f))
        noise = sigma.repeat_interleave(len(f)).unsqueeze(1)
        log_p = self.likelihood.log_predictive(outputs, None, targets.y.repeat(times), noise).reshape(len(x), -1)
        weights = torch.ones(len(f)).to(log_p) if targets.weights is None else targets.weights.to(log_p)
        return -(log_p.double() @ weights.double()) / weights.double().sum()

    def _add(self, ratio: float, variances: Tensor) -> None:
        if all(abs(ratio - other) > _SAME for other in self._variances):
            self._variances = dict(sorted([*self._variances.items(), (ratio, variances)]))
            self._spline = None

    def _at(self, ratios: Tensor) -> Tensor:  # (G,) -> (G, N, C)
        """Return the spline at some places; beyond its ends it is a straight line."""
        if self._spline is None:
            values = torch.stack([*self._variances.values()])
            nodes = torch.tensor([*self._variances], dtype=torch.float64, device=values.device)
            self._spline = nodes, values, second_derivatives(nodes, values)
        nodes, values, bends = self._spline
        right = torch.searchsorted(nodes, ratios).clamp(1, len(nodes) - 1)
        h = nodes[right] - nodes[right - 1]
        b = (ratios - nodes[right - 1]) / h
        bend_b = torch.where((b >= 0) & (b <= 1), (b**3 - b) * h**2 / 6, 0.0)
        bend_a = torch.where((b >= 0) & (b <= 1), ((1 - b) ** 3 - (1 - b)) * h**2 / 6, 0.0)
        pairs = ((1 - b, values[right - 1]), (b, values[right]), (bend_a, bends[right - 1]), (bend_b, bends[right]))
        return torch.stack([weight[:, None, None] * value for weight, value in pairs]).sum(0)


def second_derivatives(nodes: Tensor, values: Tensor) -> Tensor:  # (R,), (R, ...) -> (R, ...)
    """Return the second derivatives of the natural cubic spline through values at ascending nodes."""
    r, shape = len(nodes), values.shape
    flat, h = values.flatten(1), nodes[1:] - nodes[:-1]
    out = torch.zeros_like(flat)
    if r > 2:
        system = torch.diag((h[:-1] + h[1:]) / 3) + torch.diag(h[1:-1] / 6, 1) + torch.diag(h[1:-1] / 6, -1)
        slopes = (flat[1:] - flat[:-1]) / h.to(flat).unsqueeze(1)
        out[1:-1] = torch.linalg.solve(system.to(flat), slopes[1:] - slopes[:-1])
    return out.reshape(shape)


def _ratio(posterior: Posterior) -> float:
    return float(_log_precision(posterior) - posterior.scale.double().log())


def _log_precision(posterior: Posterior) -> Tensor:  # ()
    """Return the logarithm of delta: of the first precision, where there are several in a fixed ratio."""
    prior = posterior.prior
    assert isinstance(prior, GaussianPrior)
    return prior.precision.double().reshape(-1)[0].log()
