"""One posterior, one run of the network: the Gaussian of the outputs, and draws from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributions import Categorical, Dirichlet, Distribution, MultivariateNormal, Normal

from laplace.backprop.gradients import Forward, Jacobian
from laplace.draws import Draws, normals
from laplace.errors import choice
from laplace.posterior import Posterior
from laplace.predictive.entropy import decompose
from laplace.predictive.links import bridge_concentration, bridge_norm_concentration, onto_simplex
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.prediction import Prediction

_CHUNK = 2**25  # elements of the weights drawn at a time

Outputs = OutputGaussian | OutputSamples


def linearised(
    posterior: Posterior, forward: Forward, with_covariance: bool, chosen: Tensor | None = None
) -> OutputGaussian:
    """N(f, J Sigma J^T): the variances alone, or with each input's covariance; of the `chosen` outputs, or of all."""
    jacobian, gaussian = forward.jacobian(chosen), posterior.gaussian
    f = forward.outputs if chosen is None else forward.outputs[:, chosen]
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
    return torch.cat(parts)


def probabilities(
    posterior: Posterior,
    link: str,
    f: Tensor,  # (N, C)
    jacobian: Jacobian,
    draws: Draws,
    independent: bool = False,
    variance: Tensor | None = None,  # (N, C)
) -> tuple[Tensor, int]:
    """Class probabilities (N, C) through one link, and for how many inputs they had to be put back on the simplex.

    The posterior is asked only for what the link needs; `variance` is given where it is known already, and
    `independent` neglects the covariances between outputs.
    """
    likelihood, gaussian = posterior.fit.likelihood, posterior.gaussian
    how = likelihood.links[choice(link, likelihood.links, "link_approx")]
    if how.needs == "covariance" and not independent:
        covariance = gaussian.covariance(jacobian)
        return how.apply(OutputGaussian(f, covariance.diagonal(dim1=1, dim2=2), covariance), draws), 0
    if variance is None:
        variance = gaussian.variance(jacobian)
    if how.needs == "covariance":
        return how.apply(OutputGaussian(f, variance), draws), 0
    if how.needs == "variance":
        return how.apply(f, variance), 0
    p = f.softmax(-1)
    product = p * variance if independent else gaussian.product(jacobian, p)
    return onto_simplex(how.apply(f, variance, product))


def regression(outputs: Outputs, sigma: Tensor) -> Prediction:
    """y = f + sigma eps: a multivariate normal where covariances are known, else independent normals."""
    noise = sigma.to(outputs.mean).square()
    mean, epistemic = outputs.mean, outputs.variance
    aleatoric = noise.expand_as(mean)
    covariance = outputs.covariance if isinstance(outputs, OutputGaussian) else None
    distribution: Distribution
    if covariance is None or mean.shape[1] == 1:
        distribution = Normal(mean, (epistemic + aleatoric).sqrt())
    else:
        eye = torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
        distribution = MultivariateNormal(mean, covariance + noise * eye)
    return Prediction(distribution, mean, epistemic, aleatoric, outputs)


def classification(p: Tensor, outputs: Outputs, link: str, draws: Draws) -> Prediction:
    """y ~ p; the bridges give a distribution over p itself."""
    distribution: Distribution = Categorical(probs=p)
    if isinstance(outputs, OutputGaussian) and link in ("bridge", "bridge_norm"):
        concentration = bridge_concentration if link == "bridge" else bridge_norm_concentration
        distribution = Dirichlet(concentration(outputs.mean, outputs.variance))
    epistemic, aleatoric = decompose(p, outputs, draws)
    return Prediction(distribution, p, epistemic, aleatoric, outputs)
