"""Scores of predictive distributions, each with its formula; every one returns a Python number computed in float64.

Classifiers are scored on probabilities p[n, c], not logits, and integer labels y[n]. Regressors are scored on a
Gaussian per example. A score costs one pass over its arguments; `auroc` costs two sorts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import InputError

DEFAULT_BINS = 15


def accuracy(
    probs: Tensor,  # (N, C)
    y: Tensor,  # (N,)
) -> float:
    """Share of examples whose most probable class is the true one: mean_n [argmax_c p[n, c] = y[n]].

    Args:
        probs: probabilities, (N, C).
        y: class indices, (N,).

    Raises:
        InputError: probabilities or labels that are none, or of other shapes.
    """
    probs, y = _classified(probs, y)
    return (probs.argmax(-1) == y).double().mean().item()


def nll(
    probs: Tensor,  # (N, C)
    y: Tensor,  # (N,)
) -> float:
    """Negative log-likelihood per example, in nats: -mean_n log p[n, y[n]].

    Infinite when a true class was given probability zero: that is the score of having ruled out what happened.

    Args:
        probs: probabilities, (N, C).
        y: class indices, (N,).

    Raises:
        InputError: probabilities or labels that are none, or of other shapes.
    """
    probs, y = _classified(probs, y)
    return -_of_true_class(probs, y).log().mean().item()


def brier(
    probs: Tensor,  # (N, C)
    y: Tensor,  # (N,)
) -> float:
    """Brier score, between 0 and 2: mean_n sum_c (p[n, c] - [c = y[n]])^2.

    Args:
        probs: probabilities, (N, C).
        y: class indices, (N,).

    Raises:
        InputError: probabilities or labels that are none, or of other shapes.
    """
    probs, y = _classified(probs, y)
    return (probs.square().sum(-1) - 2 * _of_true_class(probs, y) + 1).mean().item()


def confidence(
    probs: Tensor,  # (N, C)
) -> float:
    """Mean probability of the most probable class: mean_n max_c p[n, c]. It needs no labels.

    Args:
        probs: probabilities, (N, C).

    Raises:
        InputError: probabilities or labels that are none, or of other shapes.
    """
    return _probabilities(probs).amax(-1).mean().item()


def ece(
    probs: Tensor,  # (N, C)
    y: Tensor,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Expected calibration error over equal-width bins of the top probability; see `Reliability.ece`.

    Args:
        probs: probabilities, (N, C).
        y: class indices, (N,).
        n_bins: how many bins.

    Raises:
        InputError: probabilities or labels that are none, or of other shapes.
    """
    return reliability(probs, y, n_bins).ece


@dataclass(frozen=True)
class Reliability:
    """How often the predicted class was right, by how sure the prediction was; `reliability` makes one.

    Bin b holds the examples whose top probability lies in (edges[b], edges[b + 1]]. An empty bin has the mean
    confidence and the accuracy `nan`, and counts for nothing.

    Attributes:
        edges: of the bins, (B + 1,).
        confidence: mean top probability in each bin, (B,).
        accuracy: share of right predictions in each bin, (B,).
        count: examples in each bin, (B,).
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def ece(self) -> float:
        """Expected calibration error: sum_b count[b] / N * abs(accuracy[b] - confidence[b])."""
        share = self.count.double() / self.count.sum()
        return (share * self._gap).sum().item()

    @property
    def mce(self) -> float:
        """Maximum calibration error: max_b abs(accuracy[b] - confidence[b])."""
        return self._gap.max().item()

    @property
    def _gap(self) -> Tensor:
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)


def reliability(
    probs: Tensor,  # (N, C)
    y: Tensor,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> Reliability:
    """The examples in `n_bins` equal-width bins of their top probability.

    Args:
        probs: probabilities, (N, C).
        y: class indices, (N,).
        n_bins: how many bins.

    Raises:
        InputError: probabilities or labels that are none, or of other shapes.
    """
    if n_bins < 1:
        raise InputError(f"n_bins must be at least 1, got {n_bins}.")
    probs, y = _classified(probs, y)
    top, label = probs.max(-1)
    edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64, device=probs.device)
    # The inner edges alone: a top probability that rounding carried above 1 still falls in the last bin.
    index = torch.bucketize(top, edges[1:-1])
    count = torch.bincount(index, minlength=n_bins)
    return Reliability(
        edges=edges,
        confidence=torch.bincount(index, top, minlength=n_bins) / count,
        accuracy=torch.bincount(index, (label == y).double(), minlength=n_bins) / count,
        count=count,
    )


def auroc(
    scores_in: Tensor,  # (N,)
    scores_out: Tensor,  # (M,)
) -> float:
    """Area under the ROC curve of telling in- from out-of-distribution by a score that is high inside.

    It is the chance that a random example from inside outscores a random one from outside, ties counting half:
    mean_{n,m} [in[n] > out[m]] + 1/2 [in[n] = out[m]]. One half is guessing. The usual score is the top probability,
    `probs.amax(-1)`; of a score that is high outside, such as an entropy or a variance, pass the negative.

    Args:
        scores_in: of examples from inside, (N,).
        scores_out: of examples from outside, (M,).

    Raises:
        InputError: scores that are empty, not a vector, or NaN.
    """
    scores_in = _scores(scores_in, "scores_in")
    scores_out = _scores(scores_out, "scores_out").sort().values
    below = torch.searchsorted(scores_out, scores_in, side="left")
    not_above = torch.searchsorted(scores_out, scores_in, side="right")
    return ((below + not_above).double().mean() / (2 * len(scores_out))).item()


def rmse(
    mean: Tensor,  # (N,) or (N, C)
    y: Tensor,  # like mean
) -> float:
    """Root mean squared error over all examples and outputs: sqrt(mean (mean - y)^2).

    Args:
        mean: predictions, (N,) or (N, C).
        y: targets of the same shape.

    Raises:
        InputError: shapes that differ.
    """
    _same_shape(mean=mean, y=y)
    return (mean.double() - y.double()).square().mean().sqrt().item()


def gaussian_nll(
    mean: Tensor,  # (N,) or (N, C)
    variance: Tensor,  # like mean; or (N, C, C), a covariance
    y: Tensor,  # like mean
) -> float:
    """Negative log-likelihood per example of y under N(mean, variance), in nats, summed over the outputs.

    With a variance v per output, 1/2 mean_n sum_c [(y - mean)^2 / v + log v + log 2 pi]; with a covariance S,
    1/2 mean_n [(y - mean)^T S^-1 (y - mean) + log det S + C log 2 pi], at the price of N Cholesky factors.
    The variance is that of y: add the noise to the variance of the network's output before scoring.

    Args:
        mean: predictions, (N,) or (N, C).
        variance: of the same shape, or (N, C, C), a covariance.
        y: targets of the same shape as the mean.

    Raises:
        InputError: shapes that do not fit, variances that are not positive.
    """
    _same_shape(mean=mean, y=y)
    covariance = mean.dim() == 2 and variance.shape == (*mean.shape, mean.shape[-1])
    if not covariance and variance.shape != mean.shape:
        raise InputError(
            f"variance has shape {tuple(variance.shape)}; with means of shape {tuple(mean.shape)} it must have "
            "the same shape, or (N, C, C) as a covariance of means (N, C)."
        )
    residual = (y.double() - mean.double()).reshape(len(y), -1)
    whiten = _whiten_jointly if covariance else _whiten_each
    white, log_det = whiten(residual, variance.double())
    per_example = white.square().sum(-1) + log_det + residual.shape[-1] * math.log(2 * math.pi)
    return 0.5 * per_example.mean().item()


def coverage(
    lower: Tensor,  # (N,) or (N, C)
    upper: Tensor,  # like lower
    y: Tensor,  # like lower
) -> float:
    """Share of targets inside their interval, ends included: mean [lower <= y <= upper].

    An honest 95 % interval covers close to 0.95 of new data.

    Args:
        lower: lower ends, (N,) or (N, C).
        upper: upper ends.
        y: targets.

    Raises:
        InputError: shapes that differ, or a lower end above its upper one.
    """
    _same_shape(lower=lower, upper=upper, y=y)
    if (lower > upper).any():
        raise InputError("lower exceeds upper somewhere: pass coverage(lower, upper, y) in this order.")
    return ((lower <= y) & (y <= upper)).double().mean().item()


def _whiten_each(
    residual: Tensor,  # (N, C)
    variance: Tensor,  # (N,) or (N, C)
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


def _of_true_class(probs: Tensor, y: Tensor) -> Tensor:
    return probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def _classified(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    probs = _probabilities(probs)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels must be integer class indices, got {y.dtype}. Write y.long().")
    if y.shape != probs.shape[:1]:
        hint = " Write y.argmax(-1) for one-hot labels." if y.shape == probs.shape else ""
        raise InputError(f"labels must have shape ({len(probs)},), one per row of probs, got {tuple(y.shape)}.{hint}")
    n_classes = probs.shape[-1]
    if y.min() < 0 or y.max() >= n_classes:
        raise InputError(
            f"labels must lie in 0..{n_classes - 1} for {n_classes} classes, got {int(y.min())}..{int(y.max())}."
        )
    return probs, y.to(probs.device, torch.long)


def _probabilities(probs: Tensor) -> Tensor:
    if probs.dim() != 2 or probs.shape[-1] < 2:
        raise InputError(
            f"probs must have shape (N, C) with at least two classes, got {tuple(probs.shape)}. "
            "For a single probability p of class 1, write torch.stack([1 - p, p], -1)."
        )
    if len(probs) == 0:
        raise InputError("probs holds no examples.")
    # Rows in a half-precision type sum to one only to a few parts in a thousand.
    tolerance = 1e-3 if probs.dtype in (torch.float32, torch.float64) else 3e-2
    probs = probs.detach().double()
    # Written so that nan fails too.
    if not ((probs >= -tolerance).all() and ((probs.sum(-1) - 1).abs() <= tolerance).all()):
        raise InputError(
            "every row of probs must be non-negative and sum to one. For logits, write torch.softmax(logits, -1)."
        )
    return probs.clamp_min(0)


def _scores(scores: Tensor, name: str) -> Tensor:
    if scores.dim() != 1 or len(scores) == 0:
        raise InputError(f"{name} must be one score per example, shape (N,) with N > 0, got {tuple(scores.shape)}.")
    if scores.isnan().any():
        raise InputError(f"{name} holds nan, which has no rank.")
    return scores.detach().double()


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        came = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"shapes must be equal, since broadcasting would hide a mistake: got {came}.")
    shape = next(iter(shapes.values()))
    if len(shape) not in (1, 2) or 0 in shape:
        raise InputError(f"expected shape (N,) or (N, C) with N > 0, got {shape}.")
