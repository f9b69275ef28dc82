"""Ordered classes: P(y <= k) = sigmoid(c_k - f) for cut points c_0 < ... < c_(K-2), from one output.

With a = c_y - f and b = c_(y-1) - f, log p = log sigmoid(a) + log sigmoid(-b) + log(1 - exp(b - a)), where the outer
cut points are minus and plus infinity. Lambda = sum_k p_k score_k^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from laplace.checks import shown
from laplace.errors import InputError, OptionError
from laplace.likelihoods.base import IGNORED, check_range, class_indices
from laplace.likelihoods.classes import OneOfSeveral, drawn_classes
from laplace.linalg.output_curvature import OutputCurvature
from laplace.predictive.links import Link, MonteCarlo
from laplace.predictive.logistic import expected_sigmoid
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.response import at_quantiles

_MOST = 100_000  # classes, if their number is given instead of the cut points


class Ordinal(OneOfSeveral):
    """Predicts one of K ordered classes from one output; labels are class indices (N,), predictions (N, K).

    Args:
        cut_points: The K - 1 ascending cut points that the network was trained with, or the number K of classes. For a
            number, the points are 1 apart and centred at 0: (-1, 0, 1) for K = 4.

    Raises:
        OptionError: there are no cut points, or they do not ascend.
    """

    name = "ordinal"
    options = ("cut_points",)
    ignored = IGNORED
    hessian_is_fisher = False
    default_link = "quadrature"

    def __init__(self, cut_points: int | Sequence[float] | Tensor | None = None) -> None:
        self.cut_points = _checked_cut_points(cut_points)
        self.links = {
            "probit": Link.of_variances(self._probit),
            "mc": Link(MonteCarlo(self.inverse_link, marginal=True)),
            "quadrature": Link.of_variances(self._expected),
        }

    @property
    def described(self) -> str:
        return f"{self.name}({', '.join(f'{c:.6g}' for c in self.cut_points.tolist())})"

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if f.shape[1] != 1:
            raise InputError(
                f"'ordinal' needs one output, to which the cut points are compared; the network's output has shape "
                f"{tuple(f.shape)}. For one logit per class write likelihood='classification'."
            )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        y = class_indices(len(f), y)
        check_range(y, len(self.cut_points) + 1, f"{len(self.cut_points)} cut points")
        return y

    def log_prob(self, f: Tensor, y: Tensor, sigma: Tensor | float = 1.0) -> Tensor:
        return self._log_classes(f).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return self._scores(f).gather(-1, y.unsqueeze(-1))

    def fisher(self, f: Tensor, y: Tensor | None = None) -> OutputCurvature:
        return OutputCurvature(diagonal=(self.inverse_link(f) * self._scores(f).square()).sum(-1, keepdim=True))

    def sample(self, f: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return drawn_classes(self.inverse_link(f.double()), n_samples, generator)

    def inverse_link(self, f: Tensor) -> Tensor:  # (..., 1) -> (..., K)
        return self._log_classes(f).exp()

    def quantiles(self, outputs: OutputGaussian, z: Tensor) -> Tensor:
        """Return quantiles of each class probability.

        The probabilities of the first and last class are monotone in f. The probability of any other class is largest
        halfway between its cut points and falls to both sides.
        """
        f, root, cuts = outputs.mean.double(), outputs.variance.double().sqrt(), self.cut_points.to(outputs.mean.device)
        middles = (cuts[1:] + cuts[:-1]) / 2
        between = middles + _distance(f - middles, root, z.reshape(-1, 1, 1))
        points = torch.cat([at_quantiles(outputs, -z), between, at_quantiles(outputs, z)], -1)  # (Q, N, K)
        return self._log_classes(points).exp()

    def _probit(self, f: Tensor, variance: Tensor) -> Tensor:
        """Return differences of sigmoid((c_k - f) / sqrt(1 + pi/8 S))."""
        upper, lower = self._offsets(f)
        root = torch.sqrt(1 + math.pi / 8 * variance)
        return _log_between(upper / root, lower / root).exp()

    def _expected(self, f: Tensor, variance: Tensor) -> Tensor:
        """Return differences of E[sigmoid(c_k - f)], or of 1 minus it where that is smaller, so that less cancels."""
        upper, lower = self._offsets(f.double())
        over = upper + lower > 0
        high, low = torch.where(over, -lower, upper), torch.where(over, -upper, lower)
        return (expected_sigmoid(high, variance) - expected_sigmoid(low, variance)).clamp(min=0).to(f.dtype)

    def _log_classes(self, f: Tensor) -> Tensor:
        return _log_between(*self._offsets(f))

    def _scores(self, f: Tensor) -> Tensor:  # (..., K)
        """Return d log p_k / df for every class."""
        upper, lower = self._offsets(f)
        return lower.sigmoid() - (-upper).sigmoid()

    def _offsets(self, f: Tensor) -> tuple[Tensor, Tensor]:  # (..., K) each
        """Return a and b for every class."""
        cuts, end = self.cut_points.to(f), f.new_tensor([torch.finfo(f.dtype).max ** 0.5])  # as good as infinity
        return torch.cat([cuts, end]) - f, torch.cat([-end, cuts]) - f


def _log_between(upper: Tensor, lower: Tensor) -> Tensor:
    """Return log(sigmoid(upper) - sigmoid(lower)) without cancellation."""
    return logsigmoid(upper) + logsigmoid(-lower) + torch.log(-torch.expm1(lower - upper))


def _distance(mean: Tensor, root: Tensor, z: Tensor) -> Tensor:  # (N, K), (N, 1), (Q, 1, 1) -> (Q, N, K)
    """Return r with P(|x| > r) = Phi(z) for x ~ N(mean, root^2), by bisection."""
    mean, root = mean.abs(), root.clamp(min=torch.finfo(root.dtype).tiny ** 0.5)
    share, rest = torch.special.ndtr(z), torch.special.ndtr(-z)
    low = torch.zeros_like(mean + z)
    high = low + mean + 40 * root
    for _ in range(64):
        r = (low + high) / 2
        near, far = torch.special.ndtr((mean - r) / root), torch.special.ndtr((-mean - r) / root)
        inside = torch.special.ndtr((r - mean) / root) - far
        more = torch.where(z < 0, near + far > share, inside < rest)  # compare the smaller of the two: it rounds less
        low, high = torch.where(more, r, low), torch.where(more, high, r)
    return (low + high) / 2


def _checked_cut_points(given: int | Sequence[float] | Tensor | None) -> Tensor:
    if isinstance(given, int) and not isinstance(given, bool) and 2 <= given <= _MOST:
        return torch.arange(given - 1, dtype=torch.float64) - (given - 2) / 2
    try:
        points = torch.as_tensor(given, dtype=torch.float64).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        points = torch.empty(0)
    if points.dim() != 1 or not len(points) or not points.isfinite().all() or not (points.diff() > 0).all():
        raise OptionError(
            f"cut_points={shown(given)}: 'ordinal' needs its ascending cut points, Ordinal([-1.0, 0.0, 2.0]) "
            "for four classes, or the number of classes, Ordinal(4), for points that are 1 apart."
        )
    return points
