"""Check on a sample of the training data whether the tuned posterior makes the network worse.

The prior of largest evidence may leave a posterior so wide that confidences collapse, and a noise may be far from the
residuals. Both show on the data that the network was fitted to:

    no noise        mean negative log-likelihood of the predictive above that of the network itself by more than HARM
    with a noise    standardised residuals r / sqrt(S + sigma^2) whose root mean square is above LARGEST_RATIO, or a
                    sigma of more than LARGEST_RATIO times the residuals'

A wide posterior usually loses more on training data than on new data, where it may even gain. But if the network itself
is too cautious, it loses up to twice as much on new data (150 classes of queries: 0.0053 and 0.0097 nats). So `auto`
allows a loss of ALLOWED, half of what it may lose on new data. This is a cautious check, not a guarantee. Standardised
residuals well below 1 say nothing: those of new data may be several times larger.

The sample is at most a fifth of the data, but not below 100 examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from laplace.backprop.gradients import Forward
from laplace.checks import how_many
from laplace.likelihoods import Targets
from laplace.posterior.posterior import Fit, Posterior
from laplace.tuning.scores import How, Predicted
from laplace.tuning.validation import Validation

EXAMPLES: Final = 500  # in a sample, at most
FEWEST: Final = 100
SHARE: Final = 0.2  # of the data
HARM: Final = 0.02  # nats per example above the network itself: worth a warning
ALLOWED: Final = 0.005  # nats that `auto` leaves: on new data up to twice as many were measured
LARGEST_RATIO: Final = 1.5  # of residuals to what is predicted, and of the noise to the residuals


@dataclass(frozen=True)
class Finding:
    """Holds how one posterior scores on a sample of the training data.

    Attributes:
        n: examples in the sample.
        nll: mean negative log-likelihood of the predictive.
        own: the same for the network itself; None for a likelihood with noise.
        accuracy: accuracy of the predicted classes; None for numbers.
        confidence: mean confidence of the predictive; None for numbers.
        own_confidence: mean confidence of the network itself; None for numbers.
        rms: root mean square of the standardised residuals; None without a noise.
        ratio: the noise divided by the standard deviation of all training residuals; None without a noise.
    """

    n: int
    nll: float
    own: float | None = None
    accuracy: float | None = None
    confidence: float | None = None
    own_confidence: float | None = None
    rms: float | None = None
    ratio: float | None = None

    @property
    def harm(self) -> float:
        """Return by how much the NLL is above that of the network itself; 0 for a likelihood with noise."""
        return 0.0 if self.own is None else self.nll - self.own

    @property
    def tripped(self) -> bool:
        """Return whether the posterior makes the network worse."""
        off = max(self.rms or 0.0, self.ratio or 0.0) > LARGEST_RATIO
        return off or self.harm > HARM or not math.isfinite(self.nll)

    @property
    def allowed(self) -> bool:
        """Return whether the harm is small enough for `auto`."""
        return not self.tripped and self.harm <= ALLOWED

    def __str__(self) -> str:
        if self.rms is not None:
            of = how_many(self.n, "training example")
            text = f"standardised residuals of {of} have a root mean square of {self.rms:.2f}"
            return text + ("" if self.ratio is None else f", and sigma_noise is {self.ratio:.3g} times the residuals'")
        text = f"on {how_many(self.n, 'training example')} the mean negative log-likelihood is {self.nll:.3f}"
        if self.own is not None:
            text += f" (the network's own {self.own:.3f})"
        if self.confidence is not None:
            text += (
                f", the mean confidence {self.confidence:.3f} (its own {self.own_confidence:.3f}) and the accuracy "
                f"{self.accuracy:.3f}"
            )
        return text


def size(n_data: int) -> int:
    """Return how many examples to score."""
    return min(EXAMPLES, max(FEWEST, int(SHARE * n_data)))


def residual_variance(found: Fit) -> Tensor:  # ()
    """Return the mean of r^2, relative to the noise of each output where that differs."""
    return 2 * found.data["loss"] / found.data["count"]


def findings(validation: Validation, posteriors: Sequence[Posterior]) -> list[Finding]:
    """Return how each posterior scores on the data of `validation`; one run of the network serves all."""
    tallies = [_Tally(validation.how, posterior) for posterior in posteriors]
    for forward, targets in validation.inside:
        for tally, prediction in zip(tallies, validation.predictions(posteriors, forward), strict=True):
            tally.add(prediction, forward, targets)
    return [tally.finding() for tally in tallies]


def mean_variances(validation: Validation, posteriors: Sequence[Posterior]) -> list[float]:
    """Return the mean of S on the data of `validation`, relative to the noise of each output where that differs."""
    sums, n = [0.0] * len(posteriors), 0.0
    for forward, targets in validation.inside:
        relative = posteriors[0].fit.likelihood.fisher(forward.outputs, targets.y).squares()  # (N, C)
        n += float(targets.total(relative.new_ones(len(relative))))
        for i, outputs in enumerate(validation.gaussians(posteriors, forward)):
            sums[i] += float(targets.total((outputs.variance * relative).double().mean(1)))
    return [total / max(n, 1e-300) for total in sums]


class _Tally:
    """Sums scores over the sample for one posterior, each example with its weight."""

    def __init__(self, how: How, posterior: Posterior) -> None:
        self.how, self.posterior, self.likelihood = how, posterior, posterior.fit.likelihood
        self.n, self.total, self.sums = 0, 0.0, dict[str, float]()

    def add(self, prediction: Predicted, forward: Forward, targets: Targets) -> None:
        outputs, p = prediction
        y, sigma, likelihood = targets.y, self.posterior.sigma, self.likelihood
        nll = -likelihood.log_predictive(outputs, p, y, sigma)
        self.n, self.total = self.n + len(nll), self.total + float(targets.total(torch.ones_like(nll)))
        self._count("nll", nll, targets)
        observed = likelihood.observed(y)
        if likelihood.has_noise:
            distribution = likelihood.distribution_at(outputs, p, y, sigma)
            ratio = (observed - distribution.mean).square() / distribution.variance
            self._count("squares", ratio.flatten(1).mean(1), targets)
            return
        f = forward.outputs / self.how.softmax_temperature  # what the network alone would predict by
        self._count("own", -likelihood.log_prob(f, y), targets)
        if p is None or not isinstance(likelihood.distribution(outputs, p, sigma), (Categorical, Bernoulli)):
            return
        confidence, correct = _confidence(p, observed)
        self._count("confidence", confidence, targets)
        self._count("accuracy", correct, targets)
        self._count("own_confidence", _confidence(likelihood.inverse_link(f), observed)[0], targets)

    def _count(self, what: str, values: Tensor, targets: Targets) -> None:
        self.sums[what] = self.sums.get(what, 0.0) + float(targets.total(values.double()))

    def finding(self) -> Finding:
        means = {what: total / max(self.total, 1e-300) for what, total in self.sums.items()}
        squares = means.pop("squares", None)
        if squares is None:
            return Finding(self.n, **means)
        residual = float(residual_variance(self.posterior.fit).sqrt())
        return Finding(
            self.n, rms=math.sqrt(squares), ratio=float(self.posterior.sigma) / max(residual, 1e-300), **means
        )


def _confidence(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # (N, K), (N,) or (N, K) -> (N,), (N,)
    """Return the confidence in the likeliest label of each example, and whether it is the right one."""
    if y.dim() < p.dim():
        confidence, label = p.max(-1)
        return confidence, (label == y).double()
    return torch.maximum(p, 1 - p).mean(-1), ((p > 0.5) == (y > 0.5)).double().mean(-1)
