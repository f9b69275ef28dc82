"""Define the prior N(mu0, diag(delta)^-1): a scalar or per-weight mean, a scalar, per-tensor or per-weight precision.

The prior from earlier tasks, `posterior/task_prior.py`, adds a curvature to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.checks import positive, real
from laplace.errors import OptionError
from laplace.linalg.symmetric import Clipped, or_double, total
from laplace.priors.base import Prior, require_known, shown_values
from laplace.structures import per_weight
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace.structures.gaussian import Traces

_TOGETHER = 2**20  # weights that are copied to float64 at a time


@dataclass(frozen=True)
class Terms:
    """Holds what the evidence takes of a Gaussian prior.

    Attributes:
        traces: of its covariance, by groups of weights, as `Gaussian.traces`.
        scatter: (theta - mu0)^T D (theta - mu0).
        logdet: log det D.
    """

    traces: Traces
    scatter: Tensor
    logdet: Tensor


@dataclass(frozen=True, repr=False, init=False, eq=False)
class GaussianPrior(Prior):
    """Makes weights independent and Gaussian. `prior_precision=` and `prior_mean=` give the same prior.

    Args:
        precision: one number, one per parameter tensor, or one per weight.
        mean: one number, or one per weight.

    Attributes:
        precision: one for all weights, () or (1,); one per tensor, (B,); or one per weight, (P,).
        mean: one for all weights, (); or one per weight, (P,).

    Raises:
        OptionError: a precision is not positive, or a value is not a number.
    """

    precision: Tensor
    mean: Tensor

    name = "gaussian"
    quadratic = True

    def __init__(self, precision: Tensor | float = 1.0, mean: Tensor | float = 0.0) -> None:
        if not (isinstance(precision, Tensor) and isinstance(mean, Tensor)):
            made = GaussianPrior.of(precision, mean)
            precision, mean = made.precision, made.mean
        object.__setattr__(self, "precision", precision)  # frozen
        object.__setattr__(self, "mean", mean)

    @classmethod
    def of(cls, precision: Tensor | float, mean: Tensor | float = 0.0) -> GaussianPrior:
        """Return a prior from numbers or tensors. Checks values now, and lengths once the layout is known."""
        precision = own(positive(precision, "prior_precision"))
        mean = own(real(mean, "prior_mean"))
        if precision.dim() > 1 or mean.dim() > 1:
            raise OptionError(
                f"prior_precision has shape {tuple(precision.shape)} and prior_mean {tuple(mean.shape)}; "
                "each is a scalar or a vector."
            )
        return cls(precision, mean)

    def with_precision(self, precision: Tensor | float) -> Self:
        """Return the same prior with another delta."""
        return replace(self, precision=GaussianPrior.of(precision, 0.0).precision)

    def with_mean(self, mean: Tensor | float) -> Self:
        """Return the same prior with another mean."""
        return replace(self, mean=GaussianPrior.of(1.0, mean).mean)

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return {"precision": self.precision}

    def with_hyperparameters(self, **values: Tensor | float) -> Self:
        require_known(self, list(values))
        return self.with_precision(values["precision"]) if values else self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.precision, self.mean

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, precision=change(self.precision), mean=change(self.mean))

    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        blocks, weights = len(layout.names), layout.n_params
        if self.precision.numel() not in (1, blocks, weights):
            raise OptionError(
                f"prior_precision has {self.precision.numel()} values; allowed are 1, {blocks} (one per parameter "
                f"tensor: {', '.join(layout.names)}) or {weights} (one per weight)."
            )
        if not {"diag", "layerwise"} & {*takes} and self.precision.numel() > 1:
            raise OptionError(
                f"prior_precision has {self.precision.numel()} values, and this posterior over functions has one for "
                "all weights. Give one number, or take functional_approximation='sod' or 'nystrom'."
            )
        if "diag" not in takes and self.precision.numel() not in (1, blocks):
            raise OptionError(
                f"a prior precision per weight ({weights} values) cannot be added to Kronecker factors or kernels. "
                f"Give a scalar, or {blocks} values (one per parameter tensor), or take "
                f"hessian_structure={per_weight()}."
            )
        if self.mean.numel() not in (1, weights):
            raise OptionError(
                f"prior_mean has {self.mean.numel()} values; allowed are 1 or {weights} (one per weight)."
            )

    def blocks(self, layout: Layout, like: Tensor) -> list[Tensor]:
        """Return the precision of each block: the same scalar for all, a scalar each, or a vector each."""
        self.check(layout)
        precision = self.precision.to(like)
        if not (precision.isfinite() & (precision >= torch.finfo(like.dtype).tiny)).all():
            raise OptionError(
                f"the prior precision is out of range in {like.dtype}: it or the variance becomes 0 or "
                f"infinite there. Take values nearer 1{or_double(like.dtype)}."
            )
        if precision.numel() == 1:
            return [precision.reshape(())] * len(layout.names)
        if precision.numel() == len(layout.names):
            return list(precision.unbind())
        return layout.split(precision)

    def precision_at(self, theta: Tensor, layout: Layout) -> tuple[list[Tensor], Clipped]:
        return self.blocks(layout, theta), Clipped()

    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:
        constant = layout.n_params * math.log(2 * math.pi)
        return -0.5 * (self.scatter(theta, layout) - self.logdet(layout, theta) + constant)

    def penalty(self, theta: Tensor, layout: Layout) -> Tensor:
        return 0.5 * self.scatter(theta, layout)

    def logdet(self, layout: Layout, like: Tensor) -> Tensor:
        """Return log det of the prior precision."""
        if self.precision.numel() == 1:
            return self.blocks(layout, like)[0].double().log() * layout.n_params
        pairs = zip(self.blocks(layout, like), layout.sizes, strict=True)
        return torch.stack([d.double().log().sum() * (size / d.numel()) for d, size in pairs]).sum()

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:  # theta: (P,)
        """Return (theta - mu0)^T diag(delta) (theta - mu0)."""
        if self.precision.numel() == self.mean.numel() == 1:  # no need to tell the tensors of the layout apart
            apart = ((part - self.mean.to(part)).double() for part in theta.split(_TOGETHER))
            return total(part.dot(part) for part in apart) * self.blocks(layout, theta)[0].double()
        pairs = zip(self._squares(theta, layout), self.blocks(layout, theta), strict=True)
        return torch.stack([(q * d.double()).sum() for q, d in pairs]).sum()

    def distances(self, theta: Tensor, layout: Layout, groups: str) -> Tensor:  # (G,)
        """Return |theta_g - mu_g|^2 for each group of weights. Groups are those of `Gaussian.traces`."""
        squares = self._squares(theta, layout)
        return torch.cat([*squares]) if groups == "diag" else _grouped([q.sum() for q in squares], groups)

    def _squares(self, theta: Tensor, layout: Layout) -> Iterator[Tensor]:
        """Yield (theta - mu0)^2 in float64, tensor by tensor: of all weights, it would be twice their memory."""
        means = self.mean.to(theta).reshape(-1).expand(layout.n_params)
        for own, mean in zip(layout.split(theta), layout.split(means), strict=True):
            yield (own - mean).double().square()

    def terms(self, theta: Tensor, layout: Layout, groups: str, distances: Tensor) -> Terms:
        """Return what the evidence takes of the prior, if it has one precision for each group of weights.

        `distances` are those of `theta`, (G,): with them, no step of a search goes over the weights again.
        """
        delta = self.precision.double().reshape(-1)
        count = delta.new_tensor({"scalar": [layout.n_params], "layerwise": layout.sizes, "diag": [1]}[groups])
        first = count / delta
        return Terms((first, first / delta), (delta * distances).sum(), (count * delta.log()).sum())

    def state(self, layout: Layout) -> dict[str, Any]:
        return super().state(layout) | {"mean": self.mean.detach().clone()}

    def __repr__(self) -> str:
        return f"GaussianPrior(precision={shown_values(self.precision)}, mean={shown_values(self.mean)})"


def _grouped(of_tensors: list[Tensor], groups: str) -> Tensor:  # (G,)
    """Return the sums over the weights of each tensor ('layerwise'), or their sum ('scalar')."""
    each = torch.stack(of_tensors)
    return each if groups == "layerwise" else each.sum().reshape(1)


def own(tensor: Tensor) -> Tensor:
    """Return a copy that the user cannot write to, or the tensor itself if it requires grad."""
    if tensor.requires_grad:
        return tensor
    with torch.inference_mode(False):
        return tensor.detach().clone()
