"""One posterior, one run of the network: the Gaussian of the outputs, and draws from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward, Jacobian
from laplace.budget import Budget
from laplace.draws import Draws, normals
from laplace.posterior import Posterior
from laplace.predictive.links import onto_simplex
from laplace.predictive.outputs import OutputGaussian, require_finite

_CHUNK = 2**25  # elements of the weights drawn at a time


def linearised(posterior: Posterior, f: Tensor, jacobian: Jacobian, with_covariance: bool) -> OutputGaussian:
    """N(f, J Sigma J^T): the variances alone, or with each input's covariance."""
    gaussian = posterior.gaussian
    if not with_covariance:
        return OutputGaussian(f, gaussian.variance(jacobian))
    covariance = gaussian.covariance(jacobian)
    return OutputGaussian(f, covariance.diagonal(dim1=1, dim2=2), covariance)


def sampled(
    posterior: Posterior, runs: Callable[[], Iterable[Forward]], draws: Draws, exact: bool
) -> Tensor:  # (S, N, C)
    """Outputs under draws of the weights, one draw for all inputs: of the network itself (`exact`) or linearised.

    `runs` gives the runs of consecutive inputs, once for every chunk of draws.
    """
    layout, parts = posterior.fit.layout, []
    n_params, held = layout.n_params, layout.whole.n_params if exact else layout.n_params
    for start in range(0, draws.n, step := max(1, _CHUNK // held)):
        eps = normals(min(step, draws.n - start), n_params, posterior.fit.mean, draws.generator)
        moves = posterior.gaussian.color(eps)
        drawn = [run.perturbed(moves) if exact else run.outputs + run.linearised(moves) for run in runs()]
        parts.append(torch.cat(drawn, 1))
    return require_finite(torch.cat(parts), "the network under draws of the weights", 1)


def gaussian_for(
    posterior: Posterior,
    link: str,
    f: Tensor,  # (N, C)
    jacobian: Jacobian,
    independent: bool = False,
    variance: Tensor | None = None,  # (N, C), where it is known already
) -> OutputGaussian:
    """N(f, S) with as much of S as the link needs; `independent` neglects the covariances between outputs."""
    gaussian = posterior.gaussian
    if posterior.fit.likelihood.links[link].needs == "covariance" and not independent:
        covariance = gaussian.covariance(jacobian)
        return OutputGaussian(f, covariance.diagonal(dim1=1, dim2=2), covariance)
    return OutputGaussian(f, gaussian.variance(jacobian) if variance is None else variance)


def through_link(
    posterior: Posterior,
    link: str,
    outputs: OutputGaussian,
    jacobian: Jacobian,
    draws: Draws,
    independent: bool = False,
) -> tuple[Tensor, int]:
    """The mean of the inverse link, (N, K), and for how many inputs it had to be put back on the simplex."""
    how, f = posterior.fit.likelihood.links[link], outputs.mean
    if how.needs == "variance":
        return how.apply(f, outputs.variance), 0
    if how.needs == "covariance" and not independent:
        return how.apply(outputs, draws), 0
    if how.needs in ("marginals", "covariance"):
        return how.apply(OutputGaussian(f, outputs.variance), draws), 0
    p = f.softmax(-1)
    product = p * outputs.variance if independent else posterior.gaussian.product(jacobian, p)
    return onto_simplex(how.apply(f, outputs.variance, product))


@dataclass
class Answer:
    """What a call returns, counted as the inputs run: refused before it would not fit into memory."""

    budget: Budget
    instead: str
    numbers: int = 0

    def on(self, runs: Iterable[Forward], each: int) -> Iterator[Forward]:
        """The same runs, every row of which leaves so many numbers."""
        for run in runs:
            self.numbers += len(run.outputs) * each
            f = run.outputs
            needed = 2 * f.element_size() * self.numbers  # its parts, and all of it
            self.budget.require(needed, f.device, f"an answer of {self.numbers:,} numbers or more", self.instead)
            yield run
