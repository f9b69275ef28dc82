"""Scores of predictive distributions, each with its formula; every one returns a Python number computed in float64.

Classifiers are scored on probabilities p[n, c], not logits, and integer labels y[n]. Regressors are scored on a
Gaussian per example. Arguments may be tensors, numpy arrays or lists. A score costs one pass over its arguments;
`auroc` costs two sorts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.checks import whole_number
from laplace.errors import InputError, OptionError
from laplace.evaluation.arrays import Values, real_of, tensor_of

DEFAULT_BINS = 15


def accuracy(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
) -> float:
    """Return the share of examples whose most probable class is the true one: mean_n [argmax_c p[n, c] = y[n]].

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).

    Returns:
        A number between 0 and 1.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    probs, y = _classified(probs, y)
    return (probs.argmax(-1) == y).double().mean().item()


def nll(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
) -> float:
    """Return the negative log-likelihood per example, in nats: -mean_n log p[n, y[n]].

    Infinite if a true class was given probability zero: the prediction ruled out what happened.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).

    Returns:
        A number from 0 to infinity; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    probs, y = _classified(probs, y)
    return -_of_true_class(probs, y).log().mean().item()


def brier(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
) -> float:
    """Return the Brier score: mean_n sum_c (p[n, c] - [c = y[n]])^2.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).

    Returns:
        A number between 0 and 2; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    probs, y = _classified(probs, y)
    return (probs.square().sum(-1) - 2 * _of_true_class(probs, y) + 1).mean().item()


def confidence(
    probs: Values,  # (N, C)
) -> float:
    """Return the mean probability of the most probable class: mean_n max_c p[n, c]. It needs no labels.

    Args:
        probs: Probabilities, (N, C).

    Returns:
        A number between 1/C and 1.

    Raises:
        InputError: `probs` does not have the shape (N, C), or its rows are not probabilities.
    """
    return _probabilities(probs).amax(-1).mean().item()


def ece(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> float:
    """Return the expected calibration error over equal-width bins of the top probability; see `Reliability.ece`.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.

    Returns:
        A number between 0 and 1; smaller is better.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    return reliability(probs, y, n_bins).ece


@dataclass(frozen=True)
class Reliability:
    """How often the predicted class was right, by how confident the prediction was. Made by `reliability`.

    Bin b holds the examples whose top probability lies in (edges[b], edges[b + 1]]. An empty bin has `nan` as mean
    confidence and as accuracy, and does not count.

    Attributes:
        edges: Edges of the bins, (B + 1,).
        confidence: Mean top probability in each bin, (B,).
        accuracy: Share of correct predictions in each bin, (B,).
        count: Number of examples in each bin, (B,).
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def ece(self) -> float:
        """Return the expected calibration error: sum_b count[b] / N * abs(accuracy[b] - confidence[b])."""
        share = self.count.double() / self.count.sum()
        return (share * self._gap).sum().item()

    @property
    def mce(self) -> float:
        """Return the maximum calibration error: max_b abs(accuracy[b] - confidence[b])."""
        return self._gap.max().item()

    @property
    def _gap(self) -> Tensor:
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)


def reliability(
    probs: Values,  # (N, C)
    y: Values,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> Reliability:
    """Sort the examples into `n_bins` equal-width bins of their top probability.

    Args:
        probs: Probabilities, (N, C).
        y: Class indices, (N,).
        n_bins: How many bins.

    Returns:
        A `Reliability` with mean confidence, accuracy and number of examples in each bin.

    Raises:
        InputError: rows of `probs` are not probabilities, `y` does not hold class indices, or the shapes do not match.
    """
    try:
        n_bins = whole_number(n_bins, "n_bins")
    except OptionError as error:
        raise InputError(str(error)) from error
    probs, y = _classified(probs, y)
    top, label = probs.max(-1)
    return binned(top, label == y, n_bins)


def binned(
    confidence: Tensor,  # (N,)
    correct: Tensor,  # (N,)
    n_bins: int = DEFAULT_BINS,
) -> Reliability:
    """Sort predictions, of each of which it is known whether it was right, into bins of their confidence."""
    top = confidence.double()
    edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64, device=top.device)
    # Only the inner edges: a top probability that rounding has moved above 1 still falls into the last bin.
    index = torch.bucketize(top, edges[1:-1])
    count = torch.bincount(index, minlength=n_bins)
    return Reliability(
        edges=edges,
        confidence=torch.bincount(index, top, minlength=n_bins) / count,
        accuracy=torch.bincount(index, correct.double(), minlength=n_bins) / count,
        count=count,
    )


def auroc(
    scores_in: Values,  # (N,)
    scores_out: Values,  # (M,)
) -> float:
    """Return the area under the ROC curve when a score separates in- from out-of-distribution examples.

    The score must be high inside. The area is the probability that a random example from inside scores higher than a
    random one from outside, with ties counting half: mean_{n,m} [in[n] > out[m]] + 1/2 [in[n] = out[m]]. The usual
    score is the top probability, `probs.amax(-1)`. If a score is high outside, such as an entropy or a variance, pass
    its negative.

    Args:
        scores_in: Scores of examples from inside, (N,).
        scores_out: Scores of examples from outside, (M,).

    Returns:
        A number between 0 and 1; 0.5 is guessing, 1 is perfect.

    Raises:
        InputError: scores are empty, not a vector, or NaN.
    """
    scores_in = _scores(scores_in, "scores_in")
    scores_out = _scores(scores_out, "scores_out").sort().values
    below = torch.searchsorted(scores_out, scores_in, side="left")
    not_above = torch.searchsorted(scores_out, scores_in, side="right")
    return ((below + not_above).double().mean() / (2 * len(scores_out))).item()


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
    mean, y = _same_shape(mean=real_of(mean, "mean"), y=real_of(y, "y"))
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
    mean, y = _same_shape(mean=real_of(mean, "mean"), y=real_of(y, "y"))
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


def coverage(
    lower: Values,  # (N,) or (N, C)
    upper: Values,  # like lower
    y: Values,  # like lower
) -> float:
    """Return the share of targets inside their interval, ends included: mean [lower <= y <= upper].

    A well-calibrated 95 % interval covers close to 0.95 of new data.

    Args:
        lower: Lower ends, (N,) or (N, C).
        upper: Upper ends, of the same shape.
        y: Targets, of the same shape.

    Returns:
        A number between 0 and 1.

    Raises:
        InputError: the shapes differ, a lower end is above its upper end, or a value is nan.
    """
    ends = {name: real_of(end, name, finite=False) for name, end in (("lower", lower), ("upper", upper))}
    lower, upper, y = _same_shape(**ends, y=real_of(y, "y"))
    if (lower > upper).any():
        raise InputError("lower exceeds upper somewhere: pass coverage(lower, upper, y) in this order.")
    return ((lower <= y) & (y <= upper)).double().mean().item()


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


def _of_true_class(probs: Tensor, y: Tensor) -> Tensor:
    return probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def _classified(probs: Values, y: Values) -> tuple[Tensor, Tensor]:
    probs, y = _probabilities(probs), tensor_of(y, "y")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels must be integer class indices, got {y.dtype}. Write y.long(), or y.astype(int).")
    if y.shape != probs.shape[:1]:
        hint = " Write y.argmax(-1) for one-hot labels." if y.shape == probs.shape else ""
        raise InputError(f"labels must have shape ({len(probs)},), one per row of probs, got {tuple(y.shape)}.{hint}")
    n_classes = probs.shape[-1]
    if y.min() < 0 or y.max() >= n_classes:
        raise InputError(
            f"labels must lie in 0..{n_classes - 1} for {n_classes} classes, got {int(y.min())}..{int(y.max())}."
        )
    return probs, y.to(probs.device, torch.long)


def _probabilities(probs: Values) -> Tensor:
    probs = tensor_of(probs, "probs")
    if probs.dim() != 2 or probs.shape[-1] < 2:
        raise InputError(
            f"probs must have shape (N, C) with at least two classes, got {tuple(probs.shape)}. "
            "For a single probability p of class 1, write torch.stack([1 - p, p], -1)."
        )
    if len(probs) == 0:
        raise InputError("probs holds no examples.")
    if probs.is_complex():
        raise InputError(f"probs has dtype {probs.dtype}; real numbers are needed.")
    # Rows in a half-precision type sum to one only to a few parts in a thousand.
    tolerance = 3e-2 if probs.dtype in (torch.float16, torch.bfloat16) else 1e-3
    probs = probs.double()
    # Written so that nan fails too.
    if not ((probs >= -tolerance).all() and ((probs.sum(-1) - 1).abs() <= tolerance).all()):
        raise InputError(
            "every row of probs must be non-negative and sum to one. For logits, write torch.softmax(logits, -1)."
        )
    return probs.clamp_min(0)


def _scores(scores: Values, name: str) -> Tensor:
    found = tensor_of(scores, name)
    if found.dim() != 1 or len(found) == 0:
        raise InputError(f"{name} must be one score per example, shape (N,) with N > 0, got {tuple(found.shape)}.")
    return real_of(found, name, finite=False)  # nan has no rank


def _same_shape(**tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the device of the first one. Refuse shapes that differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        came = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(f"shapes must be equal, since broadcasting would hide a mistake: got {came}.")
    shape = next(iter(shapes.values()))
    if len(shape) not in (1, 2) or 0 in shape:
        raise InputError(f"expected shape (N,) or (N, C) with N > 0, got {shape}.")
    first = next(iter(tensors.values()))
    return [tensor.to(first.device) for tensor in tensors.values()]
