"""Define priors with independent weights: log p(theta) is a sum over the weights, and D is diagonal."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.checks import positive, real
from laplace.errors import InputError, OptionError
from laplace.linalg.bessel import log_k1
from laplace.linalg.symmetric import Clipped
from laplace.priors.base import Prior, clipped_values, require_form, require_known, rounding, slope
from laplace.priors.gaussian import own
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self


class Independent(Prior):
    """Gives every weight the same density around a mean, with hyperparameters for all weights or per tensor.

    A subclass says `log_each`, and gives its hyperparameters to this constructor.

    Args:
        hyperparameters: positive values by name, one number or one per parameter tensor each.
        mean: one number, or one per weight.

    Attributes:
        compared: whether `bend_each` has been compared with autograd.

    Raises:
        OptionError: a hyperparameter is not positive.
    """

    compared: bool = False

    def __init__(self, hyperparameters: Mapping[str, Tensor | float], mean: Tensor | float) -> None:
        self._values = {name: _checked(value, name) for name, value in hyperparameters.items()}
        self.mean = _centre(mean)

    @abstractmethod
    def log_each(self, u: Tensor, **values: Tensor) -> Tensor:  # (p,) -> (p,)
        """Return log p of each weight at the distance u = w - mean.

        Args:
            u: the distances, float64.
            **values: the hyperparameters of this tensor, by name, ().
        """

    def bend_each(self, u: Tensor, **values: Tensor) -> Tensor:  # (p,) -> (p,)
        """Return -d2 log p / du2 of each weight. By default autograd differentiates `log_each`.

        A closed form may replace it. It is compared with autograd when it is first used.

        Args:
            u: the distances, float64.
            **values: the hyperparameters of this tensor, by name, ().
        """
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (u, *values.values()))
        with torch.inference_mode(False), torch.enable_grad():
            at = u.clone() if u.requires_grad else u.detach().clone().requires_grad_()
            log_p = _log_each(self, at, {name: value.clone() for name, value in values.items()})
            return -slope(slope(log_p.sum(), at, keep=True).sum(), at, keep)

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return dict(self._values)

    def with_hyperparameters(self, **values: Tensor | float) -> Self:
        require_known(self, list(values))
        return self._with(self._values | {name: _checked(value, name) for name, value in values.items()}, self.mean)

    def with_mean(self, mean: Tensor | float) -> Self:
        return self._with(self._values, _centre(mean))

    def grouped(self, names: Sequence[str], groups: str, layout: Layout) -> Self:
        if groups != "layerwise":
            return self
        each = {name: self._values[name].reshape(-1).expand(len(layout.names)) for name in names}
        return self._with(self._values | each, self.mean)

    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:
        return torch.stack([_log_each(self, u, values).sum() for u, values in self._parts(theta, layout)]).sum()

    def precision_at(self, theta: Tensor, layout: Layout) -> tuple[list[Tensor], Clipped]:
        pairs = [clipped_values(_bend_each(self, u, values)) for u, values in self._parts(theta, layout)]
        if not all(d.detach().isfinite().all() for d, _ in pairs):
            raise InputError(
                f"the second derivative of {self} is NaN or infinite at these weights. Write log_each with functions "
                "that are twice differentiable there, or bend_each."
            )
        self.compared = True
        return [d.to(theta.dtype) for d, _ in pairs], sum((clipped for _, clipped in pairs), Clipped())

    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        blocks, weights = len(layout.names), layout.n_params
        for name, value in self._values.items():
            if value.numel() not in (1, blocks):
                raise OptionError(
                    f"{name} of {type(self).__name__} has {value.numel()} values; allowed are 1 or {blocks} (one per "
                    f"parameter tensor: {', '.join(layout.names)})."
                )
        if self.mean.numel() not in (1, weights):
            raise OptionError(
                f"mean of {type(self).__name__} has {self.mean.numel()} values; allowed are 1 or {weights} (one per "
                "weight)."
            )
        self.require_structure(takes)

    def require_structure(self, takes: Sequence[str]) -> None:
        require_form(self, "diag", takes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self._values.values(), self.mean)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._with({name: change(value) for name, value in self._values.items()}, change(self.mean))

    def state(self, layout: Layout) -> dict[str, Any]:
        return super().state(layout) | {"mean": self.mean.detach().clone()}

    def restored(self, state: Mapping[str, Any], layout: Layout) -> Self:
        values = {name: value for name, value in state.items() if name not in ("kind", "mean")}
        return self.with_hyperparameters(**values).with_mean(state["mean"])

    def _with(self, values: dict[str, Tensor], mean: Tensor) -> Self:
        other = copy.copy(self)
        other._values, other.mean = values, mean
        return other

    def _parts(self, theta: Tensor, layout: Layout) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the distances of each tensor's weights from the mean, in float64, and its hyperparameters."""
        values = {name: value.to(theta.device, torch.float64).reshape(-1) for name, value in self._values.items()}
        offset = theta.double() - self.mean.to(theta.device, torch.float64)
        for number, u in enumerate(layout.split(offset)):
            yield u, {name: value[number if len(value) > 1 else 0] for name, value in values.items()}


class StudentT(Independent):
    """Gives independent weights a Student-t density: Gaussian near the mean, with tails that allow large weights.

    log p(w) = -(df + 1)/2 log(1 + u^2 / (df scale^2)) + const, u = w - mean. In the tails, |u| > sqrt(df) scale, the
    curvature is negative and is set to zero. `la.tune()` sets the scale. To tune df, too, name it.

    Args:
        df: degrees of freedom, one number or one per parameter tensor. The larger, the closer to a Gaussian.
        scale: the scale of the weights, one number or one per parameter tensor.
        mean: one number, or one per weight.

    Raises:
        OptionError: df or scale is not positive.
    """

    name = "student_t"

    def __init__(self, df: Tensor | float = 4.0, scale: Tensor | float = 1.0, mean: Tensor | float = 0.0) -> None:
        super().__init__({"df": df, "scale": scale}, mean)

    @property
    def tuned(self) -> tuple[str, ...]:
        return ("scale",)

    def log_each(self, u: Tensor, **values: Tensor) -> Tensor:
        df, scale = values["df"], values["scale"]
        norm = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (math.pi * df).log() - scale.log()
        return norm - (df + 1) / 2 * (u.square() / (df * scale.square())).log1p()

    def bend_each(self, u: Tensor, **values: Tensor) -> Tensor:
        width = values["df"] * values["scale"].square()
        return (values["df"] + 1) * (width - u.square()) / (width + u.square()).square()


class SmoothedLaplace(Independent):
    """Gives independent weights a Laplace density, made smooth at the mean: most weights are near it, some far away.

    log p(w) = -sqrt(u^2 + smoothing^2) / scale - log Z, u = w - mean, Z = 2 smoothing K_1(smoothing / scale) with the
    Bessel function K_1. The curvature, smoothing^2 / (scale (u^2 + smoothing^2)^(3/2)), is positive everywhere.
    `la.tune()` sets the scale. To tune smoothing, too, name it.

    Args:
        scale: the scale of the tails, one number or one per parameter tensor.
        smoothing: the width of the smooth part, one number or one per parameter tensor.
        mean: one number, or one per weight.

    Raises:
        OptionError: scale or smoothing is not positive.
    """

    name = "smoothed_laplace"

    def __init__(
        self, scale: Tensor | float = 1.0, smoothing: Tensor | float = 0.01, mean: Tensor | float = 0.0
    ) -> None:
        super().__init__({"scale": scale, "smoothing": smoothing}, mean)

    @property
    def tuned(self) -> tuple[str, ...]:
        return ("scale",)

    def log_each(self, u: Tensor, **values: Tensor) -> Tensor:
        scale, smoothing = values["scale"], values["smoothing"]
        norm = math.log(2) + smoothing.log() + log_k1(smoothing / scale)
        return -(u.square() + smoothing.square()).sqrt() / scale - norm

    def bend_each(self, u: Tensor, **values: Tensor) -> Tensor:
        square = values["smoothing"].square()
        return square / (values["scale"] * (u.square() + square) ** 1.5)


_OURS = (StudentT, SmoothedLaplace)  # which need no comparison


def _log_each(prior: Independent, u: Tensor, values: Mapping[str, Tensor]) -> Tensor:  # (p,)
    return _one_per_weight(prior, "log_each", prior.log_each(u, **values), u)


def _bend_each(prior: Independent, u: Tensor, values: Mapping[str, Tensor]) -> Tensor:  # (p,)
    """Return `bend_each`, which must be what autograd finds at the first weights."""
    bends = _one_per_weight(prior, "bend_each", prior.bend_each(u, **values), u)
    if prior.compared or type(prior) in _OURS or not len(u):
        return bends
    expected, negligible = _bends_of_own(prior, u.detach(), {name: value.detach() for name, value in values.items()})
    apart = (bends.detach() - expected).abs().nan_to_num(0.0)
    worst = int(apart.argmax())
    if apart[worst] > negligible:
        raise OptionError(
            f"{type(prior).__name__}.bend_each is {float(bends.detach()[worst]):.6g} at u = {float(u[worst]):.6g}; "
            f"-d2 log_each / du2 is {float(expected[worst]):.6g} there. Leave out bend_each, or write "
            "bend_each = Independent.bend_each: then autograd computes it."
        )
    return bends


def _bends_of_own(prior: Independent, u: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:  # (p,), ()
    """Return -d2 log p / du2 by autograd, and which differences from it mean nothing.

    Refuse a `log_each` in which a value depends on other weights.

    With D 1 = d, D v = d * v holds for a random v only if D is diagonal.
    """
    v = torch.randn(len(u), dtype=u.dtype, generator=torch.Generator().manual_seed(0)).to(u)
    with torch.inference_mode(False), torch.enable_grad():
        at = u.clone().requires_grad_()
        log_p = _log_each(prior, at, {name: value.clone() for name, value in values.items()})
        slopes = slope(log_p.sum(), at, keep=True)
        expected = -slope(slopes.sum(), at, keep=True).detach()
        mixed = -slope((slopes * v).sum(), at, keep=False)
    coupled = (mixed - expected * v).abs().nan_to_num(0.0).max()
    negligible = rounding(expected, slopes)
    if coupled > negligible:
        raise OptionError(
            f"{type(prior).__name__}.log_each couples weights: a value must depend on its own u alone. For weights "
            "that depend on each other write from_log_density(fn), where fn returns log p of all weights."
        )
    return expected, negligible


def _one_per_weight(prior: Independent, what: str, found: Any, u: Tensor) -> Tensor:
    """Refuse anything but one value per weight."""
    if isinstance(found, Tensor) and found.shape == u.shape:
        return found
    came = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    raise OptionError(
        f"{type(prior).__name__}.{what} returned {came} for u of shape {tuple(u.shape)}. Return one value per weight."
    )


def _checked(value: Tensor | float, name: str) -> Tensor:
    tensor = own(positive(value, name))
    if tensor.dim() > 1:
        raise OptionError(f"{name} has shape {tuple(tensor.shape)}; give one number, or a vector with one per tensor.")
    return tensor


def _centre(mean: Tensor | float) -> Tensor:
    tensor = own(real(mean, "mean"))
    if tensor.dim() > 1:
        raise OptionError(f"mean has shape {tuple(tensor.shape)}; give one number, or a vector with one per weight.")
    return tensor
