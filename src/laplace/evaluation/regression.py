"""Scores of regressors and of predictive distributions of numbers, each with its formula.

The order of the arguments is torchmetrics', prediction first. Every score is a Python number computed in float64.
Shapes have to be equal: broadcasting would hide a mistake.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.errors import InputError
from laplace.evaluation.arrays import Values, real_of, same_shape


def rmse(
    mean: Values,  # (N,) or (N, C)
    y: Values,  # like mean
) -> float:
    """Return the root mean squared error over all examples and outputs: sqrt(mean (mean - y)^2).

    Args:
        mean: Predictions, (N,) or (N, C).
        y: Targets of the same shape.

    Returns:
        A number from 0 up; smaller is better.

    Raises:
        InputError: the shapes differ, or values are not finite.
    """
    mean, y = same_shape(mean=real_of(mean, "mean"), y=real_of(y, "y"))
    return (mean - y).square().mean().sqrt().item()


def gaussian_nll(
    mean: Values,  # (N,) or (N, C)
    variance: Values,  # like mean; or (N, C, C), a covariance
    y: Values,  # like mean
) -> float:
    """Return the negative log-likelihood per example of y under N(mean, variance), in nats, summed over outputs.

    With a variance v per output, 1/2 mean_n sum_c [(y - mean)^2 / v + log v + log 2 pi]; with a covariance S, 1/2
    mean_n [(y - mean)^T S^-1 (y - mean) + log det S + C log 2 pi], which costs N Cholesky factorisations. The variance
    is that of y: add the noise to the variance of the network's output before scoring.

    Args:
        mean: Predictions, (N,) or (N, C).
        variance: Variances of the same shape, or covariances (N, C, C).
        y: Targets of the same shape as the mean.

    Returns:
        A number; smaller is better.

    Raises:
        InputError: the shapes do not match, variances are not positive, or values are not finite.
    """
    mean, y = same_shape(mean=real_of(mean, "mean"), y=real_of(y, "y"))
    variance = real_of(variance, "variance").to(mean.device)
    covariance = mean.dim() == 2 and variance.shape == (*mean.shape, mean.shape[-1])
    if not covariance and variance.shape != mean.shape:
        raise InputError(
            f"variance has shape {tuple(variance.shape)}; with means of shape {tuple(mean.shape)} it must have "
            "the same shape, or (N, C, C) as a covariance of means (N, C)."
        )
    residual = (y - mean).reshape(len(y), -1)
    whiten = _whiten_jointly if covariance else _whiten_each
    white, log_det = whiten(residual, variance)
    per_example = white.square().sum(-1) + log_det + residual.shape[-1] * math.log(2 * math.pi)
    return 0.5 * per_example.mean().item()


def gaussian_crps(
    mean: Values,  # (N,) or (N, C)
    variance: Values,  # like mean
    y: Values,  # like mean
) -> float:
    """Return the continuous ranked probability score of y under N(mean, variance), averaged over examples and outputs.

    CRPS = integral (F(t) - [y <= t])^2 dt, for a Gaussian with z = (y - mean) / sd in closed form: sd [z (2 Phi(z) - 1)
    + 2 phi(z) - 1 / sqrt(pi)]. It is in units of y, and equals the absolute error as the variance goes to zero.

    Args:
        mean: Predictions, (N,) or (N, C).
        variance: Variances of y, noise included, of the same shape.
        y: Targets, of the same shape.

    Returns:
        A number from 0 up; smaller is better.

    Raises:
        InputError: the shapes differ, variances are not positive, or values are not finite.
    """
    z, sd = standardised(mean, variance, y)
    normal = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return (sd * (z * torch.erf(z / math.sqrt(2)) + 2 * normal - 1 / math.sqrt(math.pi))).mean().item()


def crps(
    samples: Values,  # (S, N) or (S, N, C)
    y: Values,  # (N,) or (N, C)
) -> float:
    """Return the continuous ranked probability score of y under draws from its predictive distribution.

    mean_s abs(x[s] - y) - 1/2 mean_{s,t} abs(x[s] - x[t]), averaged over examples and outputs: the CRPS of the
    draws' empirical distribution, as in torchmetrics. Costs one sort of the draws. With few draws it is biased upwards,
    by about 1 / S of the spread.

    Args:
        samples: Draws of y, noise included, the draws in front: (S, N) or (S, N, C).
        y: Targets, (N,) or (N, C).

    Returns:
        A number from 0 up, in units of y; smaller is better.

    Raises:
        InputError: the shapes do not match, or values are not finite.
    """
    drawn, y = drawn_for(samples, y)
    s = len(drawn)
    # mean_{s,t} |x_s - x_t| = 2/S^2 sum_s (2 s - S - 1) x_(s), with x_(1) <= ... <= x_(S)
    weights = 2 * torch.arange(1, s + 1, dtype=drawn.dtype, device=drawn.device) - s - 1
    spread = torch.tensordot(weights, drawn.sort(0).values, dims=1) / s**2
    return ((drawn - y).abs().mean(0) - spread).mean().item()


def sharpness(
    variance: Values,  # (N,) or (N, C)
) -> float:
    """Return the root mean predictive variance, sqrt(mean variance). It needs no targets.

    Among calibrated predictions the sharper ones are better. `interval_width` is the same for intervals.

    Args:
        variance: Variances of y, noise included, (N,) or (N, C).

    Returns:
        A number from 0 up, in units of y.

    Raises:
        InputError: variances are negative, or values are not finite.
    """
    (found,) = same_shape(variance=real_of(variance, "variance"))
    if (found < 0).any():
        raise InputError(f"variances must not be negative, the smallest is {found.min().item():.3g}.")
    return found.mean().sqrt().item()


def standardised(mean: Values, variance: Values, y: Values) -> tuple[Tensor, Tensor]:
    """Return (y - mean) / sd and sd, in float64."""
    named = {name: real_of(values, name) for name, values in (("mean", mean), ("variance", variance), ("y", y))}
    mean, variance, y = same_shape(**named)
    if not (variance > 0).all():
        raise InputError(f"variances must be positive, the smallest is {variance.min().item():.3g}.")
    sd = variance.sqrt()
    return (y - mean) / sd, sd


def drawn_for(samples: Values, y: Values) -> tuple[Tensor, Tensor]:  # (S, N[, C]), (N[, C])
    """Return draws and targets in float64. Refuse draws of another shape than the targets with S in front."""
    drawn, y = real_of(samples, "samples"), real_of(y, "y")
    if drawn.dim() not in (2, 3) or drawn.shape[1:] != y.shape or 0 in drawn.shape:
        raise InputError(
            f"samples {tuple(drawn.shape)} must have the shape of y {tuple(y.shape)} with the number of draws in front."
        )
    return drawn, y.to(drawn.device)


def _whiten_each(
    residual: Tensor,  # (N, C)
    variance: Values,  # (N,) or (N, C)
) -> tuple[Tensor, Tensor]:
    if not (variance > 0).all():
        raise InputError(f"variances must be positive, the smallest is {variance.min().item():.3g}.")
    variance = variance.reshape(residual.shape)
    return residual / variance.sqrt(), variance.log().sum(-1)


def _whiten_jointly(
    residual: Tensor,  # (N, C)
    covariance: Tensor,  # (N, C, C)
) -> tuple[Tensor, Tensor]:
    root, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        raise InputError(
            f"{int(failed.count_nonzero())} of {len(covariance)} covariances are not positive definite. "
            "Add the noise: covariance + sigma_noise**2 * torch.eye(C)."
        )
    white = torch.linalg.solve_triangular(root, residual.unsqueeze(-1), upper=False).squeeze(-1)
    return white, 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
