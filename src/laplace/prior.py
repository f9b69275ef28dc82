"""The prior N(mu0, diag(delta)^-1): a scalar or per-weight mean, a scalar, per-tensor or per-weight precision.

What earlier tasks leave is a prior of the same protocol with a curvature of its own: `curved_prior.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.checks import positive, real
from laplace.errors import OptionError
from laplace.structures import per_weight
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace.posterior import Fit, Posterior
    from laplace.structures import Curvature, Gaussian
    from laplace.structures.base import Traces


@dataclass(frozen=True)
class Prior:
    """Mean and precision, as the user gave them.

    Attributes:
        precision: one for all weights, () or (1,); one per tensor, (B,); or one per weight, (P,).
        mean: one for all weights, (); or one per weight, (P,).
    """

    precision: Tensor
    mean: Tensor

    @classmethod
    def of(cls, precision: Tensor | float, mean: Tensor | float) -> Prior:
        """A checked prior from numbers or tensors; lengths are checked once the layout is known."""
        precision = own(positive(precision, "prior_precision"))
        mean = own(real(mean, "prior_mean"))
        if precision.dim() > 1 or mean.dim() > 1:
            raise OptionError(
                f"prior_precision has shape {tuple(precision.shape)} and prior_mean {tuple(mean.shape)}; "
                "each is a scalar or a vector."
            )
        return cls(precision, mean)

    def with_precision(self, precision: Tensor | float) -> Self:
        """The same prior with another delta."""
        return replace(self, precision=Prior.of(precision, 0.0).precision)

    def with_mean(self, mean: Tensor | float) -> Self:
        """The same prior around another mean."""
        return replace(self, mean=Prior.of(1.0, mean).mean)

    def detached(self) -> Self:
        """The same without the graph of its values."""
        return replace(self, precision=self.precision.detach(), mean=self.mean.detach())

    @property
    def needs_grad(self) -> bool:
        """Whether a value requires grad."""
        return self.precision.requires_grad or self.mean.requires_grad

    def check(self, layout: Layout, structures: Sequence[str] = ("diag",)) -> None:
        """Refuse lengths that the layout, or a structure with these prior structures, has no meaning for."""
        blocks, weights = len(layout.names), layout.n_params
        if self.precision.numel() not in (1, blocks, weights):
            raise OptionError(
                f"prior_precision has {self.precision.numel()} values; allowed are 1, {blocks} (one per parameter "
                f"tensor: {', '.join(layout.names)}) or {weights} (one per weight)."
            )
        if "diag" not in structures and self.precision.numel() not in (1, blocks):
            raise OptionError(
                f"a prior precision per weight ({weights} values) has no Kronecker form and none in a kernel. Give a "
                f"scalar, or {blocks} values (one per parameter tensor), or take "
                f"hessian_structure={per_weight()}."
            )
        if self.mean.numel() not in (1, weights):
            raise OptionError(
                f"prior_mean has {self.mean.numel()} values; allowed are 1 or {weights} (one per weight)."
            )

    def blocks(self, layout: Layout, like: Tensor) -> list[Tensor]:
        """The precision of each block: the same scalar for all, a scalar each, or a vector each."""
        self.check(layout)
        precision = self.precision.to(like)
        if not (precision.isfinite() & (precision >= torch.finfo(like.dtype).tiny)).all():
            raise OptionError(
                f"the prior precision is out of range in {like.dtype}: it or the variance becomes 0 or "
                "infinite there. Take values nearer 1, or model.double()."
            )
        if precision.numel() == 1:
            return [precision.reshape(())] * len(layout.names)
        if precision.numel() == len(layout.names):
            return list(precision.unbind())
        return layout.split(precision)

    def diagonal(self, layout: Layout, like: Tensor) -> Tensor:  # (P,)
        """The precision of each weight."""
        pairs = zip(self.blocks(layout, like), layout.sizes, strict=True)
        return torch.cat([delta.reshape(-1).expand(size) for delta, size in pairs])

    def logdet(self, layout: Layout, like: Tensor) -> Tensor:
        """log det of the prior precision."""
        pairs = zip(self.blocks(layout, like), layout.sizes, strict=True)
        return torch.stack([d.double().log().sum() * (size / d.numel()) for d, size in pairs]).sum()

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:  # theta: (P,)
        """(theta - mu0)^T diag(delta) (theta - mu0)."""
        offset = (theta - self.mean.to(theta)).double().square()
        pairs = zip(layout.split(offset), self.blocks(layout, theta), strict=True)
        return torch.stack([(q * d.double()).sum() for q, d in pairs]).sum()

    def distances(self, theta: Tensor, layout: Layout, groups: str) -> Tensor:  # (G,)
        """|theta_g - mu_g|^2 of each group of weights, as in `Gaussian.traces`."""
        return grouped((theta - self.mean.to(theta)).double().square(), layout, groups)

    def traces(self, layout: Layout, like: Tensor, groups: str) -> Traces:
        """Those of the prior's own Gaussian, as `Gaussian.traces`."""
        variances = self.diagonal(layout, like).double().reciprocal()
        return grouped(variances, layout, groups), grouped(variances.square(), layout, groups)

    def curvature(self, fit: Fit, scale: Tensor) -> tuple[Curvature, Tensor]:
        """What the posterior has beside delta: a factorised curvature, and by what it is multiplied."""
        return fit.curvature, scale

    def gaussian(self, fit: Fit, scale: Tensor) -> Gaussian:
        """The posterior N(0, (s H + D)^-1)."""
        curvature, scale = self.curvature(fit, scale)
        return curvature.gaussian(scale, self.blocks(fit.layout, fit.mean))

    def determined(self, posterior: Posterior, traces: Traces, own: Traces) -> tuple[Tensor, Tensor, Tensor]:
        """Of s H: gamma = tr(Sigma s H), its share delta_g tr((Sigma s H Sigma)_gg) and tr(Sigma s H Sigma D).

        `traces` are the posterior's and `own` the prior's, of groups that have one delta each.
        """
        delta, (t, m) = self.precision.double().reshape(-1), traces
        share = delta * (t - (delta * m if m.dim() == 1 else m @ delta))
        return (delta * (own[0] - t)).sum(), share, share.sum()

    def to(self, device: torch.device | str) -> Self:
        """The same prior on `device`."""
        return replace(self, precision=self.precision.to(device), mean=self.mean.to(device))


def grouped(values: Tensor, layout: Layout, groups: str) -> Tensor:  # (P,) -> (G,)
    """Sums over groups: 'scalar' (all weights), 'layerwise' (a tensor each) or 'diag' (a weight each)."""
    if groups == "diag":
        return values
    return torch.stack([part.sum() for part in (layout.split(values) if groups == "layerwise" else [values])])


def own(tensor: Tensor) -> Tensor:
    """A copy that the user cannot write to; the tensor itself where it requires grad."""
    if tensor.requires_grad:
        return tensor
    with torch.inference_mode(False):
        return tensor.detach().clone()
