"""Score settings of a posterior on every held-out example, with as few runs of the network as memory allows.

A setting is a factor of the prior precision and a scale: the softmax temperature, or the noise of a regression. The
outputs' Gaussian of one factor serves all scales. With the curvature s H, where s = c(sigma) / T,

    S(delta, s) = (1 / s) S_1(delta / s),

so a grid over delta / s is a grid over delta for every noise. The Gaussians are kept after the first run, if they are
small. The network itself is the factor infinity, S = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace.budget import Budget
from laplace.errors import InputError
from laplace.inference.linearised import through_link
from laplace.likelihoods import Likelihood, Targets
from laplace.likelihoods.base import Sums
from laplace.likelihoods.bernoulli import Multilabel
from laplace.likelihoods.classes import OneOfSeveral
from laplace.posterior.posterior import Posterior
from laplace.predictive.mixtures import Outputs, joined
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.queries import Products
from laplace.priors.gaussian import GaussianPrior
from laplace.tuning.validation import Runs, Validation, seeded

NETWORK: Final = math.inf  # the factor of the network itself
LEVEL: Final = 0.9  # of the interval whose coverage is counted
_Z: Final = 1.6448536269514722  # its half-width in standard deviations
_MOST_OUTPUTS = 32  # with more than these, covariances are not kept
_FEW = 200  # examples that say where a scale is to be looked for

Setting = tuple[float, float]  # factor of the prior precision, scale


@dataclass(frozen=True)
class Scored:
    """Holds the scores of one setting on every example.

    Attributes:
        losses: Negative log-likelihoods, (N,), in float64.
        weights: The weights of these examples, (N,); None: 1 for all.
        entropies: Entropies of the predictive on outside inputs, (M,), if there are any.
        confidence: Probabilities of the predicted classes, (K,). None for a regression.
        correct: Whether the predicted class is the label, or whether the label lies in its 90 % interval, (K,).
    """

    losses: Tensor
    weights: Tensor | None = None
    entropies: Tensor | None = None
    confidence: Tensor | None = None
    correct: Tensor | None = None


class HeldOut:
    """Scores settings on each example of the validation data."""

    def __init__(self, validation: Validation, posterior: Posterior, scale: str | None) -> None:
        self.validation, self.posterior, self.scale = validation, posterior, scale
        self.likelihood = posterior.fit.likelihood
        self._inside = _Kept(validation.inside, validation, posterior)
        self._outside = None if validation.outside is None else _Kept(validation.outside, validation, posterior)
        self.weights: Tensor | None = None  # (N,), of the examples in the last reading; None: 1 for all
        self.targets: Tensor = posterior.sigma.new_empty(0)  # (N, ...), of the last reading
        self.data: Sums = {}  # of the network on these examples, as fit leaves them
        self._kept_everywhere = False  # whether every process has kept the Gaussians of its examples
        self._rows: Tensor | None = None  # (n,), where this process's examples are among those of all

    def at(self, factor: float) -> Posterior:
        """Return the posterior with the prior precision times a factor."""
        prior = self.posterior.prior
        assert isinstance(prior, GaussianPrior)
        return replace(self.posterior, prior=prior.with_precision(prior.precision * factor))

    def rescaling(self, scale: float) -> float:
        """Return s / s_0, by which a noise multiplies the curvature. It is 1 for a softmax temperature."""
        if self.scale != "sigma_noise":
            return 1.0
        fit, sigma = self.posterior.fit, self.posterior.sigma.double()
        scales = [fit.likelihood.curvature_scale(fit.scaling, s) for s in (torch.full_like(sigma, scale), sigma)]
        return float(scales[0] / scales[1])

    def keep(self, factors: Sequence[float]) -> None:
        """Run the network once for all these factors, and keep the Gaussians of its outputs if they are small."""
        for _ in self._remembered(factors):
            pass
        for _ in () if self._outside is None else self._outside.gaussians(factors):
            pass

    def scores(self, settings: Sequence[Setting], in_detail: bool = False, few: bool = False) -> list[Scored]:
        """Score all settings on the same examples in the same order; if `few`, on some of the kept examples."""
        by_factor: dict[float, list[Setting]] = {}
        for setting in settings:
            by_factor.setdefault(setting[0], []).append(setting)
        few = few and self._kept_everywhere
        found: dict[Setting, list[Scored]] = {setting: [] for setting in settings}
        for factor, outputs, labels in self._remembered(list(by_factor)):
            rows = self._few_rows(len(outputs.mean)) if few else None
            some, targets = _some(outputs, rows), _some_targets(labels, rows)
            for setting in by_factor[factor]:
                found[setting].append(self._score(setting, some, targets, in_detail))
        outside: dict[Setting, list[Tensor]] = {setting: [] for setting in settings}
        for factor, outputs, _ in () if self._outside is None else self._outside.gaussians(list(by_factor)):
            some = _some(outputs, _spread(len(outputs.mean), _FEW) if few else None)
            for setting in by_factor[factor]:
                seen, p, sigma = self._predicted(setting, some)
                outside[setting].append(self.likelihood.entropy(seen, p, sigma).double())
        reports = self.validation.reduce.agree(lambda: [(found[setting], outside[setting]) for setting in settings])
        return [
            _together([part for parts, _ in of_all for part in parts], [part for _, parts in of_all for part in parts])
            for of_all in zip(*reports, strict=True)
        ]

    def _few_rows(self, n: int) -> Tensor:
        """Return the rows of this process among a few examples that are evenly spread over the data of all."""
        total = len(self.targets)
        if self.validation.reduce.size == 1 or not total:
            return _spread(n, _FEW)
        if self._rows is None:  # a loader cannot say where its examples are: each process takes its share
            return _spread(n, -(-n * _FEW // total))
        return torch.isin(self._rows, _spread(total, _FEW)).nonzero().flatten()

    def _remembered(self, factors: Sequence[float]) -> Iterator[tuple[float, OutputGaussian, Targets]]:
        """Yield the Gaussians of some factors, and remember labels and weights of the examples."""
        targets: list[Targets] = []
        sums: list[Sums] = []
        for factor, outputs, labels in self._inside.gaussians(factors):
            if factor == factors[0]:
                targets.append(labels)
                sums.append(self.likelihood.sums(outputs.mean, labels))
            yield factor, outputs, labels
        self._remember(targets, sums)

    def _remember(self, targets: Sequence[Targets], sums: Sequence[Sums]) -> None:
        kept, places = self._inside.targets is not None, self.validation.places
        places = places if places is not None and len(places) == sum(len(part.y) for part in targets) else None
        reports = self.validation.reduce.agree(lambda: (targets, sums, kept or not targets, places))
        sums = [each for _, of_rank, *_ in reports for each in of_rank]
        if not sums:
            raise InputError("val_loader gave no example on any rank; give at least one.")
        whole = joined_targets([part for of_rank, *_ in reports for part in of_rank])
        self.data = {key: torch.stack([each[key] for each in sums]).sum(0) for key in sums[0]}
        self.targets, self.weights = whole.y, None if whole.weights is None else whole.weights.double()
        self._kept_everywhere = all(there for *_, there, _ in reports)
        known = [at for *_, at in reports if at is not None]
        in_order = torch.cat(known).sort().values if len(known) == len(reports) else None
        self._rows = None if in_order is None or places is None else torch.searchsorted(in_order, places)

    def _score(self, setting: Setting, outputs: OutputGaussian, targets: Targets, in_detail: bool) -> Scored:
        seen, p, sigma = self._predicted(setting, outputs)
        losses = -self.likelihood.log_predictive(seen, p, targets.y, sigma).double()
        weights = None if targets.weights is None else targets.weights.double()
        if not in_detail:
            return Scored(losses, weights)
        return Scored(losses, weights, None, *judged(self.likelihood, seen, p, targets, sigma))

    def _predicted(self, setting: Setting, outputs: OutputGaussian) -> tuple[OutputGaussian, Tensor | None, Tensor]:
        """Return the outputs at a scale, their mean through the link (None without one), and the noise."""
        (factor, scale), sigma = setting, self.posterior.sigma
        if self.scale == "softmax_temperature":
            outputs = outputs.scaled(1 / scale)
        elif self.scale == "sigma_noise":
            outputs, sigma = outputs.widened(1 / self.rescaling(scale)), torch.full_like(sigma, scale)
        how = self.validation.how
        if how.approximation is None:
            return outputs, None, sigma
        if factor == NETWORK:
            return outputs, self.likelihood.inverse_link(outputs.mean), sigma
        return outputs, through_link(how.approximation, outputs, seeded(how.n_samples, outputs.mean))[0], sigma


class _Kept:
    """Computes output Gaussians on a loader for several factors. Keeps them if they are small, else runs again."""

    def __init__(self, runs: Runs, validation: Validation, posterior: Posterior) -> None:
        self.runs, self.validation, self.posterior = runs, validation, posterior
        self.kept: Mapping[float, OutputGaussian] = {}
        self.targets: Targets | None = None

    @property
    def budget(self) -> Budget:
        return self.validation.budget

    def gaussians(self, factors: Sequence[float]) -> Iterator[tuple[float, OutputGaussian, Targets]]:
        """Yield the Gaussians of some factors, for all examples at once or batch by batch."""
        if self.targets is not None and all(factor in self.kept for factor in factors):
            yield from ((factor, self.kept[factor], self.targets) for factor in factors)
            return
        wanted = list(dict.fromkeys([*self.kept, *factors]))  # examples may come in another order: all are made again
        self.kept, self.targets = {}, None
        parts: dict[float, list[Outputs]] = {factor: [] for factor in wanted}
        labels: list[Targets] = []
        held, room, keeps = 0, self.budget.chunk, self._can_be_kept
        for factor, outputs, targets in self._read(wanted):
            if factor in factors:
                yield factor, outputs, targets
            held += _numbers(outputs) * outputs.mean.element_size()
            if held <= room and keeps:
                parts[factor].append(replace(outputs, times=None))
                labels += [targets] if factor == wanted[0] else []
            elif parts[factor]:
                parts = {each: [] for each in wanted}
        if held <= room and keeps and labels:
            self.kept = {factor: _joined(parts.pop(factor)) for factor in wanted}
            self.targets = joined_targets(labels)

    @property
    def _covariances(self) -> bool:
        """Return whether covariances are kept, instead of products with them."""
        link = self.validation.how.approximation
        return link is not None and link.needs is Products and self.posterior.fit.n_outputs <= _MOST_OUTPUTS

    @property
    def _can_be_kept(self) -> bool:
        link = self.validation.how.approximation
        return link is None or link.needs is not Products or self._covariances

    def _read(self, factors: Sequence[float]) -> Iterator[tuple[float, OutputGaussian, Targets]]:
        prior = self.posterior.prior
        assert isinstance(prior, GaussianPrior)
        groups = [factors]
        if prior.precision.numel() > 1 and self.posterior.fit.linear:  # each factor has a matrix of its own
            for _ in self.runs:
                pass  # which keeps the runs, if they are small
            groups = [[factor] for factor in factors] if self.runs.kept is not None else groups
        for group in groups:
            finite = [factor for factor in group if factor != NETWORK]
            posteriors = [replace(self.posterior, prior=prior.with_precision(prior.precision * f)) for f in finite]
            for forward, targets in self.runs:
                if NETWORK in group:
                    yield NETWORK, _certain(forward.outputs), targets
                if finite:
                    made = self.validation.gaussians(posteriors, forward, self._covariances)
                    yield from ((factor, outputs, targets) for factor, outputs in zip(finite, made, strict=True))


def judged(
    likelihood: Likelihood, outputs: OutputGaussian, p: Tensor | None, targets: Targets, sigma: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the confidence in each prediction and whether it is right, for examples that count. None if unknown."""
    counts = slice(None) if targets.weights is None else targets.weights > 0
    y = likelihood.observed(targets.y)[counts]
    if isinstance(likelihood, OneOfSeveral) and p is not None:
        top, label = p[counts].max(-1)
        return top, label == (y.argmax(-1) if y.dim() > 1 else y)  # of class probabilities, the likeliest
    if isinstance(likelihood, Multilabel) and p is not None:
        return torch.maximum(p, 1 - p)[counts].flatten(), ((p[counts] > 0.5) == (y > 0.5)).flatten()
    if p is not None:
        return None, None
    normal = likelihood.distribution_at(outputs, p, targets.y, sigma)
    if not isinstance(normal, Normal | MultivariateNormal):
        return None, None
    inside = (likelihood.observed(targets.y) - normal.mean).abs() <= _Z * normal.variance.sqrt()
    return None, inside[counts].flatten()


def joined_targets(parts: Sequence[Targets]) -> Targets:
    """Join the labels of consecutive batches."""
    y = torch.cat([part.y for part in parts])
    if all(part.weights is None for part in parts):
        return Targets(y)
    ones = [torch.ones(len(part.y), device=y.device) if part.weights is None else part.weights for part in parts]
    return Targets(y, torch.cat([each.double() for each in ones]))


def _together(parts: Sequence[Scored], entropies: Sequence[Tensor]) -> Scored:
    def cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [each for each in tensors if each is not None]
        return torch.cat(present) if present else None

    losses, *details = (cat([getattr(part, name) for part in parts]) for name in ("losses", "confidence", "correct"))
    assert losses is not None
    weights = None
    if any(part.weights is not None for part in parts):
        weights = torch.cat([torch.ones_like(p.losses) if p.weights is None else p.weights for p in parts])
    return Scored(losses, weights, cat(entropies), *details)


def _some(outputs: OutputGaussian, rows: Tensor | None) -> OutputGaussian:
    """Return the Gaussian at some examples."""
    return outputs if rows is None or len(rows) == len(outputs.mean) else outputs.map_rows(lambda t: t[rows])


def _some_targets(targets: Targets, rows: Tensor | None) -> Targets:
    if rows is None or len(rows) == len(targets.y):
        return targets
    return Targets(targets.y[rows], None if targets.weights is None else targets.weights[rows])


def _spread(n: int, limit: int) -> Tensor:
    """Return up to `limit` rows of n, evenly spread."""
    return torch.arange(n) if limit >= n else torch.linspace(0, n - 1, limit).round().long()


def _certain(f: Tensor) -> OutputGaussian:
    """Return the outputs of the network itself."""
    return OutputGaussian(f, torch.zeros_like(f))


def _joined(parts: list[Outputs]) -> OutputGaussian:
    whole = joined(parts)
    assert isinstance(whole, OutputGaussian)
    return whole


def _numbers(outputs: OutputGaussian) -> int:
    return 2 * outputs.mean.numel() + (0 if outputs.covariance is None else outputs.covariance.numel())
