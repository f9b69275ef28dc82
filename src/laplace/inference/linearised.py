"""Compute the Gaussian of the outputs for one posterior and one run of the network, and draws from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward, Jacobian
from laplace.linalg.contrasts import centred, centred_twice
from laplace.linalg.sampling import Draws
from laplace.posterior.posterior import Posterior
from laplace.predictive.links import Link, onto_simplex
from laplace.predictive.outputs import OutputGaussian, require_finite
from laplace.predictive.queries import Contrasts

_CHUNK = 2**25  # how many weights to draw at a time
_LOST = 1e-4  # of a contrast's variance may be lost to rounding


def linearised(posterior: Posterior, f: Tensor, jacobian: Jacobian, with_covariance: bool) -> OutputGaussian:
    """Return N(f, J Sigma J^T), with the variances alone or with each input's covariance."""
    gaussian = posterior.gaussian
    if not with_covariance:
        return OutputGaussian(f, gaussian.variance(jacobian))
    covariance = gaussian.covariance(jacobian)
    return OutputGaussian(f, covariance.diagonal(dim1=1, dim2=2), covariance)


def with_products(posterior: Posterior, f: Tensor, jacobian: Jacobian) -> OutputGaussian:
    """Return N(f, S) with the variances, and S v on request."""
    gaussian = posterior.gaussian
    return OutputGaussian(f, gaussian.variance(jacobian), times=lambda v: gaussian.product(jacobian, v))


def contrasted(posterior: Posterior, forward: Forward, need: Contrasts) -> OutputGaussian:
    """Return the Gaussian of the outputs with that of their contrasts, or that of the contrasts alone.

    If both are asked for, contrasts of covariances will do, unless a common shift is so large that they lose digits.
    """
    f, outputs = forward.outputs, None
    if need.beside:
        outputs = linearised(posterior, f, forward.jacobian(), need.covariances)
        contrasts = None if outputs.covariance is None else _contrasts_of(outputs, outputs.covariance)
        if contrasts is not None:
            return outputs.beside(contrasts)
    contrasts = linearised(posterior, centred(f), forward.jacobian(centred=True), need.covariances)
    return (outputs or contrasts).beside(contrasts)


def _contrasts_of(outputs: OutputGaussian, covariance: Tensor) -> OutputGaussian | None:
    """Return the Gaussian of contrasts; None if its variances would be off by a share of more than `_LOST`."""
    found = centred_twice(covariance.double())
    variance = found.diagonal(dim1=1, dim2=2)
    rounding = torch.finfo(covariance.dtype).eps * outputs.variance.amax(1)
    if (rounding > _LOST * variance.amin(1)).any():
        return None
    return OutputGaussian(centred(outputs.mean), variance.to(covariance), found.to(covariance))


def sampled(
    posterior: Posterior, runs: Callable[[], Iterable[Forward]], draws: Draws, exact: bool
) -> Tensor:  # (S, N, C)
    """Return outputs under draws of the weights: of the network itself if `exact`, else of its linearisation.

    One draw is used for all inputs. `runs` gives the runs of consecutive inputs; it is called once per chunk of draws.
    """
    layout, parts = posterior.fit.layout, []
    held = layout.whole.n_params if exact else layout.n_params
    for start in range(0, draws.n, step := max(1, _CHUNK // held)):
        moves = posterior.gaussian.drawn(min(step, draws.n - start), posterior.fit.mean, draws.generator)
        drawn = [run.perturbed(moves) if exact else run.outputs + run.linearised(moves) for run in runs()]
        parts.append(torch.cat(drawn, 1))
    return require_finite(torch.cat(parts), "the network under draws of the weights", 1)


def through_link(link: Link, outputs: OutputGaussian, draws: Draws) -> tuple[Tensor, int]:
    """Return the mean of the inverse link, (N, K), and for how many inputs it had to be put back on the simplex."""
    p = link.apply(outputs, draws)
    return onto_simplex(p) if link.may_leave_simplex else (p, 0)
