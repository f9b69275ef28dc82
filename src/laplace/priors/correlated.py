"""Define a Gaussian prior with correlated weights. A tensor's precision is a matrix or a Kronecker product."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.checks import positive, real
from laplace.errors import OptionError
from laplace.linalg.kronecker import Kronecker
from laplace.linalg.symmetric import Clipped
from laplace.priors.base import Form, Prior, require_form, require_known
from laplace.priors.gaussian import own
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

Matrices = tuple[Tensor, ...]  # of one tensor: (dense,), or (matrix of the rows, matrix of the rest)
_ASYMMETRIC = 1e-5


class CorrelatedGaussian(Prior):
    """Is N(mean, (strength K)^-1) with one matrix K per tensor, by default the unit matrix.

    A tensor's weights are one vector in row-major order. A pair (L, R) means K = L (x) R, with L over the rows (the
    outputs of a linear layer) and R over the rest. `hessian_structure='kron'` accepts pairs, and adds them exactly.
    'full' and 'block' accept both. `la.tune()` sets the strength.

    Args:
        matrices: {name of a parameter: a matrix (p, p), or a pair of (O, O) and (I, I)}, positive definite.
        strength: one number, or one per parameter tensor.
        mean: one number, or one per weight.

    Raises:
        OptionError: a matrix is not symmetric and positive definite, or a strength is not positive.
    """

    name = "correlated_gaussian"
    quadratic = True

    def __init__(
        self,
        matrices: Mapping[str, Tensor | tuple[Tensor, Tensor]],
        strength: Tensor | float = 1.0,
        mean: Tensor | float = 0.0,
    ) -> None:
        if not isinstance(matrices, Mapping) or not all(isinstance(name, str) for name in matrices):
            raise OptionError("matrices must be a mapping: {'0.weight': K} or {'0.weight': (L, R)}.")
        self._matrices = {name: _checked_matrices(name, given) for name, given in matrices.items()}
        self.strength, self.mean = _strength(strength), own(real(mean, "mean"))

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return {"strength": self.strength}

    def with_hyperparameters(self, **values: Tensor | float) -> Self:
        require_known(self, list(values))
        return self._with(self._matrices, _strength(values["strength"]), self.mean) if values else self

    def with_mean(self, mean: Tensor | float) -> Self:
        return self._with(self._matrices, self.strength, own(real(mean, "mean")))

    def grouped(self, names: Sequence[str], groups: str, layout: Layout) -> Self:
        if groups != "layerwise" or "strength" not in names:
            return self
        return self._with(self._matrices, self.strength.reshape(-1).expand(len(layout.names)), self.mean)

    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:
        constant = layout.n_params * math.log(2 * math.pi)
        return -0.5 * (self.scatter(theta, layout) - self.logdet(layout, theta) + constant)

    def penalty(self, theta: Tensor, layout: Layout) -> Tensor:
        return 0.5 * self.scatter(theta, layout)

    def precision_at(self, theta: Tensor, layout: Layout) -> tuple[list[Form], Clipped]:
        return self._forms(layout, theta.device, theta.dtype), Clipped()

    def scatter(self, theta: Tensor, layout: Layout) -> Tensor:
        offset = theta.double() - self.mean.to(theta.device, torch.float64)
        forms = self._forms(layout, theta.device, torch.float64)
        return torch.stack([_quadratic(d, u) for d, u in zip(forms, layout.split(offset), strict=True)]).sum()

    def logdet(self, layout: Layout, like: Tensor) -> Tensor:
        forms = self._forms(layout, like.device, torch.float64)
        return torch.stack([_logdet(d, size) for d, size in zip(forms, layout.sizes, strict=True)]).sum()

    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        blocks, weights = len(layout.names), layout.n_params
        if unknown := [name for name in self._matrices if name not in layout.names]:
            raise OptionError(
                f"matrices has {unknown[0]!r}, which is not an uncertain tensor. These are: {', '.join(layout.names)}."
            )
        if self.strength.numel() not in (1, blocks):
            raise OptionError(
                f"strength has {self.strength.numel()} values; allowed are 1 or {blocks} (one per parameter tensor: "
                f"{', '.join(layout.names)})."
            )
        if self.mean.dim() > 1 or self.mean.numel() not in (1, weights):
            raise OptionError(f"mean has {self.mean.numel()} values; allowed are 1 or {weights} (one per weight).")
        for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
            if name in self._matrices:
                _require_sides(name, self._matrices[name], shape, size)
                form = "kron" if len(self._matrices[name]) == 2 or len(shape) < 2 else "dense"
                require_form(self, form, takes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.strength, self.mean, *(m for given in self._matrices.values() for m in given))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        matrices = {name: tuple(map(change, given)) for name, given in self._matrices.items()}
        return self._with(matrices, change(self.strength), change(self.mean))

    def state(self, layout: Layout) -> dict[str, Any]:
        given = [[m.detach().clone() for m in self._matrices.get(name, ())] for name in layout.names]
        return super().state(layout) | {"mean": self.mean.detach().clone(), "matrices": given}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], layout: Layout) -> CorrelatedGaussian:
        pairs = zip(layout.names, state["matrices"], strict=True)
        matrices = {name: given[0] if len(given) == 1 else tuple(given) for name, given in pairs if len(given)}
        return cls(matrices, state["strength"], state["mean"])

    def __repr__(self) -> str:
        n = len(self._matrices)
        return super().__repr__().replace("(", f"({n} {'matrix' if n == 1 else 'matrices'}, ", 1)

    def _with(self, matrices: dict[str, Matrices], strength: Tensor, mean: Tensor) -> Self:
        other = copy.copy(self)
        other._matrices, other.strength, other.mean = matrices, strength, mean
        return other

    def _forms(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> list[Form]:
        strengths = self.strength.to(device, dtype).reshape(-1).expand(len(layout.names))
        forms: list[Form] = []
        for name, shape, strength in zip(layout.names, layout.shapes, strengths, strict=True):
            given = [m.to(device, dtype) for m in self._matrices.get(name, ())]
            if not given:
                forms.append(strength)
            elif len(given) == 2:
                forms.append(Kronecker(strength, *given))
            elif len(shape) < 2:
                forms.append(Kronecker(strength, given[0], torch.ones(1, 1, dtype=dtype, device=device)))
            else:
                forms.append(strength * given[0])
        return forms


def _strength(value: Tensor | float) -> Tensor:
    tensor = own(positive(value, "strength"))
    if tensor.dim() > 1:
        raise OptionError(f"strength has shape {tuple(tensor.shape)}; give one number, or one per tensor.")
    return tensor


def _checked_matrices(name: str, given: Any) -> Matrices:
    parts = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(parts) not in (1, 2) or not all(isinstance(m, Tensor) and m.is_floating_point() for m in parts):
        raise OptionError(f"the precision of {name!r} must be a matrix, or a pair of matrices (rows, rest).")
    for m in parts:
        if m.dim() != 2 or m.shape[0] != m.shape[1] or not m.isfinite().all():
            raise OptionError(f"a precision of {name!r} has shape {tuple(m.shape)}; it must be square and finite.")
        if (m - m.T).abs().max() > _ASYMMETRIC * m.abs().max():
            raise OptionError(f"a precision of {name!r} is not symmetric. Write (K + K.T) / 2.")
        if torch.linalg.cholesky_ex(m.detach().double())[1]:
            raise OptionError(f"a precision of {name!r} is not positive definite. Add a multiple of the unit matrix.")
    return tuple(own((m + m.T) / 2) for m in parts)


def _require_sides(name: str, matrices: Matrices, shape: tuple[int, ...], size: int) -> None:
    rows = shape[0] if shape else 1
    pair = [rows, size // rows] if len(shape) > 1 else [size, 1]
    allowed = [[size], pair]
    came = [len(m) for m in matrices]
    if came not in allowed:
        words = " and ".join(f"({side}, {side})" for side in came)
        raise OptionError(
            f"the precision of {name!r} has shape {words}; its weights {shape} need ({size}, {size}), or a pair "
            f"({pair[0]}, {pair[0]}) and ({pair[1]}, {pair[1]})."
        )


def _quadratic(form: Form, u: Tensor) -> Tensor:  # (p,) -> ()
    if isinstance(form, Kronecker):
        return form.quadratic(u)
    return u @ form @ u if form.dim() == 2 else form * u.square().sum()


def _logdet(form: Form, size: int) -> Tensor:
    if isinstance(form, Kronecker):
        return form.logdet()
    return torch.linalg.slogdet(form)[1] if form.dim() == 2 else size * form.log()
