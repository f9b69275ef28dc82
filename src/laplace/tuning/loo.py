"""Score posteriors by leave-one-out predictions of the training data, in closed form from one run of the network.

With (f, S) the mean and covariance of an example's outputs, Lambda = R R^T the curvature of its negative log-likelihood
at f and g the gradient, both as the posterior counts them (with noise, temperature and weight), the posterior without
the example is, after one Newton step,

    S_-n = S + S R (I - R^T S R)^-1 R^T S
    f_-n = f + S_-n g

For linear regression at its optimum this is what a new fit without the example gives: a residual r becomes r / (1 - h)
with the leverage h = S / sigma^2. It removes an example from the uncertain weights only. Where the features were
trained on the same examples, they still remember them, and the score prefers a narrow posterior: the network itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward
from laplace.budget import Budget
from laplace.inference.linearised import through_link
from laplace.likelihoods import Targets
from laplace.linalg.symmetric import spectrum
from laplace.posterior.posterior import Posterior
from laplace.predictive.outputs import OutputGaussian
from laplace.tuning.scores import How, Tally
from laplace.tuning.validation import Labelled, Runs, in_parts, seeded

LARGEST_LEVERAGE: Final = 1 - 1e-4  # eigenvalues of R^T S R above it are taken as this
MOST_EXAMPLES: Final = 5_000
FEWEST_EXAMPLES: Final = 200
_WORST: Final = 1e30  # the score of a posterior so wide that it overflows
MOST_WORK: Final = 2e11  # multiplications: examples x outputs^3 x posteriors


class LeaveOneOut:
    """Scores posteriors that differ in prior, noise and temperature, on the data that they were fitted to.

    The network runs again for every call of `scores`, unless its runs are small enough to be kept.
    """

    def __init__(self, how: How, runs: Callable[[], Labelled], budget: Budget) -> None:
        self.how, self.budget = how, budget
        self.runs = Runs(runs, "training", budget)

    def scores(self, posteriors: Sequence[Posterior]) -> Tensor:  # (G,)
        """Return the score of each posterior: the mean negative log-likelihood, or the loss."""
        tallies = [Tally(self.how, posterior.fit.likelihood) for posterior in posteriors]
        for forward, targets in self.runs:
            predicted = self.predictions(posteriors, forward, targets)
            for tally, posterior, prediction in zip(tallies, posteriors, predicted, strict=True):
                tally.add(prediction, targets, posterior.sigma)
        scores = torch.tensor([tally.value() for tally in tallies], dtype=torch.float64)
        return torch.where(scores.isfinite(), scores, _WORST) if scores.isfinite().any() else scores

    def predictions(
        self, posteriors: Sequence[Posterior], forward: Forward, targets: Targets
    ) -> Iterator[tuple[OutputGaussian, Tensor | None]]:
        """Yield the leave-one-out predictive of a run under each posterior, and its mean through the link if any."""
        how, link = self.how, self.how.approximation
        for outputs in left_out(posteriors, forward, targets, self.budget):
            outputs, draws = outputs.scaled(1 / how.softmax_temperature), seeded(how.n_samples, outputs.mean)
            yield outputs, None if link is None else through_link(link, outputs, draws)[0]


def left_out(
    posteriors: Sequence[Posterior], forward: Forward, targets: Targets, budget: Budget
) -> Iterator[OutputGaussian]:
    """Yield N(f_-n, S_-n) of each example of a run, under each posterior."""
    f, likelihood = forward.outputs, posteriors[0].fit.likelihood
    root = likelihood.fisher(f, targets.y).weighted(targets.weights).root().double().permute(1, 2, 0)  # (N, C, K)
    gradient = -likelihood.score(f, targets.y).double()  # (N, C)
    if targets.weights is not None:
        gradient = gradient * targets.weights.to(gradient).unsqueeze(1)
    for posterior, covariance in zip(posteriors, _covariances(posteriors, forward, budget), strict=True):
        scale = likelihood.curvature_scale("ggn", posterior.sigma).double() / posterior.temperature
        yield without(f.double(), covariance.double(), scale.sqrt() * root, scale * gradient, f.dtype)


def _covariances(posteriors: Sequence[Posterior], forward: Forward, budget: Budget) -> Iterator[Tensor]:  # (N, C, C)
    """Yield S under each posterior. With one output, the projections are shared."""
    jacobian = forward.jacobian()
    for part in in_parts(posteriors, budget):
        if forward.outputs.shape[1] == 1:
            for variance in part[0].curvature.sweep(jacobian, [posterior.gaussian for posterior in part]):
                yield variance.unsqueeze(-1)
        else:
            for posterior in part:
                yield posterior.gaussian.covariance(jacobian)


def without(
    f: Tensor,  # (N, C)
    covariance: Tensor,  # (N, C, C)
    root: Tensor,  # (N, C, K)
    gradient: Tensor,  # (N, C)
    dtype: torch.dtype,
) -> OutputGaussian:
    """Return N(f_-n, S_-n) of each example, in `dtype`; the arguments are float64.

    I - R^T S R loses definiteness where an example's leverage is 1 or, for structures that leave out covariances of
    weights, above 1. Eigenvalues of R^T S R above LARGEST_LEVERAGE are taken as that.
    """
    covariance = (covariance + covariance.mT) / 2
    product = covariance @ root
    step = _inverse_root(root.mT @ product)
    change = product @ step  # change change^T = S R (I - R^T S R)^-1 R^T S
    covariance = covariance + change @ change.mT
    f = f + torch.einsum("ncd,nd->nc", covariance, gradient)
    return OutputGaussian(f.to(dtype), covariance.diagonal(dim1=1, dim2=2).to(dtype), covariance.to(dtype))


def _inverse_root(leverage: Tensor) -> Tensor:  # (N, K, K) -> (N, K, K)
    """Return X with X X^T = (I - M)^-1, M having no eigenvalue above LARGEST_LEVERAGE."""
    eye = torch.eye(leverage.shape[-1], dtype=leverage.dtype, device=leverage.device)
    _, failed = torch.linalg.cholesky_ex(LARGEST_LEVERAGE * eye - leverage)
    factor, _ = torch.linalg.cholesky_ex(eye - leverage)
    bad = failed > 0
    factor = torch.where(bad[:, None, None], eye, factor)
    inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).mT
    if bad.any():
        values, vectors = spectrum(leverage[bad])
        inverse[bad] = vectors * (1 - values.clamp(max=LARGEST_LEVERAGE)).rsqrt().unsqueeze(-2)
    return inverse


def sample_size(n_outputs: int, posteriors: int) -> int:
    """Return how many examples are scored: as many as MOST_WORK allows, between the fewest and the most."""
    affordable = int(MOST_WORK / (n_outputs**3 * max(1, posteriors)))
    return max(FEWEST_EXAMPLES, min(MOST_EXAMPLES, affordable))
